"""The deltas of a reply (content, thinking, calls), and what the readers of calls share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import groupby

from msgspec import Struct
from msgspec.structs import replace

from plait.text.output.cursor import SPACE, TextCursor


class Content(Struct, frozen=True):
    """Text for the reader of the reply."""

    text: str


class Reasoning(Struct, frozen=True):
    """Text of the model's thinking. `part` counts its blocks: 0 is the first."""

    text: str
    part: int = 0


class CallStart(Struct, frozen=True):
    """A tool call begins: the `index`-th of the reply, from 0."""

    index: int
    id: str
    name: str


class Arguments(Struct, frozen=True):
    """The next piece of a call's arguments: joined, they are the text of a JSON object."""

    index: int
    text: str


class CallEnd(Struct, frozen=True):
    """A call is over. `complete`: its arguments are whole; if not, they are the beginning of a JSON text."""

    index: int
    complete: bool


OutputDelta = Content | Reasoning | CallStart | Arguments | CallEnd


def merge_deltas(deltas: Iterable[OutputDelta]) -> list[OutputDelta]:
    """The same deltas, neighbours of one kind joined and empty ones left out."""
    out: list[OutputDelta] = []
    for _, group in groupby(deltas, key=_stream):
        first, *more = group
        if more and not isinstance(first, CallStart | CallEnd):
            text = "".join(m.text for m in (first, *more) if not isinstance(m, CallStart | CallEnd))
            first = replace(first, text=text)
        if isinstance(first, CallStart | CallEnd) or first.text:
            out.append(first)
    return out


def _stream(delta: OutputDelta) -> tuple[type, int]:
    """A key: neighbours with equal keys are joined. Starts and ends of calls differ from all others."""
    number = delta.part if isinstance(delta, Reasoning) else 0 if isinstance(delta, Content) else delta.index
    return type(delta), number


class ReplyBuilder:
    """Where readers of calls take text from (`cursor`) and write what they found.

    `tools`: name → JSON schema of the arguments, of the tools that may be called. `most_calls`: further calls
    are read but not emitted. `num_calls`: how many have ended; `num_whole`: how many of them are whole. A
    call goes through `begin`, `argue` and `end`, in this order, before the next begins.
    """

    def __init__(
        self, tools: Mapping[str, Mapping[str, object]], make_id: Callable[[], str], most_calls: int | None
    ) -> None:
        self.cursor, self.tools = TextCursor(), tools
        self._make_id, self._most = make_id, most_calls
        self._out: list[OutputDelta] = []
        self._blank: list[str] = []  # white space that is content only if content follows
        self._pause: list[str] = []  # the same for thinking
        self.num_calls = self.num_whole = self._parts = 0
        self._said = self._beside_markup = False

    @property
    def has_content(self) -> bool:
        """Whether there was any content but white space."""
        return self._said

    @property
    def num_held(self) -> int:
        """Characters that have arrived and belong to no delta yet."""
        return self.cursor.num_left + sum(map(len, (*self._blank, *self._pause)))

    def collect(self) -> list[OutputDelta]:
        """What was found since the last time."""
        found, self._out = merge_deltas(self._out), []
        return found

    def say(self, text: str) -> None:
        """Content. White space is kept back until it is known not to touch a call or the reply's ends."""
        body = text.strip(SPACE)
        if not body:
            self._blank.append(text)
            return
        start = text.index(body)
        self._blank.append(text[:start])
        if self._said or not self._beside_markup:
            self._out.append(Content("".join(self._blank)))
        self._out.append(Content(body))
        self._blank = [text[start + len(body) :]]
        self._said, self._beside_markup = True, False

    def leave_content(self) -> None:
        """A call or a block of thinking was found here."""
        self._beside_markup = True

    def close(self) -> None:
        """The end of the reply."""
        if not self._beside_markup:
            self._out.append(Content("".join(self._blank)))

    def think(self, text: str) -> int:
        """Emit text of the present block of thinking; returns how many characters were emitted.

        White space at the end of a block is not.
        """
        body = text.rstrip(SPACE)
        emitted = "".join([*self._pause, body]) if body else ""
        if body:
            self._pause = []
        self._pause.append(text[len(body) :])
        self._out.append(Reasoning(emitted, self._parts))
        return len(emitted)

    def end_thinking(self, cut: bool) -> int:
        """The block of thinking is over; more thinking is another. `cut`: it never ended; see `think`."""
        emitted, self._pause = "".join(self._pause) if cut else "", []
        self._out.append(Reasoning(emitted, self._parts))
        self._parts += 1
        return len(emitted)

    def begin(self, name: str) -> None:
        """What was taken since the cursor's `hold` is the beginning of a call."""
        self.cursor.release()
        self.leave_content()
        if self._emits_calls():
            self._out.append(CallStart(self.num_calls, self._make_id(), name))

    def argue(self, text: str) -> None:
        """The next piece of the present call's arguments."""
        if self._emits_calls():
            self._out.append(Arguments(self.num_calls, text))

    def end(self, complete: bool) -> None:
        """The present call is over; what follows is held again."""
        if self._emits_calls():
            self._out.append(CallEnd(self.num_calls, complete))
        self.num_calls += 1
        self.num_whole += complete
        self.cursor.hold()

    def _emits_calls(self) -> bool:
        return self._most is None or self.num_whole < self._most
