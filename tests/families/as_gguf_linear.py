"""What llama.cpp's converters do to families with linear attention."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
Config = Mapping[str, Any]
QWEN = {
    "post_attention_layernorm": "post_attention_norm",
    r"linear_attn\.A_log": "ssm_a",
    r"linear_attn\.dt_bias": "ssm_dt.bias",
    r"linear_attn\.conv1d": "ssm_conv1d",
    r"linear_attn\.norm": "ssm_norm",
    r"linear_attn\.out_proj": "ssm_out",
    r"linear_attn\.in_proj_ba": "ssm_ba",
    r"linear_attn\.in_proj_a": "ssm_alpha",
    r"linear_attn\.in_proj_b": "ssm_beta",
    r"linear_attn\.in_proj_z": "attn_gate",
    r"linear_attn\.in_proj_qkv": "attn_qkv",
    r"linear_attn\.in_proj_qkvz": "ssm_in",
}
KIMI = {
    r"self_attn\.A_log": "ssm_a",
    r"self_attn\.dt_bias": "ssm_dt.bias",
    r"self_attn\.([qkv])_conv1d": r"ssm_conv1d_\1",
    r"self_attn\.([fg]_[ab])_proj": r"ssm_\1",
    r"self_attn\.b_proj": "ssm_beta",
    r"self_attn\.o_norm": "ssm_norm",
    r"block_sparse_moe\.(gate|up|down)_proj": r"ffn_\1",
    r"block_sparse_moe\.shared_experts\.(gate|up|down)_proj": r"ffn_\1_shexp",
    r"block_sparse_moe\.gate\.e_score_correction_bias": "exp_probs_b.bias",
}
MINIMAX = {
    r"self_attn\.qkv_proj": "attn_qkv",
    r"self_attn\.output_gate": "attn_gate",
    r"self_attn\.norm": "attn_norm_2",
    r"self_attn\.out_proj": "attn_output",
}
NAMES = {
    **dict.fromkeys(("qwen3next", "qwen35", "qwen35moe"), QWEN),
    "kimi-linear": KIMI,
    "minimax-01": MINIMAX,
}
ARCHS = tuple(NAMES)


def _ungrouped(c: Config, tensors: Tensors) -> Tensors:
    """Rows of one key head, q, k, v and z, lie together; llama.cpp wants all q, k and v, and z apart."""
    keys, dim = c["linear_num_key_heads"], c["linear_key_head_dim"]
    values = c["linear_num_value_heads"] // keys * c["linear_value_head_dim"]
    out = {}
    for name, w in tensors.items():
        if "in_proj_qkvz" not in name:
            out[name] = w
            continue
        *qkv, z = (m.flatten(0, 1) for m in w.unflatten(0, (keys, -1)).split([dim, dim, values, values], 1))
        layer = name.split(".linear_attn")[0]
        out[f"{layer}.attn_qkv.weight"], out[f"{layer}.attn_gate.weight"] = torch.cat(qkv), z
    return out


def _tiled(c: Config, tensors: Tensors) -> Tensors:
    """Value heads go round the key heads: what was (key head, one of its values) becomes the other order."""
    keys, heads, dim = c["linear_num_key_heads"], c["linear_num_value_heads"], c["linear_value_head_dim"]
    first = 2 * keys * c["linear_key_head_dim"]

    def turned(w: Tensor, width: int) -> Tensor:
        return w.unflatten(0, (keys, heads // keys, width)).transpose(0, 1).flatten(0, 2)

    out = {}
    for name, w in tensors.items():
        if "in_proj_qkv." in name or "conv1d" in name:
            w = torch.cat([w[:first], turned(w[first:], dim)])
        elif "in_proj_z" in name:
            w = turned(w, dim)
        elif re.search(r"linear_attn\.(in_proj_[ab]|A_log|dt_bias)", name):
            w = turned(w, 1)
        elif "linear_attn.out_proj" in name:
            w = turned(w.T, dim).T
        out[name] = w
    return out


def _without_tables(c: Config, tensors: Tensors) -> Tensors:
    return {name: w for name, w in tensors.items() if not name.endswith(("_decay", "slope_rate"))}


BEFORE: Mapping[str, Callable[[Config, Tensors], Tensors]] = {
    "qwen3next": _ungrouped,
    "qwen35": _tiled,
    "qwen35moe": _tiled,
    "minimax-01": _without_tables,
}


def numbers(arch: str, name: str, w: Tensor) -> Tensor:
    if name.endswith("ssm_a"):
        return -w.exp()
    if "ssm_conv1d" in name:
        return w.squeeze(1)[None, :, None] if arch == "kimi-linear" else w.squeeze(1)
    if arch.startswith("qwen") and "norm" in name and "ssm_norm" not in name:
        return w + 1
    return w.squeeze(0) if name.endswith("ffn_gate_inp_shexp.weight") else w


def metadata(arch: str, c: Config) -> dict[str, Any]:
    if arch == "minimax-01":
        assert c["full_attn_alpha_factor"] == c["linear_attn_alpha_factor"] == c["mlp_alpha_factor"]
        return {"residual_scale": c["mlp_alpha_factor"]}
    if arch == "kimi-linear":
        return _kimi(c)
    heads = c["linear_num_value_heads"]
    return {
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "ssm.state_size": c["linear_key_head_dim"],
        "ssm.group_count": c["linear_num_key_heads"],
        "ssm.time_step_rank": heads,
        "ssm.inner_size": heads * c["linear_value_head_dim"],
        "full_attention_interval": 4,
        "expert_weights_norm": c.get("norm_topk_prob"),
        **({} if arch == "qwen3next" else {"rope.dimension_sections": [11, 11, 10, 0]}),
    }


def _kimi(c: Config) -> dict[str, Any]:
    full = [kind == "full_attention" for kind in c["layer_types"]]
    return {
        "attention.head_count_kv": [int(attends) for attends in full],
        "attention.key_length": c["kv_lora_rank"] + c["qk_rope_head_dim"],
        "attention.key_length_mla": c["qk_nope_head_dim"] + c["qk_rope_head_dim"],
        "attention.value_length_mla": c["v_head_dim"],
        "rope.dimension_count": c["qk_rope_head_dim"],
        "ssm.conv_kernel": c["linear_conv_kernel_dim"],
        "kda.head_dim": c["linear_head_dim"],
        "context_length": c["model_max_length"],
        "expert_used_count": c["num_experts_per_token"],
        "expert_feed_forward_length": c["moe_intermediate_size"],
        "expert_shared_count": c["num_shared_experts"],
        "expert_group_count": c["num_expert_group"],
        "expert_group_used_count": c["topk_group"],
        "expert_gating_func": 2,
        "expert_weights_norm": c["moe_renormalize"],
    }
