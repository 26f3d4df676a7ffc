"""A tokenizer's tokens as grammars see them: bytes, ends of generation, and control tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from plait.text.grammar.checker import ends_of, special_of
from plait.text.grammar.library import token_table
from plait.text.tokenizers.tokenizer import Tokenizer

Mask = NDArray[np.uint32]
"""One bit per token id, the lowest first: [num_words] uint32."""


@dataclass(frozen=True)
class Vocabulary:
    """What every grammar of one model shares. Immutable once built, so threads share it.

    `ends`: ids that end a reply; they and the other control tokens (`special`) match no text. `usable`: a
    mask of the ids that may ever be sampled; `usable_inside`: the same without the ends.
    """

    tokenizer: Tokenizer
    size: int
    special: Mapping[int, str]
    ends: frozenset[int]
    table: object
    usable: Mask
    usable_inside: Mask

    @property
    def num_words(self) -> int:
        """The length of a mask, in 32-bit words."""
        return len(self.usable)

    @cached_property
    def _any_id(self) -> int:
        """Some ordinary token, after which a text is not the first one."""
        ordinary = (i for i in range(self.size) if i not in self.special and self.tokenizer.token_bytes(i))
        return next(ordinary)

    def ids(self, text: str) -> tuple[int, ...]:
        """The tokens of a text that goes on from another; none if this vocabulary cannot write just it."""
        found = self.tokenizer.encode_parts([self._any_id, text])[1:]
        if b"".join(map(self.tokenizer.token_bytes, found)) != text.encode():
            return ()
        return tuple(found)


def vocabulary_of(
    tokenizer: Tokenizer, vocab_size: int | None = None, ends: Iterable[int] = ()
) -> Vocabulary:
    """Builds the table of tokens: 0.2 s for 49k of them, 1.5 s for 262k, most of it holding the interpreter.

    `vocab_size`: how many logits the model has, if not as many as the tokenizer has ids. `ends`: more ids
    that end a reply. Raises BadGrammar for a vocabulary in which nothing ends a reply.
    """
    size = tokenizer.vocab_size if vocab_size is None else vocab_size
    last = ends_of(tokenizer, size, ends)
    special = special_of(tokenizer, size, last)
    known = min(size, tokenizer.vocab_size)
    tokens = [tokenizer.token_bytes(i) for i in range(known)] + [b""] * (size - known)
    bits = np.zeros((size + 31) // 32 * 32, np.uint8)
    bits[[i for i, token in enumerate(tokens) if token]] = 1
    bits[list(last)] = 1
    usable = _pack_mask(bits)
    bits[list(last)] = 0
    return Vocabulary(
        tokenizer=tokenizer,
        size=size,
        special=special,
        ends=last,
        table=token_table(tokens, list(special), sorted(last)),
        usable=usable,
        usable_inside=_pack_mask(bits),
    )


def _pack_mask(bits: NDArray[np.uint8]) -> Mask:
    packed = np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)
    packed.flags.writeable = False
    return packed
