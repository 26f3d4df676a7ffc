"""The way to the engine: the loading state of its model, and the context of one HTTP request.

HTTP answers from the first moment, and reports how far loading is.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.errors import InvalidField
from plait.fair_queue import asker
from plait.request import Request, RequestTrace, SamplingParams
from plait.server.gateway.api_keys import ANYBODY, Key
from plait.server.http.errors import NotReady

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.frontend.output_stream import OutputStream
    from plait.server.gateway.api_keys import Account


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


SCOPE_KEY = "plait.exchange"
# Of all choices of all prompts of one HTTP request: a list of a thousand prompts is one, too.
MAX_OUTPUT_TOKENS = 1 << 22


@dataclass(slots=True)
class Exchange:
    """Facts about one HTTP request, for limits, logs, metrics and traces. Holds no prompt and no reply.

    `route`: the path as the server knows it, one of few; `path`: as the client sent it.
    """

    id: str
    method: str
    path: str
    traceparent: str = ""
    key: Key = ANYBODY
    account: Account | None = None  # each admitted request has one
    route: str = "other"
    is_working: bool = False
    is_turned_away: bool = False  # the queue was full, and nothing of it was read
    status: int = 0
    model: str = ""
    num_asked_tokens: int = 0  # the most that all choices together can generate
    unread: list[str] = field(default_factory=list)  # hints that the model has no use for
    reason: str = ""  # why it was refused, for the log
    streams: list[OutputStream] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)

    @property
    def is_settled(self) -> bool:
        """Whether the engine has reported the end of every choice."""
        return all(len(stream.traces) == stream.request.params.n for stream in self.streams)

    def traces(self) -> Iterator[RequestTrace]:
        """The traces of the choices that have ended and that the engine had taken."""
        for stream in self.streams:
            yield from (trace for trace in stream.traces.values() if trace is not None)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """One request on its way to the engine: the model, its name in the reply, and the client.

    It separates the cached prompts of keys, counts and bounds. Safe from any thread, like the Front.
    """

    front: Front
    model: str
    exchange: Exchange

    @property
    def tenant(self) -> str:
        """The unit of fair sharing: the API key's name, else the client's address."""
        return self.exchange.key.name or asker.get()

    def prepare(self, prompt: str | Sequence[int], params: SamplingParams, **more: Any) -> Request:
        """As Front's. Raises InvalidField, too, if the whole HTTP request asks for too many tokens."""
        return self._counted(self.front.prepare(prompt, params, **more))

    def prepare_chat(self, messages: Sequence[Mapping[str, Any]], *given: Any, **options: Any) -> Request:
        """As Front's, and bounded like `prepare`."""
        return self._counted(self.front.prepare_chat(messages, *given, **options))

    def submit(self, request: Request, interval: int | None = 1) -> OutputStream:
        """As Front's, under the key's own salt. The key pays for the prompt."""
        exchange = self.exchange
        if exchange.key.name:
            # No name holds a slash, so no salt that is sent makes one key's prompts another's.
            request = replace(request, cache_salt=f"{exchange.key.name}/{request.cache_salt}")
        stream = self.front.submit(replace(request, tenant=self.tenant), interval)
        exchange.streams.append(stream)
        if exchange.account is not None:
            exchange.account.pay(len(request.prompt_token_ids))
        return stream

    def report_unread(self, names: Iterable[str], words: Mapping[str, str]) -> None:
        """Name hints that change nothing in the reply's header. `words`: what a chat's fields are called."""
        self.exchange.unread += (words.get(name, name) for name in names)

    def _counted(self, request: Request) -> Request:
        asked = self.exchange.num_asked_tokens + request.params.n * (request.params.max_tokens or 0)
        self.exchange.num_asked_tokens = asked
        if asked > MAX_OUTPUT_TOKENS:
            raise InvalidField(
                f"max_tokens: times n choices of each prompt it makes {asked} tokens, more than "
                f"{MAX_OUTPUT_TOKENS} in one request; send max_tokens, a smaller n, or fewer prompts",
                "max_tokens",
            )
        return request
