"""The loading state of the model: HTTP answers from the first moment, and reports how far loading is."""

from __future__ import annotations

import math
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.server.http.errors import NotReady

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

TOTALS = frozenset(
    {"num_steps", "num_prompt_tokens", "num_output_tokens", "num_preemptions", "num_swaps", "num_restarts"}
)


@dataclass(frozen=True, slots=True)
class LoadingProgress:
    """How far loading is: `done` of `total` steps of what `text` names."""

    text: str = "starting"
    done: int = 0
    total: int = 0


class Health(msgspec.Struct, kw_only=True, frozen=True):
    """The body of /health. `engine`: current values; `totals`: counters; `progress`: while it loads."""

    status: Literal["ok", "loading", "unhealthy", "stopping"]
    progress: LoadingProgress | UnsetType = UNSET
    engine: dict[str, Any] | UnsetType = UNSET
    totals: dict[str, Any] | UnsetType = UNSET


class Readiness(msgspec.Struct, frozen=True):
    """The body of /ready and /live: whether new requests are accepted, or why not."""

    status: str


class LoadingState:
    """Holds the Front once it is there. Written by the loading thread, read by the event loop.

    `timeout_s`: loading without progress for so long counts as stuck.
    """

    def __init__(self, front: Front | None = None, timeout_s: float = math.inf) -> None:
        self.front, self.progress, self.stopping = front, LoadingProgress(), False
        self._timeout_s, self._got_on_s = timeout_s, time.monotonic()
        self._lock = threading.Lock()

    def report(self, text: str, done: int, total: int) -> None:
        """Report how far loading is; from any thread. Raises NotReady when the server stops, to cancel it."""
        if self.stopping:
            raise NotReady("the server is stopping, and the model is loaded no further")
        progress = LoadingProgress(text, done, total)
        if progress != self.progress:
            self.progress, self._got_on_s = progress, time.monotonic()

    def arrive(self, front: Front) -> bool:
        """Hand the loaded model over. False: the server is stopping already, so the caller closes it."""
        with self._lock:
            if not self.stopping:
                self.front = front
            return not self.stopping

    def stop(self) -> None:
        """Accept no new requests from now on; running ones go on."""
        with self._lock:
            self.stopping = True

    def ready(self) -> Front:
        """The model. Raises NotReady while it loads and when the server stops."""
        if self.stopping:
            raise NotReady("the server is stopping and takes no more requests")
        if self.front is None:
            raise NotReady(f"the model is loading ({self.progress.text}); try again soon")
        return self.front

    def check_room(self) -> None:
        """Raises QueueFull or EngineError if any request that came now would be refused."""
        if self.front is not None and not self.stopping:
            self.front.check_room()

    def readiness(self) -> tuple[int, str]:
        """The HTTP status of /ready and why: 200 if a request that came now would be taken."""
        if self.stopping:
            return 503, "stopping"
        if self.front is None:
            return 503, "loading"
        if self.front.healthy:
            return 200, "ready"
        return 503, "unhealthy" if self.front.loading is None else "loading"

    def liveness(self) -> tuple[int, str]:
        """The HTTP status of /live and why: 503 if only restarting the server could help."""
        if self.stopping:
            return 200, "stopping"
        if self.front is None:
            hangs = time.monotonic() - self._got_on_s > self._timeout_s
            return (503, "hangs") if hangs else (200, "loading")
        if self.front.healthy:
            return 200, "up"
        if not self.front.live:
            return 503, "lost"
        return 200, "stalled" if self.front.loading is None else "restarting"

    def health(self) -> tuple[int, Health]:
        """The HTTP status of /health and its body: `engine` is as it is now, `totals` only grow."""
        if self.stopping:
            return 503, Health(status="stopping")
        if self.front is None:
            return 503, Health(status="loading", progress=self.progress)
        stats = self.front.stats()
        now = {name: value for name, value in stats.items() if name not in TOTALS}
        totals = {name: value for name, value in stats.items() if name in TOTALS}
        healthy, again = self.front.healthy, self.front.loading
        if not healthy and again is not None:
            return 503, Health(status="loading", progress=LoadingProgress(*again), engine=now, totals=totals)
        return 200 if healthy else 503, Health(
            status="ok" if healthy else "unhealthy", engine=now, totals=totals
        )
