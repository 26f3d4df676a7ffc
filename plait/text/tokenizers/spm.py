"""SentencePiece vocabularies of the BPE kind: pieces with scores (Kudo & Richardson 2018), run by splintr.

splintr merges as SentencePiece does but always prepends a space. Here `▁` is renamed in every piece to a
character that no piece has. So what splintr prepends is a foreign character that merges with nothing and is
cut off again. The spaces, prepended or not, are ours to place.
"""

from __future__ import annotations

from collections.abc import Sequence

import splintr
from msgspec import Struct

from plait.errors import BadFile, UnsupportedFormat
from plait.text.tokenizers.hf import sentencepiece_bytes
from plait.text.tokenizers.tokenizer import Literals

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces, as SentencePiece and GGUF number them."""

_PRIVATE = range(0xE000, 0xF8FF)


class Pieces(Struct, frozen=True):
    """A SentencePiece model: one text, score and kind for each id.

    `space_first`: a space is prepended to a text.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    space_first: bool = True


class PieceEngine:
    """What the engines of scored pieces have in common."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        self._bytes = {
            sentencepiece_bytes(pieces.texts[i]): i for i, kind in enumerate(pieces.kinds) if kind == BYTE
        }

    @property
    def vocab_size(self) -> int:
        return len(self._pieces.texts)

    def has_token(self, token_id: int) -> bool:
        return token_id < len(self._pieces.texts) and self._pieces.kinds[token_id] != UNUSED

    def token_bytes(self, token_id: int) -> bytes | None:
        if not self.has_token(token_id):
            return None
        text, is_byte = self._pieces.texts[token_id], self._pieces.kinds[token_id] == BYTE
        return sentencepiece_bytes(text) if is_byte else self._text_bytes(text)

    def _text_bytes(self, text: str) -> bytes:
        return text.encode()


class SpmEngine(PieceEngine):
    """Ordinary text by a SentencePiece BPE model with byte fallback, so that no text is unknown.

    Raises BadFile for a model without a piece for the space, UnsupportedFormat without the 256 bytes.
    """

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)
        if "▁" not in pieces.texts:
            raise BadFile("tokenizer: no piece '▁' (the space) among its tokens; not a SentencePiece model")
        if len(self._bytes) != 256:
            raise UnsupportedFormat(
                f"tokenizer: {len(self._bytes)} byte tokens instead of 256; a SentencePiece vocabulary that "
                "cannot write every text is not supported, give another with --vocab"
            )
        used = set("".join(pieces.texts))
        self._space, self._hidden = [chr(c) for c in _PRIVATE if chr(c) not in used][:2]
        self._merger = splintr.SpmTokenizer(
            [self._rename(i) for i in range(len(pieces.texts))], list(pieces.scores)
        )
        self._foreign = len(self._merger.encode_ordinary(self._space)) - 1
        self._user_defined = {
            self._escape(text): i for i, text in enumerate(pieces.texts) if pieces.kinds[i] == USER_DEFINED
        }
        self._literals = Literals(self._user_defined)

    def _rename(self, token_id: int) -> str:
        """The piece as splintr sees it; control tokens get a text that no merge can reach."""
        if self._pieces.kinds[token_id] in (CONTROL, UNKNOWN):
            return f"{self._hidden}{token_id}"
        return self._escape(self._pieces.texts[token_id])

    def _escape(self, text: str) -> str:
        return text.replace(" ", self._space).replace("▁", self._space)

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of `text`; a space is prepended if this is the first text and the model has it so."""
        if not text:
            return []
        ids: list[int] = []
        for n, part in enumerate(text.split(self._space)):
            if n:  # the very character that stands for the space here, as itself
                ids.extend(self._bytes[bytes([byte])] for byte in self._space.encode())
            escaped = self._escape(part)
            if n == 0 and first and self._pieces.space_first:
                escaped = self._space + escaped
            ids.extend(self._user_defined_first(escaped))
        return ids

    def _user_defined_first(self, escaped: str) -> list[int]:
        ids, position = [], 0
        for start, end in self._literals.find(escaped):
            ids.extend(self._merge(escaped[position:start]))
            ids.append(self._user_defined[escaped[start:end]])
            position = end
        return ids + self._merge(escaped[position:])

    def _merge(self, escaped: str) -> list[int]:
        ids: list[int] = self._merger.encode_ordinary(escaped)[self._foreign :] if escaped else []
        return ids

    def _text_bytes(self, text: str) -> bytes:
        return text.replace("▁", " ").encode()
