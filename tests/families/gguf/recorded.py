"""What llama.cpp makes of our tiny checkpoints, recorded: metadata, and where each tensor is from.

`llama_cpp.json` is written by `tools/record_gguf.py`. It has no numbers of tensors: each one is named by the
tensor of the checkpoint that it was made of, and by how.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.families import tiny
from tests.families.variant import Variant

Config = Mapping[str, Any]
RECORDED = Path(__file__).with_name("llama_cpp.json")
F, S = "full_attention", "sliding_attention"
# Sizes that the format leaves to its readers must be those of the published models.
CHANGES: dict[str, dict[str, Any]] = {
    "afmoe": {"num_hidden_layers": 5, "layer_types": [S, S, S, F, S]},
    "dots1": {"sliding_window": None},
    "gemma3n": {"altup_num_inputs": 4, "vocab_size_per_layer_input": 97},
    "granite_swa": {"layer_rope_theta": None},
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "laguna": {
        "num_hidden_layers": 5,
        "layer_types": [F, S, S, S, F],
        "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
    },
    "llama4": {"floor_scale": 8192, "attention_chunk_size": 8192},
    "minicpm3": {"scale_emb": 12, "dim_model_base": 256},
}
NAMES = (
    *("afmoe", "apertus", "arcee", "cohere2_moe", "cohere2_moe_sigmoid", "deepseek_v32", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone4_whole", "exaone_moe", "gemma3n", "gemma4"),
    *("gemma4_all", "gemma4_e2b", "gemma4_moe", "glm_moe_dsa", "granite_moe_swa", "granite_swa", "hunyuan"),
    *("hy_v3", "jais2", "laguna", "llama4", "mellum", "minicpm3", "minimax_m2", "nemotron", "olmo", "olmoe"),
    "stablelm",
)


def variant(name: str) -> Variant:
    usual = tiny.VARIANTS[name]
    return replace(usual, changes={**usual.changes, **CHANGES.get(name, {})})


def _pairs(heads: str) -> Callable[[Config, Tensor], Tensor]:
    return lambda c, w: w.unflatten(0, (c[heads], 2, -1)).transpose(1, 2).flatten(0, 2)


def _half(i: int) -> Callable[[Config, Tensor], Tensor]:
    return lambda c, w: w.chunk(2, -2)[i]


def _latent(i: int) -> Callable[[Config, Tensor], Tensor]:
    def part(c: Config, w: Tensor) -> Tensor:
        heads = w.unflatten(0, (c["num_attention_heads"], -1))
        k, v = heads.tensor_split([c["qk_nope_head_dim"]], 1)
        return v if i else k.transpose(1, 2)

    return part


# How a converter may make a tensor of another one.
WAYS: dict[str, Callable[[Config, Tensor], Tensor]] = {
    "same": lambda c, w: w,
    "turned": lambda c, w: w.mT,
    "plus one": lambda c, w: w + 1,
    "pairs of queries": _pairs("num_attention_heads"),
    "pairs of keys": _pairs("num_key_value_heads"),
    "first half": _half(0),
    "second half": _half(1),
    "first half, turned": lambda c, w: _half(0)(c, w.mT),
    "second half, turned": lambda c, w: _half(1)(c, w.mT),
    "latent keys": _latent(0),
    "latent values": _latent(1),
}


def converted(
    name: str, config: Config, tensors: Mapping[str, Tensor]
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(metadata, tensors) of the GGUF file of this checkpoint, as it was recorded."""
    header = json.loads(RECORDED.read_text(encoding="utf-8"))[name]
    out = {}
    for theirs, (way, source, shape, layers) in header["tensors"].items():
        for i in layers or [None]:
            made = _gather(tensors, source if i is None else source.replace("{i}", str(i)))
            out[theirs if i is None else theirs.replace("{i}", str(i))] = WAYS[way](config, made).reshape(
                shape
            )
    out |= {theirs: torch.tensor(values) for theirs, values in header["numbers"].items()}
    return header["metadata"], out


def _gather(tensors: Mapping[str, Tensor], source: str) -> Tensor:
    """A tensor, or the stack of all with a number at `{e}`."""
    if "{e}" not in source:
        return tensors[source]
    pattern = re.compile(re.escape(source).replace(r"\{e\}", r"(\d+)"))
    found = {int(match[1]): w for name, w in tensors.items() if (match := pattern.fullmatch(name))}
    return torch.stack([found[e] for e in sorted(found)])
