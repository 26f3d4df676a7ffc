"""What llama.cpp's converters do with families of attention layers: names, split stacks, metadata."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Config = Mapping[str, Any]
# Families with permuted q and k, like llama's.
PERMUTED = ("smollm3", "granite", "granitemoe")
LAYER_NORM = ("starcoder2", "command-r", "cohere2")
BEHIND = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
NAMES: Mapping[str, Mapping[str, str]] = {
    "olmo2": BEHIND,
    "gpt-oss": {**BEHIND, r"self_attn\.sinks": "attn_sinks.weight", r"mlp\.router": "ffn_gate_inp"},
    "phi3": {r"self_attn\.qkv_proj": "attn_qkv", r"mlp\.gate_up_proj": "ffn_up"},
    "starcoder2": {r"mlp\.c_fc": "ffn_up", r"mlp\.c_proj": "ffn_down"},
    "chatglm": {r"mlp\.gate_up_proj": "ffn_up"},
    "glm4": {
        r"mlp\.gate_up_proj": "ffn_up",
        "post_self_attn_layernorm": "post_attention_norm",
        "post_mlp_layernorm": "post_ffw_norm",
    },
    "glm4moe": BEHIND,
}
ARCHS = {*NAMES, *LAYER_NORM, *PERMUTED}


def _apart(c: Config, tensors: Tensors) -> Tensors:
    """gpt-oss: gate and up no longer alternate, and rows are outputs."""
    out = {}
    for name, w in tensors.items():
        layer, _, rest = name.partition(".mlp.experts.")
        match rest:
            case "gate_up_proj":
                rows = w.transpose(1, 2)
                out[f"{layer}.ffn_gate_exps.weight"], out[f"{layer}.ffn_up_exps.weight"] = (
                    rows[:, ::2],
                    rows[:, 1::2],
                )
            case "gate_up_proj_bias":
                out[f"{layer}.ffn_gate_exps.bias"], out[f"{layer}.ffn_up_exps.bias"] = w[:, ::2], w[:, 1::2]
            case "down_proj":
                out[f"{layer}.ffn_down_exps.weight"] = w.transpose(1, 2)
            case "down_proj_bias":
                out[f"{layer}.ffn_down_exps.bias"] = w
            case _:
                out[name] = w
    return out


def _divisors(c: Config, tensors: Tensors) -> Tensors:
    """Phi 3: the lists of the config are tensors."""
    rope = c["rope_parameters"]
    lists = {f"rope_factors_{x}.weight": rope.get(f"{x}_factor") for x in ("long", "short")}
    return tensors | {name: torch.tensor(values) for name, values in lists.items() if values}


BEFORE: Mapping[str, Callable[[Config, Tensors], Tensors]] = {"gpt-oss": _apart, "phi3": _divisors}


def metadata(arch: str, c: Config) -> dict[str, Any]:
    """The metadata that these converters write in addition to what all write."""
    values: dict[str, Any] = {}
    if arch in LAYER_NORM:
        values["attention.layer_norm_epsilon"] = c.get("layer_norm_eps", c.get("norm_epsilon"))
    if "cohere" in c["model_type"]:
        values["logit_scale"] = c["logit_scale"]
    if c["model_type"] == "olmo3":
        values["attention.sliding_window_pattern"] = [
            kind == "sliding_attention" for kind in c["layer_types"]
        ]
    if arch.startswith("granite"):
        values |= {"embedding_scale": c["embedding_multiplier"], "residual_scale": c["residual_multiplier"]}
        values |= {"attention.scale": c["attention_multiplier"], "logit_scale": c["logits_scaling"]}
    if arch == "glm4moe":
        values |= {"expert_gating_func": 2, "expert_weights_norm": c["norm_topk_prob"]}
    return values | _rope(c)


def _rope(c: Config) -> dict[str, Any]:
    rope = c["rope_parameters"]
    rope = rope.get("full_attention", rope)
    values = {}
    if rope["rope_type"] in ("yarn", "longrope"):
        original = rope.get("original_max_position_embeddings") or c["original_max_position_embeddings"]
        values["rope.scaling.original_context_length"] = original
    if rope["rope_type"] == "yarn":
        values |= {"rope.scaling.type": "yarn", "rope.scaling.factor": rope["factor"]}
        if factor := rope.get("attention_factor"):
            values["rope.scaling.yarn_attn_factor"] = factor
    if rope["rope_type"] == "longrope":
        stretch = c["max_position_embeddings"] / original
        values["rope.scaling.attn_factor"] = math.sqrt(1 + math.log(stretch) / math.log(original))
    return values
