"""A cursor over text that arrives in parts, for readers that are written as if all of it were there.

A reader is a generator: it yields when it needs more text, and is resumed when some has come or the end has.
What a reader takes is never looked at again, so the whole costs one step per character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import TypeVar

T = TypeVar("T")
Reading = Generator[None, None, T]

SPACE = " \t\r\n"
SPACES = re.compile(r"[ \t\r\n]+")
_SHORT = 256
"""The longest name or header that is read, in characters."""


class TextCursor:
    """A position in a text that is still coming. `ended`: nothing more comes.

    While it *holds*, what is taken is kept aside, so that a call that turns out to be none can be shown.
    """

    def __init__(self) -> None:
        self.text, self.at, self.ended = "", 0, False
        self._held: list[str] | None = None

    def push(self, piece: str) -> None:
        """More text."""
        self.text, self.at = self.text[self.at :] + piece, 0

    @property
    def num_left(self) -> int:
        """Characters that are not taken, or kept aside."""
        return len(self.text) - self.at + sum(map(len, self._held or ()))

    def hold(self) -> None:
        """From here on, keep what is taken (and forget what was kept)."""
        self._held = []

    def release(self) -> str:
        """What was taken since `hold`; nothing is kept any more."""
        held, self._held = "".join(self._held or ()), None
        return held

    def take(self, count: int) -> str:
        """The next `count` characters, which must be there."""
        piece = self.text[self.at : self.at + count]
        self.at += len(piece)
        if self._held is not None:
            self._held.append(piece)
        return piece

    def here(self) -> str:
        """The next character if it has come already, else ""."""
        return self.text[self.at : self.at + 1]

    def peek(self, count: int = 1) -> Reading[str]:
        """The next `count` characters without taking them; fewer at the end."""
        while len(self.text) - self.at < count and not self.ended:
            yield
        return self.text[self.at : self.at + count]

    def sees(self, literal: str) -> Reading[bool]:
        """Whether `literal` comes next; waits only while it still may."""
        while True:
            seen = self.text[self.at : self.at + len(literal)]
            if seen == literal:
                return True
            if self.ended or not literal.startswith(seen):
                return False
            yield

    def is_cut(self, literal: str) -> bool:
        """Whether the text ends here, inside `literal`."""
        return self.ended and literal.startswith(self.text[self.at :])

    def skip(self, literal: str) -> Reading[bool]:
        """Takes `literal` if it comes next; says whether it did."""
        found = yield from self.sees(literal)
        if found:
            self.take(len(literal))
        return found

    def space(self) -> Reading[str]:
        """Takes white space and returns it."""
        taken = ""
        while (yield from self.peek()) in tuple(SPACE):
            taken += self.run(SPACES)
        return taken

    def skip_spaced(self, literal: str) -> Reading[None]:
        """Takes `literal` if it comes next, and white space on both sides."""
        yield from self.space()
        yield from self.skip(literal)
        yield from self.space()

    def run(self, pattern: re.Pattern[str]) -> str:
        """Takes what `pattern` matches in the text that is here; may be nothing."""
        match = pattern.match(self.text, self.at)
        return self.take(match.end() - self.at) if match else ""

    def ahead(self, pattern: re.Pattern[str]) -> Reading[str]:
        """The longest run of `pattern` that comes next, not taken; "" if it is absurdly long."""
        while True:
            match = pattern.match(self.text, self.at)
            length = match.end() - self.at if match else 0
            if length > _SHORT:
                return ""
            if self.ended or self.at + length < len(self.text):
                return self.text[self.at : self.at + length]
            yield

    def word(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Takes the run that `ahead` returns."""
        return self.take(len((yield from self.ahead(pattern))))


def read_whole(text: str, read: Callable[[TextCursor], Reading[bool]]) -> bool:
    """Whether `read` takes all of a text that is here already."""
    cursor = TextCursor()
    cursor.push(text)
    cursor.ended = True
    try:
        next(read(cursor))
    except StopIteration as done:
        return bool(done.value) and cursor.at == len(cursor.text)
    raise AssertionError("a reader waits although the text has ended")
