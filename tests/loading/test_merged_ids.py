"""The table of merged ids of a model: its tokenizer makes it when weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from plait import LLM
from plait.config import EngineConfig
from plait.errors import ConfigError
from plait.families.config.limits import MAX_SIZE
from plait.loading.open_model import open_model
from plait.request import SamplingParams
from plait.spec.recurrent import MergedIdsSpec
from plait.verify.tiny.models import write_named

IDS = [[7, 70, 71, 9, 2, 7, 70, 71, 30]]
LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())[:97]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model of 97 tokens, which are bytes, without a table or a tokenizer."""
    write_named("shared-entries", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.endswith("token_map")}
    assert len(kept) == len(tensors) - 2
    save_file(kept, tmp_path / "model.safetensors")
    return tmp_path


def add_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))


def change(folder: Path, **changes: object) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_model_without_its_tokenizer_or_with_another_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="ids that a tokenizer merges, and it has none; name one with"):
        open_model(str(folder), EngineConfig()).merge_ids(MergedIdsSpec(97, 40))
    add_tokenizer(folder)
    with pytest.raises(ConfigError, match=r"tokenizer\.json has 71 merged ids and the config 40"):
        open_model(str(folder), EngineConfig()).merge_ids(MergedIdsSpec(97, 40))


def test_a_draft_model_has_the_table_of_its_own_tokenizer(folder: Path) -> None:
    add_tokenizer(folder)
    change(folder, engram_compressed_vocab_size=71)
    params, replies = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), []
    for words in ({}, {"speculate": str(folder)}):
        with LLM(str(folder), device="cpu", **words) as llm:
            (found,) = llm.generate(IDS, params)
        replies.append(found.outputs[0].token_ids)
    assert replies[0] == replies[1]


@pytest.mark.parametrize("size", [4, MAX_SIZE])
def test_blocks_of_candidates_are_no_longer_than_a_text(folder: Path, size: int) -> None:
    add_tokenizer(folder)
    change(folder, engram_compressed_vocab_size=71, candidate_block_size=size)
    with LLM(str(folder), device="cpu") as llm:
        (found,) = llm.generate(IDS, SamplingParams(max_tokens=6, temperature=0.0))
    assert found.outputs[0].token_ids


def test_replies_are_those_of_a_file_that_has_the_table(folder: Path) -> None:
    add_tokenizer(folder)
    table = open_model(str(folder), EngineConfig()).merge_ids(MergedIdsSpec(97, 71))
    change(folder, engram_compressed_vocab_size=71)
    replies = []
    for _ in range(2):
        with LLM(str(folder), device="cpu", ops="reference") as llm:
            (found,) = llm.generate(IDS, SamplingParams(max_tokens=6, temperature=0.0))
        replies.append(found.outputs[0].token_ids)
        tensors = load_file(folder / "model.safetensors")
        tensors |= {f"layers.{i}.engram.token_map": table.clone() for i in (1, 4)}
        save_file(tensors, folder / "model.safetensors")
    assert replies[0] == replies[1]
