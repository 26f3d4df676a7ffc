"""A chat's reply as blocks, one after the other, as Responses and Messages show it.

Errors are in the words of the requested API: a chat's `messages[2]` may be another one's `input[3]`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

import msgspec

from plait.errors import InvalidField, RequestError
from plait.server.api.reply import ApiReply, ChatPlan, ChoiceCourse, is_hidden, parts_of
from plait.server.api.token_scores import ChosenToken
from plait.server.http.transfer import NAMED_EVENTS
from plait.text.output import Arguments, CallEnd, CallStart, Content, Reasoning

if TYPE_CHECKING:
    from plait.frontend.deltas import Delta


# Fields of a chat that another API names otherwise, with the values that change nothing.
_SAYS_NOTHING: Mapping[str, tuple[object, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "stop": ("", []),
    "stream_options": ({}, {"include_usage": True}, {"include_usage": False}),  # usage is always reported
    "logprobs": (False,),
    "top_logprobs": (0,),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "return_token_ids": (False,),
    "timings_per_token": (False,),
    "return_progress": (False,),
    "reasoning_field": ("reasoning_content",),
    "thinking_token_budget": (-1,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


_PARAMETERS = re.compile(r"^(tools\[\d+\])\.function\.parameters")


def refuse_words_of_a_chat(
    body: Mapping[str, object], words: frozenset[str], names: Mapping[str, str]
) -> None:
    """Raises InvalidField for a field of a chat that this API does not read, unless it changes nothing.

    `words`: those fields; `names`: what they are called here.
    """
    for name in sorted(words & body.keys()):
        value = body[name]
        if value is not None and value not in _SAYS_NOTHING.get(name, ()):
            hint = f"send {names[name]}" if name in names else "leave it out"
            raise InvalidField(f"{name}: it is no field of this API; {hint}", name)


@contextmanager
def in_words_of(names: Mapping[str, str], places: Sequence[str]) -> Iterator[None]:
    """A RequestError from inside names the field that the client sent.

    `names`: what a chat's fields are called there; `places`: where each message of the chat came from.
    """
    try:
        yield
    except RequestError as error:
        param = _rename_param(error.param or "", names, places)
        if error.param is None or param == error.param:
            raise
        text = str(error)
        if text.startswith(error.param):
            text = param + text.removeprefix(error.param)
        raise error.reword(text, param) from error


def _rename_param(param: str, names: Mapping[str, str], places: Sequence[str]) -> str:
    if (schema := names.get("parameters")) is not None:
        param = _PARAMETERS.sub(rf"\1.{schema}", param)
    if "response_format" in names:  # elsewhere the schema is in the format itself
        param = param.replace("response_format.json_schema.", "response_format.")
    head, bracket, rest = param.partition("[")
    number, closing, tail = rest.partition("]")
    if head == "messages" and closing and number.isdigit() and int(number) < len(places):
        place = places[int(number)]
        return place if tail.startswith(".role") else place + tail
    head, dot, rest = param.partition(".")
    stem, bracket, inner = head.partition("[")
    return names.get(stem, stem) + bracket + inner + dot + rest


BlockKind = Literal["reasoning", "text", "call"]


@dataclass(slots=True)
class ReplyBlock:
    """A part of a reply. `id` and `name` are a call's; `text`: its arguments then, as JSON text.

    `is_whole`: it was closed by what came after it, or by a reply that ended by itself; a call: its arguments
    are whole.
    """

    kind: BlockKind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[ChosenToken] = field(default_factory=list)
    is_whole: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


class BlockStep(msgspec.Struct):
    """What happened to a block; `text` and `logprobs` are what it grew by."""

    what: Literal["open", "grow", "close"]
    block: ReplyBlock
    text: str = ""
    logprobs: Sequence[ChosenToken] = ()


class ReplyBlocks(ChoiceCourse):
    """One choice as blocks, read from its deltas. One block is open at a time."""

    def __init__(self, chat: ChatPlan) -> None:
        super().__init__(chat)
        self.all: list[ReplyBlock] = []
        self._shows_thinking = chat.asked.include_reasoning
        self._open: ReplyBlock | None = None

    @property
    def kept(self) -> list[ReplyBlock]:
        """All blocks, but no incomplete calls."""
        return [b for b in self.all if b.kind != "call" or (b.is_whole and _is_object(b.text))]

    def text(self, kind: BlockKind) -> str:
        """The text of all blocks of a kind."""
        return "".join(block.text for block in self.all if block.kind == kind)

    def push(self, delta: Delta, logprobs: Sequence[ChosenToken] = ()) -> list[BlockStep]:
        """The steps of one delta. Log-probabilities go with the first part that it shows, if that is text."""
        self.note(delta)
        steps: list[BlockStep] = []
        for part in parts_of(delta):
            match part:
                case Content(text):
                    self._grow(steps, "text", text, logprobs)
                case Reasoning(text) if self._shows_thinking:
                    self._grow(steps, "reasoning", text)
                case CallStart(_, call_id, name):
                    self._begin(steps, ReplyBlock("call", len(self.all), call_id, name))
                case Arguments(_, text):
                    self._grow(steps, "call", text)
                case CallEnd(_, complete):
                    self._close(steps, is_whole=complete, is_call=True)
                    continue
                case _:
                    continue
            logprobs = ()
        if logprobs and not is_hidden(delta):
            self._grow(steps, "text", "", logprobs)
        if delta.finish_reason is not None:
            self._close(steps, is_whole=delta.finish_reason != "length")
        return steps

    def _grow(
        self, steps: list[BlockStep], kind: BlockKind, text: str, logprobs: Sequence[ChosenToken] = ()
    ) -> None:
        if self._open is None or self._open.kind != kind:
            self._begin(steps, ReplyBlock(kind, len(self.all)))
        block = self._open
        assert block is not None
        block.pieces.append(text)
        block.logprobs += logprobs
        steps.append(BlockStep("grow", block, text, logprobs))

    def _begin(self, steps: list[BlockStep], block: ReplyBlock) -> None:
        self._close(steps, is_whole=True)
        self._open = block
        self.all.append(block)
        # The step shows the block as it is now, however much of it the same delta brings.
        steps.append(BlockStep("open", replace(block, pieces=[], logprobs=[])))

    def _close(self, steps: list[BlockStep], *, is_whole: bool, is_call: bool = False) -> None:
        """Close the open block. `is_call`: by the end of a call, without which no call is whole."""
        if self._open is not None:
            block, self._open = self._open, None
            block.is_whole = is_whole and is_call == (block.kind == "call")
            steps.append(BlockStep("close", block))


class BlockReply(ApiReply):
    """A chat's reply as blocks, in the words of another API.

    `names`: what a chat's fields are called there; `places`: where each message of the chat came from.
    """

    form = NAMED_EVENTS

    def __init__(self, chat: ChatPlan, names: Mapping[str, str], places: Sequence[str]) -> None:
        super().__init__([chat.request], stream=chat.asked.stream)
        self.chat, self.blocks, self._names, self._places = chat, ReplyBlocks(chat), names, places

    @property
    def warning(self) -> str:
        return self.blocks.warning

    def in_words(self) -> AbstractContextManager[None]:
        return in_words_of(self._names, self._places)

    def add(self, i: int, delta: Delta) -> None:
        self.push(delta)

    def push(self, delta: Delta) -> list[BlockStep]:
        """The steps of this delta."""
        return self.blocks.push(delta, self.chat.logprobs(delta) or ())


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
