"""SentencePiece vocabularies of the BPE kind: pieces with scores (Kudo & Richardson 2018), run by splintr.

splintr merges as SentencePiece does but always prepends a space. Here `▁` is renamed in every piece to a
character that no piece has, so what splintr prepends is a foreign character that merges with nothing and is
cut off again; the spaces, prepended or not, are ours to place.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import splintr

from plait.errors import BadFile
from plait.text.hf_tokenizer import sentencepiece_bytes
from plait.text.special import Literals

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
"""Kinds of pieces, as SentencePiece and GGUF number them."""

_PRIVATE = range(0xE000, 0xF8FF)


@dataclass(frozen=True, slots=True)
class Pieces:
    """A SentencePiece model: one text, score and kind for each id.

    `space_first`: a space is prepended to a text.
    """

    texts: Sequence[str]
    scores: Sequence[float]
    kinds: Sequence[int]
    space_first: bool = True


class SpmEngine:
    """Ordinary text by a SentencePiece BPE model. Raises BadFile for one without a piece for the space."""

    def __init__(self, pieces: Pieces) -> None:
        self._pieces = pieces
        if "▁" not in pieces.texts:
            raise BadFile("tokenizer: no piece '▁' (the space) among its tokens; not a SentencePiece model")
        used = set("".join(pieces.texts))
        self._space, self._hidden = [chr(c) for c in _PRIVATE if chr(c) not in used][:2]
        self._merger = splintr.SpmTokenizer(
            [self._renamed(i) for i in range(len(pieces.texts))], list(pieces.scores)
        )
        self._foreign = len(self._merger.encode_ordinary(self._space)) - 1
        self._user_defined = {
            self._escape(text): i for i, text in enumerate(pieces.texts) if pieces.kinds[i] == USER_DEFINED
        }
        self._literals = Literals(self._user_defined)
        self._unknown = next((i for i, kind in enumerate(pieces.kinds) if kind == UNKNOWN), None)
        self._has_bytes = BYTE in pieces.kinds

    def _renamed(self, token_id: int) -> str:
        """The piece as splintr sees it; control tokens get a text that no merge can reach."""
        if self._pieces.kinds[token_id] in (CONTROL, UNKNOWN):
            return f"{self._hidden}{token_id}"
        return self._escape(self._pieces.texts[token_id])

    def _escape(self, text: str) -> str:
        return text.replace(" ", self._space).replace("▁", self._space)

    @property
    def vocab_size(self) -> int:
        return len(self._pieces.texts)

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of `text`; a space is prepended if this is the first text and the model wants it."""
        if not text:
            return []
        ids: list[int] = []
        for n, part in enumerate(text.split(self._space)):
            if n:  # the very character that stands for the space here, as itself
                ids.extend(self._foreign_character())
            escaped = self._escape(part)
            if n == 0 and first and self._pieces.space_first:
                escaped = self._space + escaped
            ids.extend(self._user_defined_first(escaped))
        return ids if self._has_bytes else self._one_unknown(ids)

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

    def _foreign_character(self) -> list[int]:
        if self._has_bytes:
            return [self._pieces.texts.index(f"<0x{byte:02X}>") for byte in self._space.encode()]
        return [] if self._unknown is None else [self._unknown]

    def _one_unknown(self, ids: list[int]) -> list[int]:
        """SentencePiece writes a run of unknown characters as one token."""
        return [i for n, i in enumerate(ids) if not (n and i == self._unknown == ids[n - 1])]

    def token_bytes(self, token_id: int) -> bytes | None:
        if token_id >= len(self._pieces.texts) or self._pieces.kinds[token_id] == UNUSED:
            return None
        if self._pieces.kinds[token_id] == BYTE:
            return sentencepiece_bytes(self._pieces.texts[token_id])
        return self._pieces.texts[token_id].replace("▁", " ").encode()
