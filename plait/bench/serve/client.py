"""One request of `plait bench serve`: sent, read as it streams, timed, and given up where it should be."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from plait.bench.serve.workload import Turn
from plait.errors import ConfigError
from plait.typed_values import decode_json

if TYPE_CHECKING:
    from aiohttp import ClientResponse, ClientSession

KEPT_S = 2.0  # an idle connection is used again; servers keep theirs for longer, so none closes on a request
MESSAGE_LEN = 300
Messages = list[dict[str, str]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerTarget:
    """A server and how requests reach it. `base_url` without /v1; `extra`: fields added to every body."""

    name: str
    base_url: str
    model: str = ""
    api_key: str = ""
    chat: bool = True
    stream: bool = True
    ignore_eos: bool = True
    temperature: float = 0.0
    timeout_s: float = 600.0
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> str:
        return f"{self.base_url}/v1/{'chat/' if self.chat else ''}completions"

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def body(self, messages: Messages, turn: Turn) -> dict[str, object]:
        """The JSON that asks for the reply to `messages`; the completions endpoint gets their texts."""
        asked: dict[str, object] = {"model": self.model, "max_tokens": turn.output_len}
        asked["temperature"] = self.temperature
        if self.chat:
            asked["messages"] = messages
        else:
            asked["prompt"] = "\n".join(message["content"] for message in messages)
        if self.ignore_eos:
            asked["ignore_eos"] = True
        if self.stream:
            asked |= {"stream": True, "stream_options": {"include_usage": True}}
        return asked | dict(self.extra)


@dataclass(slots=True)
class RequestOutcome:
    """What became of one request. Times in seconds; `started` since the run began.

    error: '' or its kind, like '429 queue_full', 'timeout', 'stream cut'. Lengths are the server's own count
    (its `usage`) where it gives one, else the aim and the number of events with text.
    """

    index: int
    turn: int
    started: float
    input_len: int = 0
    output_len: int = 0
    cached_len: int = 0
    status: int = 0
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    e2e_s: float = 0.0
    error: str = ""
    message: str = ""
    is_cancelled: bool = False
    is_counted: bool = False
    text: str = ""

    @property
    def is_ok(self) -> bool:
        return not self.error and not self.is_cancelled

    @property
    def tpot_s(self) -> float | None:
        """Seconds for each token after the first."""
        if self.ttft_s is None or self.output_len < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_len - 1)

    def fail(self, kind: str, message: object) -> None:
        self.error, self.message = kind, " ".join(str(message).split())[:MESSAGE_LEN]


class _Details(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: _Details | None = None


class _Said(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: object = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Said | None = None
    message: _Said | None = None
    finish_reason: str | None = None


class _Body(msgspec.Struct):
    choices: Sequence[_Choice] = ()
    usage: _Usage | None = None
    error: object = None


_decode = partial(decode_json, kind=_Body)


def open_session(target: ServerTarget) -> ClientSession:
    """A pool of connections without a limit. Raises ConfigError where aiohttp is not installed."""
    try:
        import aiohttp
    except ImportError as error:
        raise ConfigError("bench serve needs aiohttp; pip install 'plait-engine[bench]'") from error
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEPT_S),
        timeout=aiohttp.ClientTimeout(total=target.timeout_s),
        headers=target.headers,
    )


async def ask(
    session: ClientSession, target: ServerTarget, messages: Messages, turn: Turn, outcome: RequestOutcome
) -> RequestOutcome:
    """Send one request and read its reply to the end, or until the client leaves. Fills `outcome`."""
    import aiohttp

    began = time.perf_counter()
    outcome.input_len = turn.input_len
    leaving = turn.leaving
    patience = leaving.after_s if leaving and not (leaving.after_tokens and target.stream) else None
    try:
        async with asyncio.timeout(patience):
            await _exchange(session, target, messages, turn, outcome)
    except TimeoutError as error:
        if patience is not None:
            outcome.is_cancelled = True
        else:
            outcome.fail("timeout", error or f"no reply within {target.timeout_s:g} s")
    except aiohttp.ClientConnectorError as error:
        outcome.fail("cannot connect", error)
    except (aiohttp.ClientPayloadError, aiohttp.ServerDisconnectedError, ConnectionError) as error:
        outcome.fail("stream cut" if outcome.status else "connection cut", error)
    except (aiohttp.ClientError, OSError, ValueError) as error:
        outcome.fail(type(error).__name__, error)
    outcome.e2e_s = time.perf_counter() - began
    return outcome


async def _exchange(
    session: ClientSession, target: ServerTarget, messages: Messages, turn: Turn, outcome: RequestOutcome
) -> None:
    began = time.perf_counter()
    raw = msgspec.json.encode(target.body(messages, turn))
    headers = {"Content-Type": "application/json"}
    async with session.post(target.path, data=raw, headers=headers) as response:
        outcome.status = response.status
        if response.status != 200:
            _record_refusal(await response.read(), outcome)
        elif target.stream:
            await _read_stream(response, turn, outcome, began)
        else:
            body = _decode(await response.read())
            outcome.text = "".join(_content(choice) for choice in body.choices)
            outcome.output_len = 1
            _count(body.usage, outcome)


def _record_refusal(raw: bytes, outcome: RequestOutcome) -> None:
    error: object = None
    try:
        found = msgspec.json.decode(raw)
        error = found.get("error") if isinstance(found, dict) else None
    except ValueError:
        pass  # not JSON: the text itself is the message
    said = error if isinstance(error, dict) else {}
    kind = said.get("code") or said.get("type") or ""
    outcome.fail(
        f"{outcome.status} {kind}".strip(), said.get("message") or raw[:MESSAGE_LEN].decode(errors="replace")
    )


async def _read_stream(response: ClientResponse, turn: Turn, outcome: RequestOutcome, began: float) -> None:
    """Read events until [DONE]. A client that leaves closes the connection, which is all a server sees."""
    leaves_after = turn.leaving.after_tokens if turn.leaving else 0
    rest, before, texts, is_done = b"", began, list[str](), False
    async for raw in response.content.iter_any():
        now = time.perf_counter()
        *lines, rest = (rest + raw).split(b"\n")
        for event in _events(lines):
            if event == b"[DONE]":
                is_done = True
                continue
            body = _decode(event)
            if body.error is not None:
                said = body.error if isinstance(body.error, dict) else {"message": body.error}
                outcome.fail(f"in stream: {said.get('code') or said.get('type')}", said.get("message"))
            if any(map(_says, body.choices)):
                texts += map(_content, body.choices)
                before = _note(outcome, began, before, now)
            _count(body.usage, outcome)
        if leaves_after and outcome.output_len >= leaves_after and not is_done:
            outcome.is_cancelled = True
            response.close()
            break
    outcome.text = "".join(texts)
    if not (is_done or outcome.is_cancelled or outcome.error):
        outcome.fail("stream cut", "the stream ended without [DONE]")


def _events(lines: Sequence[bytes]) -> Iterator[bytes]:
    """The text after each `data:` of server-sent events; comments and blank lines are skipped."""
    for line in lines:
        if line.startswith(b"data:"):
            yield line[5:].strip()


def _note(outcome: RequestOutcome, began: float, before: float, now: float) -> float:
    """Record the times of an event with text: the first token, or the gap before it."""
    if outcome.ttft_s is None:
        outcome.ttft_s = now - began
    else:
        outcome.gaps_s.append(now - before)
    if not outcome.is_counted:
        outcome.output_len += 1
    return now


def _says(choice: _Choice) -> bool:
    """Whether an event has tokens: text, reasoning, or a part of a tool call."""
    said = choice.delta or choice.message
    if said is None:
        return bool(choice.text)
    return bool(said.content or said.reasoning_content or said.reasoning or said.tool_calls)


def _content(choice: _Choice) -> str:
    """The text that the next turn of a chat repeats, without reasoning."""
    said = choice.delta or choice.message
    return (choice.text if said is None else said.content) or ""


def _count(usage: _Usage | None, outcome: RequestOutcome) -> None:
    if usage is None:
        return
    outcome.is_counted = True
    outcome.input_len, outcome.output_len = usage.prompt_tokens, usage.completion_tokens
    details = usage.prompt_tokens_details
    outcome.cached_len = (details.cached_tokens or 0) if details else 0
