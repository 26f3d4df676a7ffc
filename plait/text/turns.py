"""Fair turns: whoever asks for much waits behind those who ask for little, not before them."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Generic, TypeVar

from plait.errors import CapacityError

T = TypeVar("T")
asker: ContextVar[str] = ContextVar("asker", default="")
"""Who the work in progress is for: an API key's name, or a client's address."""


class FairQueue(Generic[T]):
    """Items that wait. Askers take turns, and each has at most `each` items in work. Not thread-safe."""

    def __init__(self, each: int) -> None:
        self._each, self._working = each, Counter[str]()
        self._waiting: OrderedDict[str, deque[T]] = OrderedDict()

    def put(self, who: str, item: T) -> None:
        self._waiting.setdefault(who, deque()).append(item)

    def take(self) -> tuple[str, T] | None:
        """The next item and its asker, who goes to the end of the line; `done` must follow."""
        who = next((who for who in self._waiting if self._working[who] < self._each), None)
        if who is None:
            return None
        items = self._waiting.pop(who)
        item = items.popleft()
        if items:
            self._waiting[who] = items
        self._working[who] += 1
        return who, item

    def done(self, who: str) -> None:
        self._working[who] -= 1
        if not self._working[who]:
            del self._working[who]

    def drop(self, who: str, item: T) -> None:
        """Forget an item that waits."""
        self._waiting[who].remove(item)
        if not self._waiting[who]:
            del self._waiting[who]


class Turns:
    """`places` to work at, from 0, of which one asker has at most `each`. Thread-safe."""

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


class _Turn:
    """One who waits for a place."""

    def __init__(self) -> None:
        self.came = threading.Event()
        self.place: int | None = None
