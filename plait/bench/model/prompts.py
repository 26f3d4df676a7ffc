"""Prompts of exactly so many tokens: the same ids for every engine."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Protocol

TEXT = (
    "The tide went out in the night and left the harbour dry. Boats lay on their sides in the mud, and the "
    "fishermen walked among them with lanterns, looking for what the sea had given back. A child found a "
    "bell that nobody had heard for forty years, and by noon the "
    "whole town knew which ship it had belonged to. "
)


class Encodes(Protocol):
    def encode(self, text: str) -> list[int]: ...


class Prompts:
    """prompts(length, which): token ids; another `which` is another text. Random ids without a tokenizer."""

    def __init__(self, tokenizer: Encodes | None, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size

    def __call__(self, length: int, which: int = 0) -> list[int]:
        if self._tokenizer is None:
            draw = random.Random(f"{length}/{which}")
            return [draw.randrange(self._vocab_size) for _ in range(length)]
        start = 7 * which % len(TEXT)
        text, ids = TEXT[start:], list[int]()
        while len(ids) < length:
            text += TEXT * (length // 48 + 1)
            ids = self._tokenizer.encode(f"{which}. {text}")
        return ids[:length]

    def several(self, count: int, longest: int) -> Sequence[list[int]]:
        """Prompts of different lengths up to `longest`, for checks."""
        return [self(max(1, min(longest, 8 + 3 * i)), i) for i in range(count)]
