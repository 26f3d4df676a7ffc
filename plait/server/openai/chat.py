"""POST /v1/chat/completions: messages through the model's chat template, and its reply."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from plait.frontend.deltas import ChoiceScore, best_of
from plait.request import ReplyShape, RequestTrace
from plait.server.api import validate
from plait.server.api.content_blocks import ReplyBlocks
from plait.server.api.endpoint import Endpoint
from plait.server.api.parse_fields import field_names, parse_as
from plait.server.api.reply import (
    ChatPlan,
    ChoiceCourse,
    ChoicesReply,
    Part,
    PromptProgress,
    Timings,
    Usage,
    head,
    is_hidden,
    parts_of,
)
from plait.server.api.schema import ChatRequest
from plait.server.api.token_scores import ChosenToken, Count, PromptScores, list_prompt_scores
from plait.server.api.unread_keys import list_unread_keys
from plait.server.api.validate import allow_tools, from_template_kwargs
from plait.server.gateway.request_context import RequestContext
from plait.server.openai.chat_state import ChatKeeper, keeper_of
from plait.text.chat.template import num_chars
from plait.text.grammar.request_fields import grammar_from
from plait.text.output import Arguments, CallStart, Content, Reasoning

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta

FIELDS = field_names(ChatRequest)
STORE_FIELDS = ("store", "metadata")
THOUGHTS = ("reasoning_content", "reasoning")  # DeepSeek's name and vLLM's: clients read one of them
EndReason = Literal["stop", "length", "tool_calls"]
ChatId = Annotated[str, msgspec.Meta(pattern="^chatcmpl-[A-Za-z0-9_-]+$")]


class ChatLogprobs(msgspec.Struct, frozen=True):
    content: list[ChosenToken]
    refusal: None = None


class FunctionCall(msgspec.Struct, frozen=True):
    """`arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    id: str
    type: Literal["function"]
    function: FunctionCall


class ChatMessage(msgspec.Struct, kw_only=True, frozen=True):
    """`content` is null if there are calls and nothing else; without calls the key `tool_calls` is absent."""

    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct, kw_only=True, frozen=True):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: EndReason
    stop_reason: int | str | None
    token_ids: list[Count] | UnsetType = UNSET


class ChatCompletion(msgspec.Struct, kw_only=True, frozen=True):
    """The reply of /v1/chat/completions. `metadata`: of one that was stored, when it is read again."""

    id: ChatId
    object: Literal["chat.completion"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: Sequence[Count] | UnsetType = UNSET
    prompt_logprobs: PromptScores | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    metadata: dict[str, str] | UnsetType = UNSET


class FunctionCallDelta(msgspec.Struct, kw_only=True, frozen=True):
    name: str | UnsetType = UNSET
    arguments: str


class ToolCallDelta(msgspec.Struct, kw_only=True, frozen=True):
    """`id`, `type` and the name come in the first delta of a call, and only there."""

    index: Count
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, kw_only=True, frozen=True):
    """The next part of a message; empty in the last chunk of a choice."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[ToolCallDelta] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    index: Count
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: EndReason | None = None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[Count] | UnsetType = UNSET


class ChatChunk(msgspec.Struct, kw_only=True, frozen=True):
    """One event of a chat's stream. With include_usage, the last one has no choices and has the usage.

    `warning`: what a whole reply has in the header x-plait-warning, in the last chunk of a choice.
    """

    id: ChatId
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    system_fingerprint: str | None
    choices: list[ChatChunkChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: Sequence[Count] | UnsetType = UNSET
    timings: Timings | UnsetType = UNSET
    prompt_progress: PromptProgress | UnsetType = UNSET
    warning: str | UnsetType = UNSET


def plan(context: RequestContext, body: Mapping[str, object]) -> ChatReply:
    keeper = keeper_of(context, body)
    return ChatReply(context, plan_chat(context, body), keeper)


def plan_chat(context: RequestContext, body: Mapping[str, object], words: Mapping[str, str] = {}) -> ChatPlan:
    """Validate, render and tokenize a chat, before the engine gets it. Raises RequestErrors.

    `words`: the names of fields in the requested API, where that is another one.
    """
    front = context.front
    validate.refuse(body, FIELDS)
    asked = parse_as(body, ChatRequest)
    tools, kwargs = from_template_kwargs(asked.tools, asked.chat_template_kwargs, front.reply_format)
    choosable, choice = allow_tools(tools, asked.tool_choice)
    asked = replace(asked, tools=choosable, tool_choice=choice, chat_template_kwargs=dict(kwargs))
    params = validate.chat_params(asked)
    requested = grammar_from(body)
    validate.check_stream(asked, params)
    validate.check_messages(asked.messages)
    validate.check_template_kwargs(asked.chat_template_kwargs)
    validate.check_tools(asked.tools, asked.tool_choice)
    kwargs, thinks, unread = front.reply_format.translate_switches(
        asked.chat_template_kwargs, asked.reasoning_effort
    )
    context.report_unread(unread, words)
    context.report_unread(list_unread_keys(asked.messages, front.reply_format.mentions), words)
    # With tool_choice "none" the template gets no tools, so that the model does not try to call one.
    tools = () if asked.tool_choice == "none" else tuple(asked.tools)
    options = {**kwargs, **validate.turn_options(asked), "tools": list(tools) or None}
    request = context.prepare_chat(asked.messages, params, asked, **options)
    begun = asked.messages[-1] if asked.continue_final_message else None
    is_open = front.reply_format.is_open(request.prompt_token_ids, begun)
    shape = ReplyShape(
        tools=tools,
        choice=asked.tool_choice,
        parallel=asked.parallel_tool_calls,
        thinks=thinks,
        is_open=is_open,
        has_begun=front.reply_format.has_begun(request.prompt_token_ids),
        may_think=begun is None or is_open or not num_chars(begun.get("content")),
    )
    request = front.shape_reply(request, shape, requested, validate.thinking_budget(asked))
    request = replace(request, shows_progress=asked.stream and asked.return_progress)
    return ChatPlan(asked, request, with_ids=asked.return_token_ids or front.tokenizer is None)


class ChatReply(ChoicesReply):
    """A reply of /v1/chat/completions. With best_of the choices are in the order of their rank."""

    def __init__(self, context: RequestContext, chat: ChatPlan, keeper: ChatKeeper | None = None) -> None:
        asked, request = chat.asked, chat.request
        kind = "chat.completion.chunk" if asked.stream else "chat.completion"
        super().__init__(head(context, "chatcmpl", kind), asked, [request], ChatChunk)
        self._keeper, self.is_kept = keeper, keeper is not None
        self._chat, self._n, self._is_named = chat, asked.n, isinstance(asked.tool_choice, dict)
        named = THOUGHTS if asked.reasoning_field is None else (asked.reasoning_field,)
        self._thoughts: Sequence[str] = named if asked.include_reasoning else ()
        self._once: dict[str, Any] = {"prompt_token_ids": request.prompt_token_ids} if chat.with_ids else {}
        num = request.params.n
        is_whole = not asked.stream or keeper is not None
        self._choices = [_Choice(chat) for _ in range(num if is_whole else 0)]
        self._courses = [ChoiceCourse(chat) for _ in range(num if asked.stream else 0)]

    @property
    def warning(self) -> str:
        courses = self._choices or self._courses
        return next((course.warning for course in courses if course.warning), "")

    async def keep(self, whole: msgspec.Struct) -> msgspec.Struct:
        if self._keeper is not None:
            # A streamed reply has the head of its chunks.
            metadata = dict(self._keeper.metadata)
            stored = msgspec.structs.replace(whole, object="chat.completion", metadata=metadata)
            await self._keeper.save(stored, self._chat.asked.messages)
        return whole

    def events(self, i: int, delta: Delta) -> list[ChatChunk]:
        if self._keeper is not None:
            self.add(i, delta)
        choice, found = self._courses[delta.index], self._chunks(delta)
        fields = self.fields_of_chunk(i, delta)
        chunks = [ChatChunk(**self.head, choices=[one], **fields, **self._take_once()) for one in found]
        if choice.warning:
            chunks[-1] = msgspec.structs.replace(chunks[-1], warning=choice.warning)
        return chunks

    def _take_once(self) -> dict[str, Any]:
        """The fields that only the first chunk of all has."""
        found, self._once = self._once, {}
        return found

    def _chunks(self, delta: Delta) -> list[ChatChunkChoice]:
        index, choice, found = delta.index, self._courses[delta.index], []
        if not choice.has_begun:
            found.append(ChatChunkChoice(index, ChatDelta(role="assistant", content="")))
        elif delta.prompt_progress is not None:
            found.append(ChatChunkChoice(index, ChatDelta()))
        choice.note(delta)
        pieces = [piece for part in parts_of(delta) if (piece := self._piece(part)) is not None]
        shows_ids = self._chat.with_ids and delta.token_ids
        if not pieces and not is_hidden(delta) and (delta.logprobs or shows_ids):
            pieces = [ChatDelta(content="")]
        # The tokens of a delta come with its first chunk.
        logprobs = self._logprobs(self._chat.logprobs(delta)) if pieces else None
        ids = list(delta.token_ids) if self._chat.with_ids else UNSET
        for piece in pieces:
            found.append(ChatChunkChoice(index, piece, logprobs, None, UNSET, ids))
            logprobs, ids = None, UNSET
        if delta.finish_reason is not None:
            end = self._end_reason(choice)
            found.append(ChatChunkChoice(index, ChatDelta(), None, end, delta.stop_reason))
        return found

    def _piece(self, part: Part) -> ChatDelta | None:
        """A part of a reply as a chunk shows it: a call's id and name come once, in its first; None: not."""
        match part:
            case Content(text):
                return ChatDelta(content=text)
            case Reasoning(text):
                return ChatDelta(**self._thinking(text)) if self._thoughts else None
            case CallStart(index, call_id, name):
                function = FunctionCallDelta(name=name, arguments="")
                call = ToolCallDelta(index=index, id=call_id, type="function", function=function)
            case Arguments(index, text):
                call = ToolCallDelta(index=index, function=FunctionCallDelta(arguments=text))
            case _:
                return None
        return ChatDelta(tool_calls=[call])

    def _thinking(self, text: str) -> dict[str, Any]:
        return dict.fromkeys(self._thoughts, text)

    def add(self, i: int, delta: Delta) -> None:
        num_top = self._chat.asked.prompt_logprobs
        if num_top is not None and delta.prompt_logprobs is not None:
            self._once["prompt_logprobs"] = list_prompt_scores(delta.prompt_logprobs, num_top)
        self._choices[delta.index].add(delta, shows=bool(self._thoughts) or not is_hidden(delta))

    def whole(self, traces: Iterable[RequestTrace | None]) -> ChatCompletion:
        if len(self._choices) > self._n:
            best = best_of([choice.score for choice in self._choices], self._n)
            self._choices = [self._choices[i] for i in best]
        choices = [self._whole(index, choice) for index, choice in enumerate(self._choices)]
        return ChatCompletion(choices=choices, **self.fields_of_whole(traces), **self._once)

    def _whole(self, index: int, choice: _Choice) -> ChatChoice:
        return ChatChoice(
            index=index,
            message=choice.message(self._thoughts),
            logprobs=self._logprobs(choice.logprobs),
            finish_reason=self._end_reason(choice),
            stop_reason=choice.stop_reason,
            token_ids=choice.token_ids if self._chat.with_ids else UNSET,
        )

    def _logprobs(self, found: list[ChosenToken] | None) -> ChatLogprobs | None:
        return None if found is None or not self._chat.asked.logprobs else ChatLogprobs(found)

    def _end_reason(self, choice: ChoiceCourse) -> EndReason:
        """Why a choice ended; OpenAI has "stop" where `tool_choice` named the function that was called."""
        if choice.finish_reason == "length":
            return "length"
        return "tool_calls" if choice.num_calls and not self._is_named else "stop"


class _Choice(ReplyBlocks):
    """One choice of a whole reply, collected from its deltas."""

    def __init__(self, chat: ChatPlan) -> None:
        super().__init__(chat)
        self._chat = chat
        self.logprobs: list[ChosenToken] = []
        self.score = ChoiceScore()
        self.token_ids: list[int] = []

    def add(self, delta: Delta, *, shows: bool) -> None:
        """Keep this delta. `shows`: the reply may show its tokens, not only their text."""
        self.push(delta)
        self.score.add(delta.logprobs)
        if shows:
            self.logprobs += self._chat.logprobs(delta) or ()
            self.token_ids += delta.token_ids

    def message(self, thoughts: Sequence[str]) -> ChatMessage:
        """The message. Without calls it has no `tool_calls`, without thinking no field of `thoughts`."""
        text, reasoning = self.text("text"), self.text("reasoning")
        whole = [block for block in self.all if block.kind == "call" and block.is_whole]
        calls = [ToolCall(call.id, "function", FunctionCall(call.name, call.text)) for call in whole]
        return ChatMessage(
            role="assistant",
            content=text or (None if calls else ""),
            refusal=None,
            tool_calls=calls or UNSET,
            **(dict.fromkeys(thoughts, reasoning) if reasoning else {}),
        )


ENDPOINTS = (Endpoint("/v1/chat/completions", FIELDS | {*STORE_FIELDS}, plan=plan),)
