"""Reads a reply's text: a parser separates its parts, and content is searched for stop strings.

Stop strings are looked for in content alone: they end neither thinking nor the arguments of a call.
"""

from __future__ import annotations

from plait.request import SamplingParams
from plait.text.output import Content, OutputDelta, OutputParser
from plait.text.output.stop_strings import StopMatcher


class Reading:
    """Reads the text of one choice. `parser` None: all of it is content.

    `matched`: the stop string that ended it; `has_ended`: that, or as many calls as were allowed. Text after
    that is dropped.
    """

    def __init__(self, params: SamplingParams, parser: OutputParser | None) -> None:
        self._parser, self._min_tokens = parser, params.min_tokens
        self._stop = StopMatcher(params.stop, include=params.include_stop_str_in_output)
        self._content_in = self._content_out = self._num_tokens = 0

    @property
    def matched(self) -> str | None:
        return self._stop.matched

    @property
    def has_ended(self) -> bool:
        return self.matched is not None or (self._parser is not None and self._parser.has_enough)

    @property
    def num_reasoning_tokens(self) -> int:
        return self._parser.num_reasoning_tokens if self._parser else 0

    @property
    def num_held(self) -> int:
        """Characters of the text so far that may or may not be shown, or never are, at its end."""
        waiting = self._parser.num_held if self._parser else 0
        return waiting + self._content_in - self._content_out

    def push(self, text: str) -> list[OutputDelta]:
        """The text of one more token; returns what can be emitted now."""
        self._num_tokens += 1
        return self._told(self._parser.push(text) if self._parser else [Content(text)])

    def finish(self, text: str, *, is_cut: bool = False) -> list[OutputDelta]:
        """The end, with the last of its text: what was held back comes out. `is_cut`: by a limit."""
        parts: list[OutputDelta] = [Content(text)]
        if self._parser:
            parts = [*self._parser.push(text, 0), *self._parser.finish(is_cut=is_cut)]
        told = self._told(parts)
        held = "" if self.has_ended else self._stop.flush()
        self._content_out += len(held)
        return [*told, *([Content(held)] if held else [])]

    def _told(self, parts: list[OutputDelta]) -> list[OutputDelta]:
        told: list[OutputDelta] = []
        for part in parts:
            if self.matched is not None:
                break
            if isinstance(part, Content):
                self._content_in += len(part.text)
                # min_tokens keeps stop strings asleep.
                is_asleep = self._num_tokens <= self._min_tokens
                shown = part.text if is_asleep else self._stop.push(part.text)[0]
                self._content_out += len(shown)
                part = Content(shown)
            if not isinstance(part, Content) or part.text:
                told.append(part)
        return told
