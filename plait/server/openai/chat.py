"""POST /v1/chat/completions: messages through the model's chat template, and its reply."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from plait.frontend import best_of
from plait.request import ReplyShape, Request
from plait.server.api import validate
from plait.server.api.completion_reply import Head, best, finite
from plait.server.api.endpoint import Endpoint
from plait.server.api.reply_extras import Extras
from plait.server.api.schema import ChatRequest, StreamOptions, field_names, typed
from plait.server.api.tool_choice import allowed, from_template_kwargs
from plait.server.gateway.request_context import report_unread
from plait.server.http.tasks import new_id
from plait.text.chat.template import num_chars
from plait.text.grammar.request_fields import grammar_from
from plait.text.output import Arguments, CallEnd, CallStart, Content, Reasoning
from plait.text.output import Delta as Part

if TYPE_CHECKING:
    from plait.frontend.delta import Delta, TextLogprob
    from plait.frontend.frontend import Front

FIELDS = field_names(ChatRequest)
NO_FORM = (
    "max_tokens ended the reply before what it must be had begun: thinking counts against max_tokens; send a "
    "larger one, or bound thinking by thinking_token_budget"
)
THOUGHTS = ("reasoning_content", "reasoning")  # DeepSeek's name and vLLM's: clients read one of them


def plan(front: Front, model: str, body: Mapping[str, Any], words: Mapping[str, str] = {}) -> ChatReply:
    """Everything that can be refused before the engine is asked: renders, tokenizes. Raises RequestErrors.

    `words`: what fields are called in the API that was asked, where that is another one.
    """
    validate.refuse(body, FIELDS)
    asked = typed(body, ChatRequest)
    tools, kwargs = from_template_kwargs(asked.tools, asked.chat_template_kwargs, front.speech)
    choosable, choice = allowed(tools, asked.tool_choice)
    asked = replace(asked, tools=choosable, tool_choice=choice, chat_template_kwargs=dict(kwargs))
    params, wish = validate.chat_params(asked), grammar_from(body)
    validate.check_stream(asked, params)
    validate.check_messages(asked.messages)
    validate.check_template_kwargs(asked.chat_template_kwargs)
    validate.check_tools(asked.tools, asked.tool_choice)
    kwargs, thinks, unread = front.speech.switched(asked.chat_template_kwargs, asked.reasoning_effort)
    report_unread(front, unread, words)
    # Told that it may call nothing, a model had better not know of what it could call.
    tools = () if asked.tool_choice == "none" else tuple(asked.tools)
    options = {**kwargs, **validate.turn_options(asked), "tools": list(tools) or None}
    request = front.prepare_chat(asked.messages, params, asked, **options)
    begun = asked.messages[-1] if asked.continue_final_message else None
    is_open = front.speech.is_open(request.prompt_token_ids, begun)
    shape = ReplyShape(
        tools=tools,
        choice=asked.tool_choice,
        parallel=asked.parallel_tool_calls,
        thinks=thinks,
        is_open=is_open,
        has_begun=front.speech.has_begun(request.prompt_token_ids),
        may_think=begun is None or is_open or not num_chars(begun.get("content")),
    )
    request = front.shaped(request, shape, wish, validate.thinking_budget(asked))
    request = replace(request, shows_progress=asked.stream and asked.return_progress)
    with_ids = asked.return_token_ids or front.tokenizer is None
    head = Head(new_id("chatcmpl"), "chat.completion", model, front.fingerprint)
    return ChatReply(head, asked, request, with_ids)


class ChatReply:
    """A response of /v1/chat/completions. With best_of the choices are in the order of their rank."""

    chunk_kind = "chat.completion.chunk"

    def __init__(self, head: Head, asked: ChatRequest, request: Request, with_ids: bool) -> None:
        self.head, self.requests, self.stream = head, (request,), asked.stream
        self.told = asked.stream_options or StreamOptions()
        self._top = (asked.top_logprobs or 0) if asked.logprobs else None
        self._with_ids = with_ids
        self._n, self._is_named = asked.n, isinstance(asked.tool_choice, dict)
        named = THOUGHTS if asked.reasoning_field is None else (asked.reasoning_field,)
        self._thoughts: Sequence[str] = named if asked.include_reasoning else ()
        # A grammar of "tools" only says how calls are written, if there are any.
        self._is_demanded = request.grammar is not None and request.grammar.param != "tools"
        self.warning = ""
        once = {"prompt_token_ids": request.prompt_token_ids} if with_ids else {}
        self.extras = Extras(asked, self.requests, once)
        self._choices = [_Choice() for _ in range(request.params.n)]
        self._begun: set[int] = set()

    def chunks(self, i: int, delta: Delta) -> list[dict[str, Any]]:
        found, choice = [], self._choices[delta.index]
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            found.append(self._chunk(delta, {"role": "assistant", "content": ""}))
        elif delta.prompt_progress is not None:
            found.append(self._chunk(delta, {}))
        more = {"token_ids": list(delta.token_ids)} if self._with_ids else {}
        logprobs = self._logprobs(delta.logprobs or ())
        pieces = self._pieces(delta)
        if not pieces and not _is_hidden(delta) and (delta.logprobs or (self._with_ids and delta.token_ids)):
            pieces = [{"content": ""}]
        for n, piece in enumerate(pieces):  # the tokens of a delta come with its first chunk
            mine = {"logprobs": logprobs, **more} if n == 0 else {}
            found.append({**self._chunk(delta, piece), **mine})
        choice.count(delta)
        if delta.finish_reason is not None:
            found.append(
                {**self._chunk(delta, {}), **self._end(choice, delta.finish_reason, delta.stop_reason)}
            )
        return found

    def add(self, i: int, delta: Delta) -> None:
        self._choices[delta.index].add(delta, shows=bool(self._thoughts) or not _is_hidden(delta))

    def choices(self) -> list[dict[str, Any]]:
        is_ranked = len(self._choices) > self._n
        kept = best_of.best([c.score for c in self._choices], self._n) if is_ranked else range(self._n)
        return [self._whole(index, self._choices[i]) for index, i in enumerate(kept)]

    def _pieces(self, delta: Delta) -> list[dict[str, Any]]:
        """What this delta adds to the message, each as a delta of a chunk."""
        parts = delta.parts or ((Content(delta.text),) if delta.text else ())
        pieces = (self._thought(part) if isinstance(part, Reasoning) else _piece(part) for part in parts)
        return [piece for piece in pieces if piece]

    def _thought(self, part: Reasoning) -> dict[str, Any]:
        return dict.fromkeys(self._thoughts, part.text)

    def _end(self, choice: _Choice, reason: str, stop_reason: int | str | None) -> dict[str, Any]:
        """OpenAI says "stop" when the call was the one that was named."""
        if self._is_demanded and reason == "length" and choice.has_thought and not choice.says_something:
            self.warning = NO_FORM
        is_called = reason == "stop" and choice.num_calls > 0 and not self._is_named
        return {"finish_reason": "tool_calls" if is_called else reason, "stop_reason": stop_reason}

    def _chunk(self, delta: Delta, content: dict[str, Any]) -> dict[str, Any]:
        return {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        body = {
            "index": index,
            "message": choice.message(self._thoughts),
            "logprobs": self._logprobs(choice.logprobs),
            **self._end(choice, choice.finish_reason or "stop", choice.stop_reason),
        }
        return {**body, "token_ids": choice.token_ids} if self._with_ids else body

    def _logprobs(self, found: list[TextLogprob] | tuple[TextLogprob, ...]) -> dict[str, Any] | None:
        if self._top is None:
            return None
        content = [
            {**_one(lp), "top_logprobs": [_one(other) for other in best(lp)[: self._top]]} for lp in found
        ]
        return {"content": content, "refusal": None}


class _Choice:
    """One choice, collected.

    `calls`: all that began; `whole`: those that ended whole, which alone are shown; `says_something`: more
    than thinking.
    """

    def __init__(self) -> None:
        self.has_thought = self.says_something = False
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[_Call] = []
        self.whole: list[_Call] = []
        self.num_calls = 0
        self.logprobs: list[TextLogprob] = []
        self.score = best_of.Score()
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta, *, shows: bool) -> None:
        """Keep this delta. `shows`: its tokens may be seen, not only what they say."""
        self.count(delta)
        for part in delta.parts:
            match part:
                case Reasoning(text):
                    self.reasoning.append(text)
                case CallStart(_, call_id, name):
                    self.calls.append(_Call(call_id, name, []))
                case Arguments(index, text):
                    self.calls[index].arguments.append(text)
                case CallEnd(index, complete=True):
                    self.whole.append(self.calls[index])
        self.text.append(delta.text)
        self.score.add(delta.logprobs)
        if shows:
            self.logprobs += delta.logprobs or ()
            self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason

    def count(self, delta: Delta) -> None:
        for part in delta.parts or (Content(delta.text),):
            self.has_thought |= isinstance(part, Reasoning)
            self.says_something |= isinstance(part, CallStart) or bool(_said(part).strip())
        self.num_calls += sum(isinstance(part, CallEnd) and part.complete for part in delta.parts)

    def message(self, thoughts: Sequence[str]) -> dict[str, Any]:
        """Without calls there is no `tool_calls`, without thinking none of the fields `thoughts`."""
        text, reasoning = "".join(self.text), "".join(self.reasoning)
        found: dict[str, Any] = {"role": "assistant", "content": text or (None if self.whole else "")}
        found["refusal"] = None
        if reasoning:
            found |= dict.fromkeys(thoughts, reasoning)
        if self.whole:
            found["tool_calls"] = [call.body() for call in self.whole]
        return found


@dataclass(frozen=True, slots=True)
class _Call:
    id: str
    name: str
    arguments: list[str]

    def body(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.id, "type": "function", "function": function}


def _piece(part: Part) -> dict[str, Any]:
    """A part of a reply as the delta of a chunk: a call's id and name come once, in its first; {}: none."""
    match part:
        case CallStart(index, call_id, name):
            function = {"name": name, "arguments": ""}
            return {"tool_calls": [{"index": index, "id": call_id, "type": "function", "function": function}]}
        case Arguments(index, text):
            return {"tool_calls": [{"index": index, "function": {"arguments": text}}]}
    return {"content": part.text} if isinstance(part, Content) else {}


def _said(part: Part) -> str:
    return part.text if isinstance(part, Content) else ""


def _is_hidden(delta: Delta) -> bool:
    """Whether its tokens are thinking that is not to be seen."""
    return any(isinstance(part, Reasoning) for part in delta.parts)


def _one(lp: TextLogprob) -> dict[str, Any]:
    return {"token": lp.token, "logprob": finite(lp.logprob), "bytes": list(lp.bytes)}


ENDPOINTS = (Endpoint("/v1/chat/completions", FIELDS, plan=plan),)
