"""POST /api/chat and /api/generate: a chat, or a prompt as it is, in Ollama's lines of JSON.

Both become a chat, so tools, thinking and structured output are those of /v1/chat/completions. A reply is
streamed unless `stream` is false. With nothing to reply to, the answer is that the model is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.errors import InvalidField
from plait.request import RequestTrace
from plait.server.api import validate
from plait.server.api.content_blocks import BlockReply, BlockStep, ReplyBlock, in_words_of
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import parse_as
from plait.server.api.reply import ApiReply, ChatPlan, Timings
from plait.server.api.schema import ChatRequest
from plait.server.api.token_scores import ChosenToken, Count
from plait.server.gateway.request_context import RequestContext
from plait.server.http.errors import Problem
from plait.server.http.transfer import JSON_LINES
from plait.server.ollama.translate import (
    CHAT_FIELDS,
    GENERATE_FIELDS,
    NAMES,
    chat_fields,
    generate_fields,
    refuse_images,
    text_of,
    translate_options,
)
from plait.server.ollama.wire import OllamaError, ReplyClock, now, read_body, refusal
from plait.server.openai import chat
from plait.text.grammar.request_fields import grammar_from

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta

DoneReason = Literal["stop", "length", "load"]
_AS_IT_IS = "with raw the prompt is taken as it is; leave it out"
_NOT_TAKEN = {
    "suffix": "this endpoint fills no gap in a text; leave it out",
    "template": "the server's --chat-template sets it; leave it out, or send raw and a prompt of your own",
    "context": "no conversation is kept in token ids; send its messages to /api/chat",
    "width": "this server makes no images",
    "height": "this server makes no images",
    "steps": "this server makes no images",
}


class OllamaFunction(msgspec.Struct, frozen=True):
    index: Count
    name: str
    arguments: dict[str, Any]


class OllamaCall(msgspec.Struct, frozen=True):
    """A whole call of a tool; its arguments are an object."""

    id: str
    function: OllamaFunction


class OllamaMessage(msgspec.Struct, kw_only=True, frozen=True):
    """A message; in a stream, the next part of it."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaCall] | UnsetType = UNSET


class ReplyLine(msgspec.Struct, kw_only=True, frozen=True):
    """A line of a stream, or a whole reply. From `done_reason` on: of the last line. Times: nanoseconds.

    `warning`: what a whole reply has in the header x-plait-warning.
    """

    model: str
    created_at: str
    done: bool = False
    logprobs: list[ChosenToken] | UnsetType = UNSET
    done_reason: DoneReason | UnsetType = UNSET
    total_duration: Count | UnsetType = UNSET
    load_duration: Count | UnsetType = UNSET
    prompt_eval_count: Count | UnsetType = UNSET
    prompt_eval_duration: Count | UnsetType = UNSET
    eval_count: Count | UnsetType = UNSET
    eval_duration: Count | UnsetType = UNSET
    warning: str | UnsetType = UNSET


class ChatLine(ReplyLine, kw_only=True, frozen=True):
    """A line of /api/chat."""

    message: OllamaMessage


class GenerateLine(ReplyLine, kw_only=True, frozen=True):
    """A line of /api/generate."""

    response: str
    thinking: str | UnsetType = UNSET


def plan_chat(context: RequestContext, body: Mapping[str, object]) -> ApiReply:
    """Validate, render and tokenize a chat, before the engine gets it. Raises RequestErrors."""
    clock, sent = ReplyClock(context.exchange.load_s), chat_fields(context, body)
    if not sent["messages"]:
        return LoadedReply(ChatLine(**_load_fields(context), message=OllamaMessage()))
    names = {**NAMES, "prompt": "messages"}
    with in_words_of(names, ()):
        planned = chat.plan_chat(context, {"stream": True, **sent}, names)
    return LinesReply(context.model, planned, clock, names=names)


def plan_generate(context: RequestContext, body: Mapping[str, object]) -> ApiReply:
    """Validate a prompt, and render and tokenize it, before the engine gets it. Raises RequestErrors."""
    clock = ReplyClock(context.exchange.load_s)
    refuse_images(body.get("images"), "images")
    for name, why in _NOT_TAKEN.items():
        if body.get(name):
            raise InvalidField(f"{name}: {why}", name)
    prompt, system, raw = text_of(body, "prompt"), text_of(body, "system"), body.get("raw", False)
    if not isinstance(raw, bool):
        raise InvalidField("raw: send true or false", "raw")
    places = ("system", "prompt") if system else ("prompt",)
    with in_words_of(NAMES, places):
        if raw or (context.front.chat_template is None and not system):
            planned = _plan_raw(context, body, prompt)
        else:
            sent = generate_fields(context, body)
            planned = chat.plan_chat(context, {"stream": True, **sent}, NAMES) if prompt or system else None
    if planned is None:
        return LoadedReply(GenerateLine(**_load_fields(context), response=""))
    return LinesReply(context.model, planned, clock, places=places, is_chat=False)


