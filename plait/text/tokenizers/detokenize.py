"""Token ids to text, one token at a time, never showing half a character."""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from plait.text.tokenizers.tokenizer import Tokenizer

_LONGEST_CHARACTER = 4  # bytes of UTF-8


class StreamDecoder:
    """Text of a continuation, token by token.

    The law: `decode(prefix + ids) == decode(prefix) + push(ids[0]) + … + flush()`, for a prefix that ends
    with a whole character. A prefix that ends inside one hands its bytes on, so the character appears.
    `shown`: control tokens with text that appears, although that of the others does not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        skip_special: bool = True,
        prefix_ids: Sequence[int] = (),
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = tokenizer.special_ids - shown if skip_special else frozenset[int]()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        tail = self._tail(prefix_ids)
        self._at_start = tokenizer.strips_first_space and not tail
        self._utf8.decode(tail)

    def push(self, token_id: int) -> str:
        """The characters that are complete now; "" while one is open."""
        piece = self._shown(token_id)
        if piece and self._at_start:
            piece, self._at_start = piece.removeprefix(b" "), False
        return self._utf8.decode(piece)

    def flush(self) -> str:
        """The true end: an open character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _shown(self, token_id: int) -> bytes:
        if token_id in self._hidden:
            return b""
        return self._tokenizer.token_bytes(token_id)

    def _tail(self, prefix_ids: Sequence[int]) -> bytes:
        tail = b""
        for token_id in reversed(prefix_ids):
            tail = self._shown(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail[-_LONGEST_CHARACTER:]


def text_offsets(
    tokenizer: Tokenizer, ids: Sequence[int], prefix_ids: Sequence[int] = (), skip_special: bool = True
) -> list[int]:
    """Where in the decoded text each token begins, in characters (`logprobs.text_offset`).

    A token that goes on with an open character begins where that character does.
    """
    decoder = StreamDecoder(tokenizer, skip_special, prefix_ids)
    offsets, length = [], 0
    for token_id in ids:
        offsets.append(length)
        length += len(decoder.push(token_id))
    return offsets
