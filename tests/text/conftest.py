"""Vocabularies to test with: two real ones from GGUF files, and small ones trained on the spot."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

CORPUS = [
    f"The quick brown fox number {i} jumps over the lazy dog; héllo wörld, 你好! def f(x): return x+{i}\n"
    for i in range(200)
]
_CONTROL = """
<s> </s> <unk> <|im_start|> <|im_end|> <|endoftext|> <|begin_of_text|> <|eot_id|> <|start_header_id|>
<|end_header_id|> <start_of_turn> <end_of_turn> <bos> <eos> [INST] [/INST] <|start_of_role|> <|end_of_role|>
<|end_of_text|> <｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜User｜> <｜Assistant｜>
"""
CONTROL = _CONTROL.split()
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}


class _Metadata:
    """A reader of a GGUF file's key-value pairs, written apart from Plait's own."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 24

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self.data, self.at)
        self.at += struct.calcsize("<" + form)
        return value

    def text(self) -> str:
        length = self.scalar("Q")
        self.at += length
        return self.data[self.at - length : self.at].decode()

    def value(self, kind: int) -> Any:
        if kind == 8:
            return self.text()
        if kind == 9:
            inner, count = self.scalar("I"), self.scalar("Q")
            return [self.value(inner) for _ in range(count)]
        return self.scalar(_SCALARS[kind])


def read_metadata(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        reader = _Metadata(file.read(32 << 20))
    pairs = {}
    for _ in range(struct.unpack_from("<Q", reader.data, 16)[0]):
        key = reader.text()
        pairs[key] = reader.value(reader.scalar("I"))
    return pairs


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2: Path) -> Mapping[str, Any]:
    return read_metadata(smollm2)


@pytest.fixture(scope="session")
def gemma3_metadata(gemma3: Path) -> Mapping[str, Any]:
    return read_metadata(gemma3)


@pytest.fixture(scope="session")
def byte_level() -> Tokenizer:
    """A byte-level BPE with the control tokens of many families; `<think>` is added but not special."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in CONTROL])
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return tokenizer


def _sentencepiece_like() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    first_bytes = [f"<0x{b:02X}>" for b in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=700, special_tokens=["<unk>", "<s>", "</s>", *first_bytes], show_progress=False
    )
    words = [word for line in CORPUS for word in line.split()]
    tokenizer.train_from_iterator(words, trainer)
    described = [t for t in CONTROL if t not in ("<unk>", "<s>", "</s>")]
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in described])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


@pytest.fixture(scope="session")
def metaspace() -> Tokenizer:
    """A SentencePiece-like BPE that prepends its space at the start of a text only (Mistral)."""
    tokenizer = _sentencepiece_like()
    # The bytes are ordinary tokens of such vocabularies, though the trainer can only make them special.
    described = json.loads(tokenizer.to_str())
    described["added_tokens"] = [t for t in described["added_tokens"] if not t["content"].startswith("<0x")]
    return Tokenizer.from_str(json.dumps(described))


@pytest.fixture(scope="session")
def prepending(metaspace: Tokenizer) -> Tokenizer:
    """The same vocabulary; its space is prepended after each control token too (Llama 2)."""
    tokenizer = Tokenizer.from_str(metaspace.to_str())
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    described = json.loads(tokenizer.to_str())
    described["pre_tokenizer"] = None
    return Tokenizer.from_str(json.dumps(described))
