"""The context of one HTTP request: its client and key, what it used, and its way to the engine."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from plait.errors import InvalidField
from plait.fair_queue import asker
from plait.request import Request, RequestTrace, SamplingParams
from plait.server.gateway.api_keys import ANYBODY, Key

if TYPE_CHECKING:
    from plait.frontend.frontend import Front
    from plait.frontend.output_stream import OutputStream
    from plait.server.gateway.rate_limits import Account

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
