"""Brings events from the thread that receives them to the event loops that read them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from plait.request import Event

if TYPE_CHECKING:  # commands have no event loop, and would start later for it
    import asyncio

    Inbox = asyncio.Queue[Event]


class _Delivering(threading.local):
    """The bridges that the events of this thread wait in, within `wake_together`; else None."""

    bridges: list[LoopBridge] | None = None


_delivering = _Delivering()


@contextmanager
def wake_together() -> Iterator[None]:
    """Wake event loops behind all events that this thread puts within, each loop once.

    A loop that is woken by the first of sixteen events takes turns with the thread that brings the others.
    """
    found: list[LoopBridge] = []
    _delivering.bridges = found
    try:
        yield
    finally:
        _delivering.bridges = None
        for bridge in found:
            bridge.wake()


class LoopBridge:
    """Fills the inboxes of one event loop. `put` is safe from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._events: deque[tuple[Inbox, Event]] = deque()

    def put(self, inbox: Inbox, event: Event) -> None:
        """Have the loop put an event into one of its queues, after those that were given before."""
        with self._lock:
            self._events.append((inbox, event))
            if len(self._events) > 1:
                return
        if _delivering.bridges is None:
            self.wake()
        else:
            _delivering.bridges.append(self)

    def wake(self) -> None:
        """Have the loop take what was put."""
        # The loop may be gone already when a server is stopped with requests open.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            events, self._events = self._events, deque()
        for inbox, event in events:
            inbox.put_nowait(event)


class LoopBridges:
    """One event-loop bridge for each event loop that needs one, until the loop is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_loop: dict[asyncio.AbstractEventLoop, LoopBridge] = {}

    def of(self, loop: asyncio.AbstractEventLoop) -> LoopBridge:
        """The bridge of this loop."""
        with self._lock:
            found = self._by_loop.get(loop)
            if found is None:
                # A bridge holds its loop, so no loop would ever be freed by itself.
                self._by_loop = {one: its for one, its in self._by_loop.items() if not one.is_closed()}
                found = self._by_loop[loop] = LoopBridge(loop)
            return found
