"""Damaged files of every format: an error of ours or a model, never a crash, a hang or a flood of memory."""

from __future__ import annotations

import base64
import json
import random
from pathlib import Path
from typing import Any

import pytest
import sentencepiece

from plait.errors import PlaitError
from plait.text.load import load_chat_template, load_tokenizer
from tests.checkpoint.quantized.packings import PACKINGS
from tests.checkpoint.readers.damage import (
    CONFIG,
    bounded,
    damaged,
    hostile,
    spoiled,
    survives,
    use,
    write_gguf,
    write_packed,
    write_plain,
)

FEW, MANY = 60, 1200
JSON_FILES = ("config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json")
JSON_FILES += ("generation_config.json",)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_plain(tmp_path_factory.mktemp("damaged") / "plain")


@pytest.fixture(scope="module")
def blocks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("damaged") / "blocks")


def trouble(model: Path, file: str, count: int, seed: int) -> int:
    """How many of so many damaged copies of a file are still taken for a model."""
    rng, data = random.Random(seed), (model / file).read_bytes()
    return sum(
        spoiled(model, file, damaged(data, rng), f"{file}, seed {seed}, case {n}") for n in range(count)
    )


def lies(model: Path, file: str, count: int, seed: int) -> None:
    """Values that no JSON file of a model should have."""
    rng, said = random.Random(seed), json.loads((model / file).read_text())
    for n in range(count):
        value = hostile(said, rng)
        spoiled(model, file, json.dumps(value).encode(), f"{file}, seed {seed}, case {n}: {value}"[:2000])


def test_the_undamaged_models_are_taken(plain: Path, blocks: Path) -> None:
    assert survives(plain, "plain")
    with bounded():
        use(plain)


def test_damaged_safetensors(plain: Path) -> None:
    assert trouble(plain, "model-00001-of-00002.safetensors", FEW, 1) < FEW


def test_damaged_gguf_of_every_block_type(blocks: Path) -> None:
    trouble(blocks, "model.gguf", FEW, 2)


@pytest.mark.parametrize("name", sorted(PACKINGS)[:: max(1, len(PACKINGS) // 8)])
def test_damaged_quantized_safetensors(name: str, tmp_path: Path) -> None:
    model = write_packed(tmp_path / "packed", name)
    assert survives(model, name)
    trouble(model, "model.safetensors", FEW // 6, 3)


@pytest.mark.parametrize("file", JSON_FILES)
def test_damaged_json(file: str, plain: Path) -> None:
    trouble(plain, file, FEW // 2, 4)
    lies(plain, file, FEW // 2, 5)


def test_hostile_configs(plain: Path) -> None:
    lies(plain, "config.json", 2 * FEW, 6)


@pytest.mark.parametrize("depth", [100, 100_000])
def test_nesting_without_end(depth: int, plain: Path) -> None:
    for file in JSON_FILES:
        deep = b'{"a":' * depth + b"1" + b"}" * depth
        spoiled(plain, file, deep, f"{file} nested {depth} deep")
        spoiled(plain, file, b"[" * depth, f"{file} opened {depth} times")


def vocabulary(folder: Path, name: str) -> Path:
    """A small vocabulary in a form of its own: SentencePiece's or tiktoken's."""
    if name.endswith(".tiktoken"):
        lines = (f"{base64.b64encode(bytes([n])).decode()} {n}\n" for n in range(256))
        (folder / name).write_text("".join(lines))
    else:
        corpus = folder / "corpus.txt"
        corpus.write_text("\n".join(f"the quick brown fox {n}" for n in range(300)))
        settings = {"model_type": "bpe", "byte_fallback": True, "normalization_rule_name": "identity"}
        settings |= {"remove_extra_whitespaces": False, "vocab_size": 330, "minloglevel": 2}
        sentencepiece.SentencePieceTrainer.train(
            input=str(corpus), model_prefix=str(folder / "tokenizer"), **settings
        )
    return folder / name


def read_text(folder: Path, **source: Any) -> None:
    with bounded():
        tokenizer = load_tokenizer(directory=folder, **source)
        load_chat_template(directory=folder, tokenizer=tokenizer)


@pytest.mark.parametrize("name", ["tokenizer.model", "words.tiktoken"])
def test_damaged_vocabularies(name: str, tmp_path: Path) -> None:
    path = vocabulary(tmp_path, name)
    source = {"vocab": f"{path}@cl100k_base"} if name.endswith(".tiktoken") else {}
    data, rng = path.read_bytes(), random.Random(8)
    read_text(tmp_path, **source)
    for n in range(FEW):
        path.write_bytes(damaged(data, rng))
        try:
            read_text(tmp_path, **source)
        except PlaitError:
            continue
        except BaseException as error:
            raise AssertionError(f"{name}, case {n}: {type(error).__name__}: {error}") from error


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_many_damaged_files(seed: int, plain: Path, blocks: Path) -> None:
    trouble(plain, "model-00002-of-00002.safetensors", MANY, 100 + seed)
    trouble(blocks, "model.gguf", MANY, 200 + seed)
    for file in JSON_FILES:
        trouble(plain, file, MANY // 8, 300 + seed)
        lies(plain, file, MANY // 8, 400 + seed)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(PACKINGS))
def test_many_damaged_files_of_a_packing(name: str, tmp_path: Path) -> None:
    model = write_packed(tmp_path / "packed", name)
    trouble(model, "model.safetensors", MANY // 10, 500)
    for n in range(MANY // 40):
        said = {**CONFIG, **json.loads((model / "config.json").read_text())}
        rng = random.Random(600 + n)
        scheme = {**said, "quantization_config": hostile(said.get("quantization_config") or {"bits": 4}, rng)}
        spoiled(model, "config.json", json.dumps(scheme).encode(), f"{name}, scheme {n}")
