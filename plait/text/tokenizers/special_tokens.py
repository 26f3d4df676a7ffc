"""Control tokens in text: finding them, and keeping them out of what a user wrote.

A control token (`<|im_end|>`, `<s>`) is one id with a text. Whether that text means the token or just these
characters is decided by where it came from, never by what it looks like. This module only finds the places.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Special:
    """A control token. `lstrip`, `rstrip`: it takes the white space on that side.

    `single_word`: it is not found inside a word.
    """

    id: int
    text: str
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False


class Literals:
    """Finds any of many fixed strings in a text, leftmost and longest first, in linear time.

    An alternation of thousands of literals (Gemma has 6,249 control tokens) would be tried one by one at
    every `<`. Here a candidate costs one set lookup for each length that starts with its two characters.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(t for t in texts if t)
        lengths: dict[str, set[int]] = {}
        for text in self._texts:
            lengths.setdefault(text[:2], set()).add(len(text))
        self._lengths = {start: tuple(sorted(found, reverse=True)) for start, found in lengths.items()}
        starts = "".join(re.escape(c) for c in sorted({t[0] for t in self._texts}))
        self._start = re.compile(f"[{starts}]") if starts else None

    def find(self, text: str) -> Iterator[tuple[int, int]]:
        """(start, end) of every occurrence; they do not overlap."""
        if self._start is None:
            return
        position = 0
        while found := self._start.search(text, position):
            start = found.start()
            end = self._match(text, start)
            if end:
                yield start, end
            position = end or start + 1

    def _match(self, text: str, start: int) -> int:
        for key in (text[start : start + 2], text[start]):
            for length in self._lengths.get(key, ()):
                end = start + length
                if end <= len(text) and text[start:end] in self._texts:
                    return end
        return 0


class SpecialTokens:
    """The control tokens of a vocabulary."""

    def __init__(self, specials: Iterable[Special]) -> None:
        self.by_text = {s.text: s for s in specials if s.text}
        self.by_id = {s.id: s for s in self.by_text.values()}
        self.ids = frozenset(self.by_id)
        self._literals = Literals(self.by_text)

    def occur(self, text: str) -> bool:
        """Whether the text of any control token occurs in `text`."""
        return next(self._literals.find(text), None) is not None

    def split(self, text: str) -> list[int | str]:
        """`text` as ordinary strings and ids of control tokens, in order; no string is empty."""
        parts: list[int | str] = []
        position, strip_next = 0, False
        for start, end in self._literals.find(text):
            special = self.by_text[text[start:end]]
            if special.single_word and _inside_word(text, start, end):
                continue
            before = text[position:start]
            before = before.lstrip() if strip_next else before
            parts.append(before.rstrip() if special.lstrip else before)
            parts.append(special.id)
            position, strip_next = end, special.rstrip
        rest = text[position:]
        parts.append(rest.lstrip() if strip_next else rest)
        return [part for part in parts if part != ""]

    def cut(self, text: str) -> list[str]:
        """`text` cut into strings such that none holds the text of a control token."""
        cuts = [start + 1 for start, _ in self._literals.find(text)]
        return [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True) if a < b]


def _inside_word(text: str, start: int, end: int) -> bool:
    before = start > 0 and (text[start - 1].isalnum() or text[start - 1] == "_")
    return before or (end < len(text) and (text[end].isalnum() or text[end] == "_"))


_ENDS = """
<|endoftext|> <|end_of_text|> <|eot_id|> <|eom_id|> <|eot|> <|eom|> <|im_end|> <|end|> <|end_of_turn|>
<end_of_turn> <|return|> <|call|> <|flush|> <|calls|> <|endofturn|> <|stop|> <end_of_utterance>
<EOT> _<EOT> <|EOT|> [EOT] [EOS] [e~[ <turn|> <｜end▁of▁sentence｜>
"""
_END_OF_GENERATION = frozenset(_ENDS.split())
_ONLY_IF_CONTROL = frozenset({"</s>", "<eos>"})  # HTML's strike-through is an ordinary piece of Gemma


def end_of_generation(control: Iterable[Special], user_defined: Iterable[Special] = ()) -> frozenset[int]:
    """Ids that end a generation, known by their text.

    Harmony's `<|end|>` only closes a message: where `<|return|>` and `<|call|>` exist it is not an end.
    """
    texts = {s.text: s.id for s in user_defined if s.text in _END_OF_GENERATION}
    texts |= {s.text: s.id for s in control if s.text in _END_OF_GENERATION | _ONLY_IF_CONTROL}
    if {"<|return|>", "<|call|>"} <= texts.keys():
        texts.pop("<|end|>", None)
    return frozenset(texts.values())
