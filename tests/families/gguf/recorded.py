"""What llama.cpp makes of our tiny checkpoints, recorded: metadata, and where each tensor is from.

`llama_cpp.json` is written by `tools/record_gguf.py`. It has no numbers of tensors: each one is named by the
tensor of the checkpoint that it was made of, and by how.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests.families import kimi_k3_oracle, tiny, tiny_dense, tiny_latest, tiny_mixers
from tests.families.gguf.published_kin import KIN
from tests.families.kimi_k3_oracle import TEXT
from tests.families.newer_oracles import DESCRIBED
from tests.families.older_oracles import IDS
from tests.families.variant import Variant

Config = Mapping[str, Any]
RECORDED = Path(__file__).with_name("llama_cpp.json")
F, S = "full_attention", "sliding_attention"
MINICPM = {"attention_multiplier": 8**-0.5, "mlp_bias": False, "attention_bias": False}
# Sizes that the format leaves to its readers must be those of the published models.
CHANGES: dict[str, dict[str, Any]] = {
    "bailing_v2": {"attention_bias": False},
    "baichuan": {"num_key_value_heads": 2},
    "bitnet": {"tie_word_embeddings": True},
    "deepseek_v4": {
        "mlp_layer_types": [*["hash_moe"] * 2, *["moe"] * 3],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 128},
    },
    "dots3_note": {
        "swa_qk_nope_head_dim": 8,
        "swa_head_dim": 12,
        "swa_q_lora_rank": 12,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm5_next": {
        "text_config": {
            **tiny_mixers.GLM_NEXT["text_config"],
            "linear_num_heads": 4,
            "hc_mult": 4,
            "mlp_layer_types": ["dense", *["sparse"] * 4],
        }
    },
    "hy_v4": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "chatglm": {
        "attention_bias": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 2e5, "partial_rotary_factor": 0.5},
    },
    "codeshell": {
        "intermediate_size": 128,
        "tie_word_embeddings": False,
        "sliding_window": None,
        "hidden_act": "gelu_pytorch_tanh",
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    "deepseek_ocr": {"moe_num_experts": 3, "moe_topk": 3},
    "deepseek_v1": {"moe_num_experts": 3, "moe_topk": 3},
    "gemma_embedding": {"use_bidirectional_attention": True, "query_pre_attn_scalar": 8},
    "hunyuan_moe": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "mimo_v2_flash": {"attention_bias": False},
    "ministral3": {
        "rope_parameters": {
            **tiny_dense.VARIANTS["ministral3"].changes["rope_parameters"],
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
        }
    },
    "minicpm": MINICPM,
    "minicpmv_2": MINICPM,
    "mistral4": {
        "rope_parameters": {
            **tiny_latest.VARIANTS["mistral4"].changes["rope_parameters"],
            "llama_4_scaling_beta": 0.1,
        }
    },
    "nemotron_h_latent": {"hybrid_override_pattern": "M*EE"},
    "orion": {"rope_parameters": {"rope_theta": 1e4, "rope_type": "default", "partial_rotary_factor": 1.0}},
    "pangu": {"mlp_bias": False, "tie_word_embeddings": False},
    "param2": {
        "attention_bias": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 6e5, "partial_rotary_factor": 1.0},
    },
    "phimoe": {"router_jitter_noise": 0.01},
    "phimoe_longrope": {
        "router_jitter_noise": 0.01,
        "sliding_window": 100,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "original_max_position_embeddings": 16,
            **{
                f"{x}_factor": [1.0, 1.1, 1.2, 1.3] for x in ("short", "long")
            },  # transformers knows no long ones
            **{f"{x}_mscale": (1 + math.log(8, 16)) ** 0.5 for x in ("short", "long")},
        },
    },
    "qwen1": {"num_key_value_heads": 2},
    "qwen3_vl_moe": {"mlp_only_layers": []},
    "qwen4_exp": {"output_gate_type": "sigmoid", "ple_layer_ids": [1], "eos_token_id": 5},
    "step3p5": {
        "text_config": {
            **tiny_mixers.STEP["text_config"],
            "head_dim": 8,
            "rope_parameters": {
                F: {"rope_type": "default", "rope_theta": 5e5, "partial_rotary_factor": 0.5},
                S: {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 1.0},
            },
        }
    },
    "xverse": {"num_key_value_heads": 2},
    "afmoe": {"num_hidden_layers": 5, "layer_types": [S, S, S, F, S]},
    "dots1": {"sliding_window": None},
    "gemma3n": {"altup_num_inputs": 4, "vocab_size_per_layer_input": 97},
    "granite_swa": {"layer_rope_theta": None},
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "hrm_text": {"attention_bias": False},
    "maincoder": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "laguna": {
        "num_hidden_layers": 5,
        "layer_types": [F, S, S, S, F],
        "num_attention_heads_per_layer": [4, 6, 6, 6, 4],
    },
    "llama4": {"floor_scale": 8192, "attention_chunk_size": 8192},
    "minicpm3": {"scale_emb": 12, "dim_model_base": 256},
}
# Layouts of models that transformers has no class for, by a variant with the same arithmetic.
BASES = {
    "bailing_v1": "aria",
    "bailing_v2": "glm4_moe",
    "baichuan": "llama",
    "chatglm": "glm",
    "codeshell": "starcoder2",
    "deepseek_ocr": "aria",
    "deepseek_v1": "aria",
    "exaone3": "llama_llama3",
    "gemma_embedding": "gemma3",
    "hunyuan_vl": "hunyuan",
    "internlm2": "llama",
    "maincoder": "hunyuan",
    "mimo_v2": "mimo_v2_flash",
    "minicpm": "granite_dense",
    "orion": "stablelm",
    "paddleocr": "llama",
    "param2": "glm4_moe",
    "pangu": "llama_biases",
    "phimoe_longrope": "phimoe",
    "qwen1": "qwen2",
    "qwen2_5_vl": "qwen2",
    "qwen3_vl": "qwen3",
    "qwen3_vl_moe": "qwen3_moe",
    "telechat3": "llama_llama3",
    "xverse": "llama",
    **{name: base for name, (base, _) in KIN.items()},
}
NAMES = (
    *("afmoe", "apertus", "arcee", "cohere2_moe", "cohere2_moe_sigmoid", "deepseek_v32", "dots1"),
    *("ernie4_5", "ernie4_5_moe", "exaone4", "exaone4_whole", "exaone_moe", "gemma3n", "gemma4"),
    *("gemma4_all", "gemma4_e2b", "gemma4_moe", "glm_moe_dsa", "granite_moe_swa", "granite_swa", "hunyuan"),
    *("hy_v3", "jais2", "laguna", "llama4", "mellum", "minicpm3", "minimax_m2", "nemotron", "olmo", "olmoe"),
    *(
        "stablelm",
        "stablelm_wide",
        "bailing_v1",
        "bailing_v2",
        "baichuan",
        "bitnet",
        "deepseek_v1",
        "exaone3",
    ),
    *(
        "gemma_embedding",
        "glm4_moe_lite",
        "hunyuan_moe",
        "internlm2",
        "mimo_v2_flash",
        "minicpm",
        "ministral3",
    ),
    *("nemotron_h_latent", "orion", "pangu", "phimoe", "phimoe_longrope", "qwen1", "qwen2_5_vl", "qwen3_vl"),
    *("qwen3_vl_moe", "solar_open", "step3p5", "xverse", "youtu"),
    *("ling3", "dots3_note", "hy_v4", "minimax_m3", "deepseek_v4", "glm5_next"),
    *("mistral4", "muse_glimmer", "maincoder", "codeshell", "paddleocr", "hunyuan_vl", "deepseek_ocr"),
    *("hrm_text", "kimi_k3", "qwen4_exp"),
    *DESCRIBED,
)


def read_checkpoint(name: str, folder: Path) -> tuple[Config, dict[str, Tensor], dict[str, Any]]:
    """(config, tensors, ids and logits) of a tiny model: of transformers, or of a plain description."""
    if name == "kimi_k3":
        kimi = {k: w.float() for k, w in kimi_k3_oracle.checkpoint(TEXT).items()}
        found = [kimi_k3_oracle.logits(TEXT, kimi_k3_oracle.checkpoint(TEXT), ids).float() for ids in IDS]
        return kimi_k3_oracle.CONFIG, kimi, {"ids": IDS, "logits": found}
    if family := DESCRIBED.get(name):
        tensors = family.checkpoint()
        logits = [family.logits(family.config, tensors, ids).float() for ids in IDS]
        return family.config, {k: w.float() for k, w in tensors.items()}, {"ids": IDS, "logits": logits}
    tiny.write(name, folder, variant(name))
    return tiny.read(folder)


def variant(name: str) -> Variant:
    usual = tiny.VARIANTS[BASES.get(name, name)]
    return replace(usual, changes={**usual.changes, **CHANGES.get(name, {})})


def _pairs(heads: str) -> Callable[[Config, Tensor], Tensor]:
    return lambda c, w: w.unflatten(0, (c[heads], 2, -1)).transpose(1, 2).flatten(0, 2)


def _half(i: int) -> Callable[[Config, Tensor], Tensor]:
    return lambda c, w: w.chunk(2, -2)[i]


def _latent(i: int, *, of_windows: bool = False) -> Callable[[Config, Tensor], Tensor]:
    def part(c: Config, w: Tensor) -> Tensor:
        own = {**c, **(c["per_layer_config"]["1"] if of_windows else {})}
        heads = w.unflatten(0, (own["num_attention_heads"], -1))
        k, v = heads.tensor_split([own["qk_nope_head_dim"]], 1)
        return v if i else k.transpose(1, 2)

    return part


def _signs(dim: int) -> Tensor:
    """Of a head that turns the other way round (Talkie)."""
    return torch.cat([torch.ones(dim // 2), -torch.ones(dim - dim // 2)])


def order_in_turn(c: Config, w: Tensor) -> Tensor:
    """Heads that read one key head, in a row (PLaMo)."""
    dim, kv = c["hidden_size"] // c["num_attention_heads"], c["num_attention_heads"] // c["n_shared_head"]
    return w.unflatten(0, (-1, kv, dim)).transpose(0, 1).flatten(0, 2)


# How a converter may make a tensor of another one.
WAYS: dict[str, Callable[[Config, Tensor], Tensor]] = {
    "same": lambda c, w: w,
    "turned": lambda c, w: w.mT,
    "plus one": lambda c, w: w + 1,
    "pairs of queries": _pairs("num_attention_heads"),
    "pairs of keys": _pairs("num_key_value_heads"),
    "pairs of a head": lambda c, w: w.unflatten(0, (2, -1)).mT.flatten(),
    "first half": _half(0),
    "second half": _half(1),
    "first half, turned": lambda c, w: _half(0)(c, w.mT),
    "second half, turned": lambda c, w: _half(1)(c, w.mT),
    "exponential": lambda c, w: w.exp(),
    "times the scale of embeddings": lambda c, w: w * c["mup_embeddings_scale"],
    "times the scale of logits": lambda c, w: w * (c["mup_output_alpha"] * c["mup_width_scale"]),
    "decays of heads": lambda c, w: -w.exp().view(c["linear_num_key_heads"], -1).mT.flatten(),
    "halves of heads": lambda c, w: w * _signs(c["head_dim"]).repeat(w.shape[0] // c["head_dim"])[:, None],
    "heads of queries in turn": order_in_turn,
    "heads of outputs in turn": lambda c, w: order_in_turn(c, w.mT).mT,
    "latent keys": _latent(0),
    "latent values": _latent(1),
    "latent keys of windows": _latent(0, of_windows=True),
    "latent values of windows": _latent(1, of_windows=True),
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
    """A tensor, the stack of all with a number at `{e}`, or the rows of three with q, k and v at `{qkv}`."""
    if "{qkv}" in source:
        return torch.cat([tensors[source.replace("{qkv}", x)] for x in "qkv"])
    if "{e}" not in source:
        return tensors[source]
    pattern = re.compile(re.escape(source).replace(r"\{e\}", r"(\d+)"))
    found = {int(match[1]): w for name, w in tensors.items() if (match := pattern.fullmatch(name))}
    return torch.stack([found[e] for e in sorted(found)])
