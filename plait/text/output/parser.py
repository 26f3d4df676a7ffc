"""Parses a model's reply while it is written: separates content, thinking and tool calls.

What holds for every way of cutting the text into parts:

- The joined content, reasoning and arguments are those of the uncut text, and so are the calls.
- Joined arguments are at every moment the beginning of a valid JSON text, and a whole one when the call ended
  complete. They are the model's own characters where it wrote JSON.
- No marker of a call that was found is in the content. White space that touches a call or a block of
  thinking is content only between two other parts of content.
- Text that began like a call and is none is content in full, its marker included. So is a call that is cut
  off or malformed before its arguments began.
- A call that is cut off or malformed *inside* its arguments has begun, and ends with `complete=False`. What
  the model wrote from the first wrong character on is content, without the closing marker.
- Thinking ends with its closing marker, or before a marker that its format has for what follows (`until`).
- Thinking begins where a reply begins, also once more behind thinking, and nowhere else: its markers behind
  content or a call are content. Formats of which every part has a marker (`anywhere`) are the exception.
- Nothing raises, and the time is linear in the text.

The text must hold the markers. Detokenizers leave control tokens out, and markers often are control tokens or
hold some. So the caller must show those that `OutputParser.find_shown` names, and only those, when it
detokenizes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from plait.text.output.cursor import SPACE, SPACES, Reading
from plait.text.output.deltas import Content, OutputDelta, ReplyBuilder
from plait.text.output.json_calls import CallSyntax
from plait.text.output.reasoning import ReasoningFormat

_LEFT_OVER = SPACE + "}],;`"


class Markers:
    """Finds the first of some fixed strings in a text of which the end may be missing."""

    def __init__(self, markers: Iterable[str]) -> None:
        texts = sorted(set(markers), key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, texts))) if texts else None
        self._starts = (
            re.compile("[" + "".join(re.escape(text[0]) for text in texts) + "]") if texts else None
        )
        self._beginnings = {text[:n] for text in texts for n in range(1, len(text))}
        self._longest = max(map(len, self._beginnings), default=0)

    def find(self, text: str, start: int, ended: bool) -> tuple[int, int] | None:
        """(start, end) of the first one; None while a longer one may still come of it."""
        found = self._pattern.search(text, start) if self._pattern else None
        if not found or (not ended and text[found.start() :] in self._beginnings):
            return None
        return found.span()

    def safe(self, text: str, start: int) -> int:
        """Where the end of `text` begins that may become a marker."""
        end = len(text)
        at = max(start, end - self._longest)
        while self._starts and (found := self._starts.search(text, at)):
            if text[found.start() :] in self._beginnings:
                return found.start()
            at = found.end()
        return end


class OutputParser:
    """Reads one reply. `push` its text as it comes, then `finish`; each returns what was found.

    `calls` None, or no tools: calls are not looked for. `reasoning` None: nor is thinking; `starts_open`: the
    prompt ended inside it; `may_think` False: none begins. `make_id` gives each call its id. `most_calls` is
    1 where parallel calls are forbidden: further ones are left out, and at `has_enough` the caller may stop.
    """

    def __init__(
        self,
        *,
        calls: CallSyntax | None = None,
        reasoning: ReasoningFormat | None = None,
        tools: Mapping[str, Mapping[str, object]] | None = None,
        make_id: Callable[[], str] = str,
        starts_open: bool = False,
        may_think: bool = True,
        most_calls: int | None = None,
    ) -> None:
        self._calls = calls if tools else None
        self._thinks_first = may_think and reasoning is not None and not reasoning.anywhere
        self._ends = {pair.opening: pair.closing for pair in reasoning.pairs} if reasoning else {}
        self._until = reasoning.until if reasoning else ()
        self._passed = frozenset(reasoning.wrappers if reasoning else ())
        self._most = most_calls
        opens = self._calls.opens if self._calls else ()
        closes = self._calls.closes if self._calls else ()
        self.markers = frozenset(self._calls.markers if self._calls else ()) | (
            reasoning.markers if reasoning else frozenset()
        )
        anywhere = self._ends if may_think and reasoning is not None and reasoning.anywhere else ()
        self._first = Markers((*opens, *anywhere, *self._passed))
        self._after = Markers((*opens, *anywhere, *self._passed, *closes))
        self._reply = ReplyBuilder(tools or {}, make_id, most_calls)
        self._may_be_bare = bool(self._calls and self._calls.bare)
        self._may_close = self._is_cut = False
        self.is_reasoning = starts_open and bool(self._ends)
        self.num_reasoning_chars = self.num_reasoning_tokens = 0
        self._reading = self._read()
        self._advance()

    @property
    def num_calls(self) -> int:
        """Calls that have ended, complete or not."""
        return self._reply.num_calls

    @property
    def has_enough(self) -> bool:
        """Whether as many calls as were allowed are whole, so that the rest will not be emitted."""
        return self._most is not None and self._reply.num_whole >= self._most

    @property
    def num_held(self) -> int:
        """Characters at the end of the text so far that were not emitted as anything yet."""
        return self._reply.num_held

    def find_shown(self, special_tokens: Iterable[str]) -> frozenset[str]:
        """The control tokens, of these, that must appear in the text."""
        return frozenset(token for token in special_tokens if any(token in marker for marker in self.markers))

    def push(self, text: str, num_tokens: int = 1) -> list[OutputDelta]:
        """More of the reply, and how many tokens it was (for `num_reasoning_tokens`)."""
        if self.is_reasoning:
            self.num_reasoning_tokens += num_tokens
        if not self.markers and not (self._calls and self._calls.bare):
            return [Content(text)] if text else []
        self._reply.cursor.push(text)
        self._advance()
        return self._reply.collect()

    def finish(self, *, is_cut: bool = False) -> list[OutputDelta]:
        """The end of the reply: what was held back comes out. `is_cut`: by a limit, so that what a call's
        marker opened and nothing closed was one in the making, and is no content.
        """
        self._reply.cursor.ended, self._is_cut = True, is_cut
        self._advance()
        return self._reply.collect()

    def _advance(self) -> None:
        next(self._reading, None)

    def _read(self) -> Reading[None]:
        cursor = self._reply.cursor
        if self.is_reasoning:
            yield from self._think(tuple(self._ends.values()))
        while marker := (yield from self._content()):
            if marker in self._ends:
                cursor.take(len(marker))
                yield from self._think((self._ends[marker],))
            elif self._calls:
                yield from self._call(self._calls, marker)
        self._reply.close()

    def _content(self) -> Reading[str]:
        """Emits content up to a marker, which is returned (not taken), or a bare call's first character."""
        cursor, reply = self._reply.cursor, self._reply
        while True:
            if self._thinks_first:
                yield from self._space()
                for opening in self._ends:
                    if (yield from cursor.sees(opening)):
                        return opening
            if self._may_be_bare and self._calls:
                yield from self._space()
                first = yield from cursor.peek()
                if first and first in self._calls.bare:
                    return first
            markers = self._after if self._may_close else self._first
            found = markers.find(cursor.text, cursor.at, cursor.ended)
            reply.say(cursor.take((found[0] if found else self._safe(markers)) - cursor.at))
            self._may_be_bare = self._may_be_bare and not reply.has_content
            self._thinks_first = self._thinks_first and not reply.has_content
            if found and not self._close(marker := cursor.text[slice(*found)]):
                return marker
            if not found and cursor.ended:
                return ""
            if not found:
                yield

    def _space(self) -> Reading[None]:
        """Emits the white space that comes next, if any does."""
        while (yield from self._reply.cursor.peek()) in tuple(SPACE):
            self._reply.say(self._reply.cursor.run(SPACES))

    def _close(self, marker: str) -> bool:
        """Takes a closing marker that belongs to a call, or one that only wraps content."""
        if marker in self._ends or (self._calls and marker in self._calls.opens):
            return False
        self._reply.cursor.take(len(marker))
        self._reply.leave_content()
        self._may_close = self._may_close and marker in self._passed
        return True

    def _think(self, closings: tuple[str, ...]) -> Reading[None]:
        """A block of thinking, after its opening marker; one that the prompt opened may be of any kind."""
        cursor, reply = self._reply.cursor, self._reply
        self.is_reasoning, end, found = True, Markers((*closings, *self._until)), None
        reply.leave_content()
        yield from cursor.space()
        while not found:
            found = end.find(cursor.text, cursor.at, cursor.ended)
            safe = found[0] if found else self._safe(end)
            self.num_reasoning_chars += reply.think(cursor.take(safe - cursor.at))
            if not found and cursor.ended:
                break
            if not found:
                yield
        if found and (closing := cursor.text[slice(*found)]) not in self._until:
            cursor.take(len(closing))
        self.num_reasoning_chars += reply.end_thinking(cut=not found)
        self.is_reasoning = False

    def _safe(self, markers: Markers) -> int:
        cursor = self._reply.cursor
        return len(cursor.text) if cursor.ended else markers.safe(cursor.text, cursor.at)

    def _call(self, calls: CallSyntax, marker: str) -> Reading[None]:
        """A call or several behind one marker, or text that only looked so."""
        cursor, reply = self._reply.cursor, self._reply
        before = reply.num_calls
        self._may_be_bare = self._thinks_first = False
        cursor.hold()
        marked = marker in calls.opens
        cursor.take(len(marker) if marked else 0)
        whole = yield from calls.body(reply)
        held = cursor.release()
        self._may_close = self._may_close or (marked and (whole or reply.num_calls > before))
        if whole:
            reply.leave_content()
            while (yield from cursor.peek()) == "}":
                cursor.take(1)
        elif marked and self._is_cut and cursor.at == len(cursor.text):
            reply.leave_content()
        elif reply.num_calls == before or held.strip(_LEFT_OVER):
            reply.say(held)
