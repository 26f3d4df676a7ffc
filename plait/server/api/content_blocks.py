"""A reply as blocks, one after the other: reasoning, text, calls. Read from the chunks of a chat.

Responses and Messages write the same blocks in different words, and both live from this one reading.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

Kind = Literal["reasoning", "text", "call"]
What = Literal["open", "grow", "close"]


@dataclass(slots=True)
class Block:
    """A piece of a reply. `id` and `name` are a call's; `text`: its arguments then, as JSON text.

    `is_whole`: it was closed by what came after it, or by a reply that ended by itself; a call: its arguments
    are a JSON object.
    """

    kind: Kind
    index: int
    id: str = ""
    name: str = ""
    pieces: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    is_whole: bool = False

    @property
    def text(self) -> str:
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Step:
    """What happened to a block; `piece` is what it grew by."""

    what: What
    block: Block
    piece: str = ""
    logprobs: tuple[dict[str, Any], ...] = ()


class Blocks:
    """Reads the choices of chat chunks. One block is open at a time."""

    def __init__(self) -> None:
        self.all: list[Block] = []
        self.finish_reason = ""
        self.stop_reason: int | str | None = None
        self._open: Block | None = None
        self._call: int | None = None  # which of the reply's calls is open

    @property
    def kept(self) -> list[Block]:
        """All but calls that are not whole: those are none."""
        return [block for block in self.all if block.kind != "call" or block.is_whole]

    @property
    def has_calls(self) -> bool:
        """Whether there is a call that is whole."""
        return any(block.kind == "call" for block in self.kept)

    def take(self, choice: Mapping[str, Any]) -> Iterator[Step]:
        """What one chunk's choice brings."""
        delta = choice["delta"]
        if reasoning := delta.get("reasoning_content"):
            yield from self._grow("reasoning", reasoning)
        found = tuple((choice.get("logprobs") or {}).get("content") or ())
        if (text := delta.get("content")) or (found and not delta.get("tool_calls") and not reasoning):
            yield from self._grow("text", text or "", found)
        for call in delta.get("tool_calls") or ():
            yield from self._take_call(call)
        if choice.get("finish_reason"):
            self.finish_reason, self.stop_reason = choice["finish_reason"], choice.get("stop_reason")
            yield from self._close(is_whole=self.finish_reason != "length")

    def _take_call(self, call: Mapping[str, Any]) -> Iterator[Step]:
        function = call.get("function") or {}
        if self._open is None or self._open.kind != "call" or call["index"] != self._call:
            self._call = call["index"]
            yield from self._begin("call", call.get("id") or "", function.get("name") or "")
        yield from self._grow("call", function.get("arguments") or "")

    def _grow(self, kind: Kind, piece: str, logprobs: tuple[dict[str, Any], ...] = ()) -> Iterator[Step]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(kind)
        block = self._open
        assert block is not None
        if piece or logprobs:
            block.pieces.append(piece)
            block.logprobs += logprobs
            yield Step("grow", block, piece, logprobs)

    def _begin(self, kind: Kind, id: str = "", name: str = "") -> Iterator[Step]:
        yield from self._close(is_whole=True)
        self._open = Block(kind, len(self.all), id, name)
        self.all.append(self._open)
        yield Step("open", self._open)

    def _close(self, *, is_whole: bool) -> Iterator[Step]:
        if self._open is not None:
            block, self._open = self._open, None
            block.is_whole = is_whole if block.kind != "call" else _is_object(block.text)
            yield Step("close", block)


def _is_object(text: str) -> bool:
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError):
        return False