def _plan_raw(context: RequestContext, body: Mapping[str, object], prompt: str) -> ChatPlan | None:
    """A prompt as it is, control tokens included; None for an empty one."""
    for name in ("system", "think") if body.get("raw") else ():
        if body.get(name):
            raise InvalidField(f"{name}: {_AS_IT_IS}", name)
    rest = {name: value for name, value in body.items() if name not in ("prompt", "raw")}
    sent = {"stream": True, **translate_options(context, rest, GENERATE_FIELDS)}
    validate.refuse(sent, chat.FIELDS)
    asked = parse_as({**sent, "messages": []}, ChatRequest)
    params = validate.chat_params(asked)
    grammar = grammar_from(sent)
    if not prompt:
        return None
    request = context.prepare(prompt, params, allow_special=True, terms=asked)
    return ChatPlan(asked, context.front.constrain(request, grammar), with_ids=False)


def _load_fields(context: RequestContext) -> dict[str, Any]:
    return {"model": context.model, "created_at": now(), "done": True, "done_reason": "load"}


class LoadedReply(ApiReply):
    """The answer to a request that only has the model loaded."""

    def __init__(self, line: ReplyLine) -> None:
        super().__init__(())
        self._line = line

    def add(self, i: int, delta: Delta) -> None:
        raise AssertionError("nothing is generated")

    def whole(self, traces: Iterable[RequestTrace | None]) -> ReplyLine:
        return self._line


class LinesReply(BlockReply):
    """One reply of /api/chat or /api/generate, whole or as lines."""

    form = JSON_LINES

    def __init__(
        self,
        model: str,
        planned: ChatPlan,
        clock: ReplyClock,
        *,
        places: Sequence[str] = (),
        names: Mapping[str, str] = NAMES,
        is_chat: bool = True,
    ) -> None:
        super().__init__(planned, names, places)
        self._model, self._clock, self._is_chat, self._num_calls = model, clock, is_chat, 0

    def whole(self, traces: Iterable[RequestTrace | None]) -> ReplyLine:
        blocks = self.blocks
        calls = [_call(block, i) for i, block in enumerate(b for b in blocks.kept if b.kind == "call")]
        logprobs = [one for block in blocks.all for one in block.logprobs]
        return self._line(
            blocks.text("text"),
            blocks.text("reasoning"),
            calls,
            logprobs,
            **self._describe_end(self.count.engine_timings(traces)),
        )

    def events(self, i: int, delta: Delta) -> Iterator[ReplyLine]:
        for step in self.push(delta):
            if (line := self._line_of(step)) is not None:
                yield line

    def end(self) -> Iterator[ReplyLine]:
        yield self._line(**self._describe_end(self.count.timings()), warning=self.warning or UNSET)

    def fail(self, problem: Problem) -> tuple[OllamaError]:
        return (refusal(problem),)

    def _line_of(self, step: BlockStep) -> ReplyLine | None:
        """What a line shows of a step: text as it grows, a call when it is whole."""
        block = step.block
        if step.what == "close" and block.kind == "call" and block in self.blocks.kept:
            self._num_calls += 1
            return self._line(calls=[_call(block, self._num_calls - 1)])
        if step.what != "grow" or block.kind == "call" or not (step.text or step.logprobs):
            return None
        if block.kind == "reasoning":
            return self._line(thinking=step.text)
        return self._line(step.text, logprobs=step.logprobs)

    def _line(
        self,
        text: str = "",
        thinking: str = "",
        calls: Sequence[OllamaCall] = (),
        logprobs: Sequence[ChosenToken] = (),
        **more: Any,
    ) -> ReplyLine:
        head = {"model": self._model, "created_at": now(), "logprobs": [*logprobs] or UNSET, **more}
        if not self._is_chat:
            return GenerateLine(**head, response=text, thinking=thinking or UNSET)
        message = OllamaMessage(content=text, thinking=thinking or UNSET, tool_calls=[*calls] or UNSET)
        return ChatLine(**head, message=message)

    def _describe_end(self, timings: Timings) -> dict[str, Any]:
        num_prompt = len(self.requests[0].prompt_token_ids)
        reason = "length" if self.blocks.finish_reason == "length" else "stop"
        return {"done": True, "done_reason": reason, **self._clock.durations(num_prompt, timings)}


def _call(block: ReplyBlock, index: int) -> OllamaCall:
    return OllamaCall(block.id, OllamaFunction(index, block.name, msgspec.json.decode(block.text)))


ENDPOINTS = (
    Endpoint("/api/chat", CHAT_FIELDS, plan=plan_chat, refusal=refusal, read=read_body, any_type=True),
    Endpoint(
        "/api/generate", GENERATE_FIELDS, plan=plan_generate, refusal=refusal, read=read_body, any_type=True
    ),
)
