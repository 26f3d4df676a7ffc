"""Who is next: jobs of several keys, which take turns."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Collection
from typing import Generic, TypeVar

T = TypeVar("T")


class Turns(Generic[T]):
    """Jobs in lanes, one for each key. Lanes take turns; in a lane the first is first. Not thread-safe."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[T]] = OrderedDict()

    def put(self, key: str, job: T) -> None:
        """Let a job wait behind the others of its key."""
        self._lanes.setdefault(key, deque()).append(job)

    def take(self, skipped: Collection[str] = ()) -> tuple[str, T] | None:
        """The next job with its key, of a lane that is not `skipped`; None: there is none."""
        key = next((key for key in self._lanes if key not in skipped), None)
        if key is None:
            return None
        lane = self._lanes.pop(key)
        job = lane.popleft()
        if lane:
            self._lanes[key] = lane  # behind all others
        return key, job

    def drop(self, key: str, job: T) -> None:
        """Take a job out of a lane, if it is there."""
        lane = self._lanes.get(key)
        if lane is not None and job in lane:
            lane.remove(job)
            if not lane:
                del self._lanes[key]

    def count(self, key: str) -> int:
        """How many jobs of a key wait."""
        return len(self._lanes.get(key, ()))
