"""PLaMo 2's vocabulary: the likeliest segmentation of a text (Kudo 2018), with bytes where no piece fits.

The `tokenizers` library finds it among the pieces that text may become. Where none fits it charges 10 more
than for the worst piece, so the worst is one of a character that means nothing. Of equally likely ways, the
library takes the one with the longest last piece, and PLaMo the one with the longest first piece. So text and
pieces are reversed. Scores are whole numbers, as PLaMo's are, so that what is equal stays so.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tokenizers
from tokenizers import models

from plait.errors import BadFile
from plait.text.tokenizers.spm import (
    BYTE,
    CONTROL,
    NORMAL,
    UNKNOWN,
    UNUSED,
    USER_DEFINED,
    PieceEngine,
    Pieces,
)

_UNIT = 1e4  # of a score: what is added up are whole numbers of it
_WORST = 10 - 1000 * _UNIT
_NAMES = ("NORMAL", "UNKNOWN", "CONTROL", "USER_DEFINED", "UNUSED", "BYTE")
_KINDS = dict(zip(_NAMES, (NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE), strict=True))
_LONG_CHARS = 10_000
_PRIVATE = range(0x10FFFD, 0x100000, -1)  # characters without an assigned meaning


class PlamoEngine(PieceEngine):
    """Ordinary text by a PLaMo 2 vocabulary. Raises BadFile if it has not all 256 bytes."""

    def __init__(self, pieces: Pieces) -> None:
        super().__init__(pieces)
        if len(self._bytes) != 256:
            raise BadFile(f"tokenizer: {len(self._bytes)} byte tokens instead of 256")
        self._ids = [
            i for i, kind in enumerate(pieces.kinds) if kind in (NORMAL, USER_DEFINED) and pieces.texts[i]
        ]
        used = {pieces.texts[i] for i in self._ids}
        nothing = next(c for c in map(chr, _PRIVATE) if c not in used)
        scores = (max(float(round(pieces.scores[i] * _UNIT)), _WORST) for i in self._ids)
        scored = [(pieces.texts[i][::-1], score) for i, score in zip(self._ids, scores, strict=True)]
        self._library = tokenizers.Tokenizer(models.Unigram([*scored, (nothing, _WORST)], unk_id=len(scored)))

    def encode(self, text: str, first: bool) -> list[int]:
        """Ids of `text`. No space is ever prepended."""
        text = text[::-1]
        if len(text) < _LONG_CHARS:
            found = self._library.encode(text, add_special_tokens=False)
        else:  # takes a moment; of the library's ways this one lets other threads go on meanwhile
            (found,) = self._library.encode_batch([text], add_special_tokens=False)
        ids: list[int] = []
        for piece, (start, end) in zip(reversed(found.ids), reversed(found.offsets), strict=True):
            if piece < len(self._ids):
                ids.append(self._ids[piece])
            else:  # no piece fits
                ids.extend(self._bytes[bytes([byte])] for byte in text[start:end][::-1].encode())
        return ids


def plamo_metadata(path: Path, config: Mapping[str, object]) -> dict[str, object]:
    """A tokenizer.jsonl ([text, score, kind, ...] a line) as GGUF's metadata would have it.

    config: tokenizer_config.json next to it, which names the control tokens. Raises BadFile.
    """
    rows = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        try:
            text, score, kind, *_ = json.loads(line)
            rows.append((str(text), float(score), _KINDS[kind]))
        except (ValueError, TypeError, KeyError) as error:
            raise BadFile(f"{path}, line {number}: it is not [text, score, kind]: {line[:80]!r}") from error
    texts = [text for text, _, _ in rows]
    key = "tokenizer.ggml."
    metadata: dict[str, object] = {
        f"{key}model": "plamo2",
        f"{key}tokens": texts,
        f"{key}scores": [score for _, score, _ in rows],
        f"{key}token_type": [kind for _, _, kind in rows],
        **{f"{key}{x}": config[x] for x in ("add_bos_token", "add_eos_token") if config.get(x) is not None},
    }
    for which in ("bos", "eos"):
        named = config.get(f"{which}_token", f"<|plamo:{which}|>")
        named = named.get("content") if isinstance(named, Mapping) else named
        if named in texts:
            metadata[f"{key}{which}_token_id"] = texts.index(named)
    return metadata
