"""Fair queues: clients take turns, so one that sends much waits behind those that send little."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from plait.errors import CapacityError

T = TypeVar("T")
asker: ContextVar[str] = ContextVar("asker", default="")
"""The client that the work in progress is for: an API key's name, or a client's address."""


class Lanes(Generic[T]):
    """Items that wait, in a lane for each key. Lanes take turns; in a lane the first is first. Not locked."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[T]] = OrderedDict()

    def put(self, key: str, item: T) -> None:
        """Let an item wait behind the others of its key."""
        self._lanes.setdefault(key, deque()).append(item)

    def take(self, skipped: Collection[str] = ()) -> tuple[str, T] | None:
        """The next item with its key, of a lane that is not `skipped`; None: there is none."""
        key = next((key for key in self._lanes if key not in skipped), None)
        if key is None:
            return None
        lane = self._lanes.pop(key)
        item = lane.popleft()
        if lane:
            self._lanes[key] = lane  # behind all others
        return key, item

    def drop(self, key: str, item: T) -> None:
        """Take an item out of a lane, if it is there."""
        lane = self._lanes.get(key)
        if lane is not None and item in lane:
            lane.remove(item)
            if not lane:
                del self._lanes[key]

    def count(self, key: str) -> int:
        """How many items of a key wait."""
        return len(self._lanes.get(key, ()))


class FairQueue(Lanes[T]):
    """Lanes by client, of which each has at most `each` items in work. Not locked."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self._each, self._working = each, Counter[str]()

    def take(self, skipped: Collection[str] = ()) -> tuple[str, T] | None:
        """The next item and its client, which goes to the end of the line; `done` must follow."""
        busy = [who for who, count in self._working.items() if count >= self._each]
        found = super().take([*skipped, *busy])
        if found is not None:
            self._working[found[0]] += 1
        return found

    def done(self, who: str) -> None:
        self._working[who] -= 1
        if not self._working[who]:
            del self._working[who]


class Turns:
    """Deals out `places` to work at, from 0, of which one client has at most `each`. Thread-safe."""

    def __init__(self, places: int, each: int) -> None:
        self._free, self._queue = list(range(places)), FairQueue[_Turn](each)
        self._lock = threading.Lock()

    @contextmanager
    def take(self, wait_s: float, refusal: str) -> Iterator[int]:
        """A place for the current `asker`, the lowest that is free. Raises CapacityError(refusal)."""
        turn, who = _Turn(), asker.get()
        with self._lock:
            self._queue.put(who, turn)
            self._deal()
        if not turn.came.wait(wait_s):
            with self._lock:
                if turn.place is None:
                    self._queue.drop(who, turn)
                    raise CapacityError(refusal)
        place = turn.place
        assert place is not None
        try:
            yield place
        finally:
            with self._lock:
                self._free.append(place)
                self._queue.done(who)
                self._deal()

    def _deal(self) -> None:
        while self._free and (found := self._queue.take()):
            turn = found[1]
            turn.place = min(self._free)
            self._free.remove(turn.place)
            turn.came.set()


@dataclass(eq=False)
class _Turn:
    """A client's turn, which waits for a place."""

    came: threading.Event = field(default_factory=threading.Event)
    place: int | None = None
