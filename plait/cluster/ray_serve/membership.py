"""Which replicas there are, as the router of this process last heard it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Membership:
    """Ids of replicas, from the thread that hears of them to the one that connects. Safe from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._replicas: tuple[str, ...] = ()
        self._listener: Callable[[tuple[str, ...]], None] | None = None

    def publish(self, replicas: Sequence[str]) -> None:
        """These take requests now."""
        with self._lock:
            self._replicas, listener = tuple(replicas), self._listener
        if listener is not None:
            listener(tuple(replicas))

    def listen(self, listener: Callable[[tuple[str, ...]], None]) -> None:
        """Have it called with the ids now and after each change; one listener at a time."""
        with self._lock:
            self._listener, replicas = listener, self._replicas
        listener(replicas)


MEMBERSHIP = Membership()  # of the one gateway of a process
