"""The event-loop bridge: passes events from the engine's thread to an event loop, and wakes it once for all.

Waking a loop is a call of the system, and a step of sixty-four streams would make sixty-four.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque

from plait.request import Event

Inbox = asyncio.Queue[Event]


class Courier:
    """Fills the inboxes of one event loop. `put` is safe from any thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._parcels: deque[tuple[Inbox, Event]] = deque()

    def put(self, inbox: Inbox, event: Event) -> None:
        """Have the loop put an event into one of its queues, after those that were given before."""
        with self._lock:
            self._parcels.append((inbox, event))
            if len(self._parcels) == 1:
                # The loop may be gone already when a server is stopped with requests open.
                with contextlib.suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            parcels, self._parcels = self._parcels, deque()
        for inbox, event in parcels:
            inbox.put_nowait(event)


class Couriers:
    """One event-loop bridge for each event loop that needs one, until the loop is closed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_loop: dict[asyncio.AbstractEventLoop, Courier] = {}

    def of(self, loop: asyncio.AbstractEventLoop) -> Courier:
        """The bridge of this loop."""
        with self._lock:
            found = self._by_loop.get(loop)
            if found is None:
                # A bridge holds its loop, so no loop would ever be freed by itself.
                self._by_loop = {one: its for one, its in self._by_loop.items() if not one.is_closed()}
                found = self._by_loop[loop] = Courier(loop)
            return found
