"""POST /v1/chat/completions: messages through the model's chat template, and its reply."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from plait.engine import ranking
from plait.request import Request
from plait.server import validate
from plait.server.endpoint import Endpoint
from plait.server.generation import new_id
from plait.server.reply import Head, best, finite
from plait.server.schema import ChatRequest, field_names, typed

if TYPE_CHECKING:
    from plait.engine.front import Front
    from plait.engine.stream import Delta, TextLogprob

FIELDS = field_names(ChatRequest)


def plan(front: Front, model: str, body: Mapping[str, Any]) -> ChatReply:
    """Everything that can be refused before the engine is asked: renders, tokenizes. Raises RequestErrors."""
    validate.refuse(body, FIELDS)
    asked = typed(body, ChatRequest)
    params, terms = validate.chat_params(asked), validate.terms(asked)
    validate.check_stream(asked, params)
    validate.check_messages(asked.messages)
    validate.check_template_kwargs(asked.chat_template_kwargs)
    options = {**asked.chat_template_kwargs, "add_generation_prompt": asked.add_generation_prompt}
    request = front.prepare_chat(asked.messages, params, terms, **options)
    with_ids = asked.return_token_ids or front.tokenizer is None
    return ChatReply(Head(new_id("chatcmpl"), "chat.completion", model), asked, request, with_ids)


def render(
    front: Front, messages: list[dict[str, Any]], add_generation_prompt: bool, kwargs: Mapping[str, Any]
) -> list[int]:
    """Messages as token ids. Raises InvalidField and BadTemplate."""
    validate.check_messages(messages)
    validate.check_template_kwargs(kwargs)
    return front.render_chat(messages, add_generation_prompt=add_generation_prompt, **kwargs)


class ChatReply:
    """A response of /v1/chat/completions. With best_of the choices are in the order of their rank."""

    chunk_kind = "chat.completion.chunk"

    def __init__(self, head: Head, asked: ChatRequest, request: Request, with_ids: bool) -> None:
        self.head, self.requests, self.stream = head, (request,), asked.stream
        self.include_usage = bool(asked.stream_options and asked.stream_options.include_usage)
        self._top = (asked.top_logprobs or 0) if asked.logprobs else None
        self._with_ids = with_ids
        self._n, self._choices = asked.n, [_Choice() for _ in range(request.params.n)]
        self._begun: set[int] = set()

    def chunks(self, i: int, delta: Delta) -> list[dict[str, Any]]:
        found = []
        if delta.index not in self._begun:
            self._begun.add(delta.index)
            found.append(self._chunk(delta, {"role": "assistant", "content": ""}))
        if delta.text or delta.logprobs or (self._with_ids and delta.token_ids):
            more = {"token_ids": list(delta.token_ids)} if self._with_ids else {}
            logprobs = self._logprobs(delta.logprobs or ())
            found.append({**self._chunk(delta, {"content": delta.text}), "logprobs": logprobs, **more})
        if delta.finish_reason is not None:
            end = {"finish_reason": delta.finish_reason, "stop_reason": delta.stop_reason}
            found.append({**self._chunk(delta, {}), **end})
        return found

    def add(self, i: int, delta: Delta) -> None:
        self._choices[delta.index].add(delta)

    def choices(self) -> list[dict[str, Any]]:
        is_ranked = len(self._choices) > self._n
        kept = ranking.best([c.score for c in self._choices], self._n) if is_ranked else range(self._n)
        return [self._whole(index, self._choices[i]) for index, i in enumerate(kept)]

    def _chunk(self, delta: Delta, content: dict[str, str]) -> dict[str, Any]:
        return {"index": delta.index, "delta": content, "logprobs": None, "finish_reason": None}

    def _whole(self, index: int, choice: _Choice) -> dict[str, Any]:
        body = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.text), "refusal": None},
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
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
    """One choice, collected."""

    def __init__(self) -> None:
        self.text: list[str] = []
        self.logprobs: list[TextLogprob] = []
        self.score = ranking.Score()
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def add(self, delta: Delta) -> None:
        self.text.append(delta.text)
        self.logprobs += delta.logprobs or ()
        self.score.add(delta.logprobs)
        self.token_ids += delta.token_ids
        self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def _one(lp: TextLogprob) -> dict[str, Any]:
    return {"token": lp.token, "logprob": finite(lp.logprob), "bytes": list(lp.bytes)}


ENDPOINTS = (Endpoint("/v1/chat/completions", FIELDS, plan=plan),)
