"""Files as llama.cpp's converter writes them give the logits of transformers: whole and in chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.errors import UnsupportedModel
from tests.families import tiny
from tests.families.gguf.recorded import NAMES, converted, read_checkpoint, variant
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

TOLERANCE = 1e-4
QUICK = ("gemma4_all", "exaone4", "ernie4_5_moe")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in NAMES]
)
def test_recorded_files_answer_what_transformers_answers(name: str, tmp_path: Path) -> None:
    config, tensors, oracle = read_checkpoint(name, tmp_path / name)
    metadata, made = converted(name, config, tensors)
    made |= unread_keys(metadata, made)
    file = Memory(made)
    found = resolved(file, gguf=metadata)
    model = decoder(found, file)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= TOLERANCE
    if not found.spec.causal:
        return  # a piece would need what comes after it
    for logits, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(logits, want) <= TOLERANCE


@pytest.mark.slow
def test_mimo_v2_5_has_queries_keys_and_values_in_one_tensor(tmp_path: Path) -> None:
    name = "mimo_v2_flash"
    tiny.write(name, tmp_path, variant(name))
    config, tensors, oracle = tiny.read(tmp_path)
    metadata, made = converted(name, config, tensors)
    for i in range(3):
        made[f"blk.{i}.attn_qkv.weight"] = torch.cat([made.pop(f"blk.{i}.attn_{x}.weight") for x in "qkv"])
    file = Memory(made)
    model = decoder(resolved(file, gguf=metadata), file)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= TOLERANCE


def unread_keys(metadata: dict[str, Any], made: dict[str, Tensor]) -> dict[str, Tensor]:
    """Published files have keys and values in layers that share those of others, too."""
    arch = metadata["general.architecture"]
    count, shared = metadata[f"{arch}.block_count"], metadata.get(f"{arch}.attention.shared_kv_layers", 0)
    parts = [
        name.removeprefix("blk.0.") for name in made if name.startswith(("blk.0.attn_k", "blk.0.attn_v"))
    ]
    layers = range(count - shared, count)
    return {
        f"blk.{i}.{part}": torch.full_like(made[f"blk.0.{part}"], torch.nan) for i in layers for part in parts
    }


def metadata_of(arch: str, **keys: Any) -> dict[str, Any]:
    sizes = {"block_count": 4, "embedding_length": 32, "attention.head_count": 4, "context_length": 64}
    values = {"feed_forward_length": 48, "attention.layer_norm_rms_epsilon": 1e-5, **sizes, **keys}
    return {"general.architecture": arch, **{f"{arch}.{key}": value for key, value in values.items()}}


def test_sizes_that_differ_from_layer_to_layer_are_refused_where_no_family_has_them() -> None:
    with pytest.raises(UnsupportedModel, match=r"differ from layer to layer.*\[4, 6\]"):
        resolved(Memory(), gguf=metadata_of("exaone4", **{"attention.head_count": [4, 6, 4, 4]}))


@pytest.mark.parametrize(
    ("arch", "key", "value"),
    [("afmoe", "expert_weights_norm", False), ("minimax-m2", "expert_gating_func", 1)],
)
def test_another_router_than_the_familys_is_refused(arch: str, key: str, value: object) -> None:
    keys = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 8, key: value}
    with pytest.raises(UnsupportedModel, match=f"{arch}.{key} {value} is not implemented"):
        resolved(Memory(), gguf=metadata_of(arch, **keys))


def test_a_file_with_billions_of_layers_is_refused_at_once() -> None:
    with pytest.raises(UnsupportedModel, match=r"num_hidden_layers = 4294967295"):
        resolved(Memory(), gguf=metadata_of("gemma4", block_count=2**32 - 1))


def test_laguna_files_without_a_pattern_have_one_whole_layer_in_four() -> None:
    from plait.families.gguf.config import gguf_config

    keys = {"attention.sliding_window": 8, "attention.key_length": 8, "rope.freq_base": 5e5}
    config, why = gguf_config(metadata_of("laguna", **keys), {}, lambda name: pytest.fail(name))
    assert [kind.split("_")[0] for kind in config["layer_types"]] == ["full", "sliding", "sliding", "sliding"]
    assert "laguna" in why["layer_types"]
