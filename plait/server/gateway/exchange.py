"""The facts of one HTTP request, for limits, logs, metrics and traces."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Literal

from msgspec import Struct, field

from plait.request import RequestTrace
from plait.server.gateway.api_keys import ANYBODY, Key

if TYPE_CHECKING:
    from plait.frontend.output_stream import OutputStream
    from plait.server.gateway.api_keys import Account

SCOPE_KEY = "plait.exchange"
CLIENT_LEFT = 499  # the status of a request that had no answer yet when its client left
Outcome = Literal["finished", "cancelled", "rejected", "error"]
SHOWN_LOAD_S = 0.01  # what is shorter was no loading


class Exchange(Struct):
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
    is_rejected: bool = False  # the queue was full, and nothing of it was read
    is_whole: bool = False  # the last of its answer was sent, or no client waits for one
    status: int = 0
    model: str = ""
    load_s: float = 0.0  # it waited so long until its model was loaded
    num_asked_tokens: int = 0  # the most that all choices together can generate
    unread: list[str] = field(default_factory=list)  # hints that the model has no use for
    aliases: dict[str, str] = field(default_factory=dict)  # our name -> what the client calls a field
    is_admin: bool = False  # it has the admin key, on a path where that counts
    reason: str = ""  # why it was refused, for the log
    release: Callable[[], None] | None = None  # called at the end: its model may be unloaded then
    streams: list[OutputStream] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)
    began_ns: int = field(default_factory=time.time_ns)

    @property
    def is_quiet(self) -> bool:
        """Whether its end is no news: the queue rejected it, or an operator looked at something."""
        is_view = self.method == "GET" and self.route.startswith("/admin/") and self.status == 200
        return self.is_rejected or is_view

    @property
    def outcome(self) -> Outcome:
        """How it ended. The status alone does not say: that of a stream is sent before its first token."""
        if self.status == CLIENT_LEFT:
            return "cancelled"
        if 400 <= self.status < 500:
            return "rejected"
        if not 0 < self.status < 500 or self.reason:
            return "error"
        return "finished" if self.is_whole else "cancelled"

    @property
    def is_settled(self) -> bool:
        """Whether the engine has reported the end of every choice."""
        return all(len(stream.traces) == stream.request.params.n for stream in self.streams)

    def traces(self) -> Iterator[RequestTrace]:
        """The traces of the choices that have ended and that the engine had taken."""
        for stream in self.streams:
            yield from (trace for trace in stream.traces.values() if trace is not None)


def log_fields(exchange: Exchange, seconds: float) -> dict[str, object]:
    """The fields of a request's line in the log; times in milliseconds."""
    traces = [*exchange.traces()]
    starts = [t.first_scheduled_s - t.arrival_s for t in traces if t.first_scheduled_s is not None]
    firsts = [t.first_token_s - t.arrival_s for t in traces if t.first_token_s is not None]
    found: dict[str, object] = {
        "id": exchange.id,
        "method": exchange.method,
        "path": exchange.path,
        "status": exchange.status,
        "ms": round(seconds * 1000, 1),
        "key": exchange.key.name,
        "model": exchange.model,
        "load_ms": round(exchange.load_s * 1000, 1) or None,
        "reason": exchange.reason,
    }
    if exchange.streams:
        found |= {
            "prompt_tokens": sum(len(stream.request.prompt_token_ids) for stream in exchange.streams),
            "cached_tokens": sum(t.num_cached_tokens for t in traces if t.index == 0),
            "output_tokens": sum(t.num_output_tokens for t in traces),
            "finish": tuple(t.finish_reason for t in traces),
            "queue_ms": round(min(starts) * 1000, 1) if starts else None,
            "ttft_ms": round(min(firsts) * 1000, 1) if firsts else None,
        }
    return found
