"""What llama.cpp's converters do to Mamba1, Jamba, PLaMo 2 and LFM2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

ARCHS = ("mamba", "jamba", "plamo2", "lfm2", "lfm2moe")
NAMES = {
    "model.embedding_norm": "token_embd_norm",
    r"conv\.(in|out)_proj": r"shortconv.\1_proj",
    r"conv\.conv": "shortconv.conv",
    "operator_norm": "attn_norm",
    r"self_attn\.([qk])_layernorm": r"attn_\1_norm",
    r"self_attn\.out_proj": "attn_output",
    r"feed_forward\.w1": "ffn_gate",
    r"feed_forward\.w2": "ffn_down",
    r"feed_forward\.w3": "ffn_up",
    r"feed_forward\.(?:gate|router)": "ffn_gate_inp",
    r"feed_forward\.expert_bias": "exp_probs_b.bias",
    r"(?:mamba|mixer)\.x_proj": "ssm_x",
    r"(?:mamba|mixer)\.dt_proj": "ssm_dt",
    r"mamba\.(dt|b|c)_layernorm": r"ssm_\1_norm",
    r"mixer\.bcdt_proj": "ssm_x",
    r"mixer\.dt_norm_weight": "ssm_dt_norm.weight",
    r"mixer\.B_norm_weight": "ssm_b_norm.weight",
    r"mixer\.C_norm_weight": "ssm_c_norm.weight",
    r"mixer\.qkv_proj": "attn_qkv",
    r"mixer\.([qk])_weight": r"attn_\1_norm.weight",
    r"mlp\.gate_up_proj": "ffn_up",
    "pre_mixer_norm": "attn_norm",
    "post_mixer_norm": "post_attention_norm",
    "pre_mlp_norm": "ffn_norm",
    "post_mlp_norm": "post_ffw_norm",
}
ADDED = {  # to PLaMo 2's norms, which are stored around 0
    ".attn_norm.": 1.0,
    ".post_attention_norm.": 1 / 5,
    ".ffn_norm.": 1.0,
    ".post_ffw_norm.": 1 / 5**1.5,
    "output_norm.": 1.0,
}


def numbers(arch: str, name: str, w: Tensor) -> Tensor:
    """A tensor as these architectures' files hold it, under its name there."""
    if name.endswith("ssm_a"):
        return -w.exp()
    if name.endswith(("conv1d.weight", "shortconv.conv.weight")):
        return w.squeeze(1)
    added = next((by for part, by in ADDED.items() if part in f".{name}"), 0.0) if arch == "plamo2" else 0.0
    return w + added


def metadata(arch: str, c: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The keys that only these architectures have, or write in another way."""
    if arch.startswith("lfm2"):
        own: dict[str, Any] = {"shortconv.l_cache": c["conv_L_cache"]}
        if widths := [t.shape[0] for n, t in tensors.items() if n.endswith("ffn_up.weight")]:
            own["feed_forward_length"] = widths[0]
        if arch == "lfm2moe":
            own |= {
                "expert_gating_func": 2,
                "leading_dense_block_count": c["num_dense_layers"],
                "expert_feed_forward_length": c["moe_intermediate_size"],
                "expert_weights_norm": c["norm_topk_prob"],
            }
        return own
    if arch == "plamo2":
        attends = [f"blk.{i}.attn_qkv.weight" in tensors for i in range(c["num_hidden_layers"])]
        return {
            "ssm.group_count": 0,
            "attention.head_count": [c["num_attention_heads"] * flag for flag in attends],
            "attention.head_count_kv": [c["num_key_value_heads"] * flag for flag in attends],
            "attention.value_length": c["hidden_size_per_head"],
        }
    ranks = [t.shape[1] for n, t in tensors.items() if n.endswith("ssm_dt.weight")]
    inner, state = next(t.shape for n, t in tensors.items() if n.endswith("ssm_a"))
    own = {
        "ssm.conv_kernel": c.get("conv_kernel") or c["mamba_d_conv"],
        "ssm.inner_size": inner,
        "ssm.state_size": state,
        "ssm.time_step_rank": ranks[0],
    }
    if arch == "mamba":
        own |= {"attention.head_count": 0, "feed_forward_length": 0}
        own["ssm.dt_b_c_rms"] = c["model_type"] == "falcon_mamba"
    return own
