"""Models that attend to chunks, written in both layouts: lengths of chunks are no windows there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Llama4TextConfig

from plait.convert.gguf.target import gguf_target
from plait.convert.hf.target import hf_target
from plait.convert.plan.source import Model
from plait.errors import UnsupportedFormat
from plait.spec.model import AttentionSpec
from tests.convert.test_round_trips import as_gguf, written
from tests.families import tiny
from tests.families.every import read_model
from tests.families.parity import Memory, decoder, resolved, whole, worst

# As published ones have it, with texts that may be longer than a chunk.
PUBLISHED = {"attention_chunk_size": 8192, "max_position_embeddings": 16384, "floor_scale": 8192}


def read_llama4(folder: Path, **changes: Any) -> tuple[Model, torch.Tensor, torch.Tensor]:
    usual = tiny.VARIANTS["llama4"]
    tiny.write("llama4", folder, replace(usual, changes={**usual.changes, **changes}))
    config, tensors, oracle = tiny.read(folder)
    checkpoint = Memory(tensors)
    return Model(resolved(checkpoint, config), checkpoint), oracle["ids"][0], oracle["logits"][0]


def test_llama4_goes_to_gguf_and_back(tmp_path: Path) -> None:
    first, ids, wanted = read_llama4(tmp_path, **PUBLISHED)
    model, file = as_gguf(first, "llama4")
    keys = gguf_target(first).keys
    assert "llama4.attention.sliding_window" not in keys
    assert keys["llama4.interleave_moe_layer_step"] == 2
    assert worst(whole(decoder(model.resolved, file), ids), wanted) <= 1e-4
    target = hf_target(model, "float32")
    assert "sliding_window" not in target.config
    back = written(model, target.made)
    again = resolved(back, target.config)
    assert worst(whole(decoder(again, back), ids), wanted) <= 1e-4
    assert again.spec.layers == first.spec.layers
    read = Llama4TextConfig(**target.config)
    assert read.attention_chunk_size == 8192
    assert read.layer_types == ["chunked_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_chunk_size": None},
        {"attention_chunk_size": 5, "layer_types": ["full_attention", "chunked_attention"] * 2},
        {"attention_chunk_size": 5, "layer_types": ["chunked_attention"] * 4},
    ],
    ids=str,
)
def test_llama4_is_written_with_its_own_names_and_chunks(changes: dict[str, Any], tmp_path: Path) -> None:
    model, ids, wanted = read_llama4(tmp_path, **changes)
    target = hf_target(model, "float32")
    file = written(model, target.made)
    assert {*file} == {*model.checkpoint.names()}
    assert worst(whole(decoder(resolved(file, target.config), file), ids), wanted) <= 1e-4


def test_chunks_of_other_lengths_are_refused_in_gguf(tmp_path: Path) -> None:
    model, _, _ = read_llama4(tmp_path, floor_scale=8192)
    with pytest.raises(UnsupportedFormat, match=r"mixer\.window = 6, there 8192"):
        gguf_target(model)


def test_rnj1_is_written_with_positions_of_its_blocks(tmp_path: Path) -> None:
    config, tensors = read_model("rnj1", tmp_path)
    model = Model(resolved(tensors, config), tensors)
    target = hf_target(model, "float32")
    assert set(target.config["rope_parameters"]) == {"full_attention", "chunked_attention"}
    assert target.config["sliding_window"] == 10
    file = written(model, target.made)
    again = resolved(file, target.config)
    assert [m.chunk for m in again.spec.mixers_of(AttentionSpec)] == [5, None, 5]
    ids = torch.arange(2, 30)
    wanted = whole(decoder(model.resolved, tensors), ids)
    assert worst(whole(decoder(again, file), ids), wanted) <= 1e-4
