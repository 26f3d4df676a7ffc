"""SentencePiece's own `tokenizer.model`: a protobuf message, read without the library.

Fields as in sentencepiece_model.proto: pieces 1 (text 1, score 2, kind 3), trainer_spec 2 (model_type 3,
bos_id 41, eos_id 42), normalizer_spec 3 (charsmap 2, add_dummy_prefix 3, remove_extra_whitespaces 4).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from plait.errors import BadFile, UnsupportedFormat
from plait.text.tokenizers.spm import NORMAL

_BPE = 2
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_WAY_OUT = "write a tokenizer.json from it (transformers: AutoTokenizer.from_pretrained(...).save_pretrained)"


def sentencepiece_metadata(path: Path) -> dict[str, Any]:
    """A `tokenizer.model` in the words of GGUF metadata.

    Raises BadFile when it is not one, UnsupportedFormat for kinds other than BPE without normalization.
    """
    try:
        fields = list(_fields(path.read_bytes()))
        pieces = [dict(_fields(value)) for number, value in fields if number == 1]
        parts = {number: dict(_fields(value)) for number, value in fields if number in (2, 3)}
        texts = [bytes(piece[1]).decode() for piece in pieces]
    except OSError as error:
        raise BadFile(f"{path}: {error.strerror or error}") from error
    except (ValueError, IndexError, KeyError, TypeError, struct.error) as error:
        raise BadFile(f"{path}: not a SentencePiece model ({error}); {_WAY_OUT}") from error
    trainer, normalizer = parts.get(2, {}), parts.get(3, {})
    _check(path, trainer, normalizer)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": texts,
        "tokenizer.ggml.scores": [piece.get(2, 0.0) for piece in pieces],
        "tokenizer.ggml.token_type": [piece.get(3, NORMAL) for piece in pieces],
        "tokenizer.ggml.add_space_prefix": bool(normalizer.get(3, 1)),
        **_ids(trainer, len(texts)),
    }


def _check(path: Path, trainer: Mapping[int, object], normalizer: Mapping[int, object]) -> None:
    if trainer.get(3, 1) != _BPE:
        raise UnsupportedFormat(f"{path}: a SentencePiece model of a kind other than BPE; {_WAY_OUT}")
    if normalizer.get(2) or normalizer.get(4, 1):
        raise UnsupportedFormat(f"{path}: a SentencePiece model that normalizes its text; {_WAY_OUT}")


def _ids(trainer: Mapping[int, Any], size: int) -> dict[str, int]:
    found = {"bos": trainer.get(41, 1), "eos": trainer.get(42, 2)}
    return {f"tokenizer.ggml.{name}_token_id": i for name, i in found.items() if 0 <= i < size}


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """(number, value) of each field of a protobuf message."""
    position = 0
    while position < len(message):
        key, position = _varint(message, position)
        number, kind = key >> 3, key & 7
        value: Any
        if kind == _VARINT:
            value, position = _varint(message, position)
        elif kind == _BYTES:
            length, position = _varint(message, position)
            value, position = message[position : position + length], position + length
            if position > len(message):
                raise ValueError("a field reaches past the end of the file")
        elif kind in (_FIXED32, _FIXED64):
            form, width = ("<f", 4) if kind == _FIXED32 else ("<d", 8)
            value, position = struct.unpack_from(form, message, position)[0], position + width
        else:
            raise ValueError(f"field {number} has the unknown wire type {kind}")
        yield number, value


def _varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
    raise ValueError("an integer of more than ten bytes")
