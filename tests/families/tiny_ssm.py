"""Tiny checkpoints of families with state spaces and short convolutions."""

from __future__ import annotations

from typing import Any

from tests.families.variant import Variant

SIZES = {"state_size": 8, "intermediate_size": 64, "time_step_rank": 5, "conv_kernel": 4}
JAMBA = {
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "mamba_dt_rank": 5,
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "num_experts": 4,
    "expert_layer_period": 2,
    "expert_layer_offset": 1,
}
LFM2 = {"layer_types": ["conv", "full_attention", "conv"], "head_dim": 8}
LFM2_MOE = {**LFM2, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
ZAMBA2 = {
    "mamba_d_state": 8,
    "mamba_expand": 2,
    "n_mamba_heads": 8,
    "chunk_size": 8,
    "adapter_rank": 2,
    "layers_block_type": ["hybrid", "hybrid", "hybrid"],
    "num_key_value_heads": 4,
}


def lfm2(**changes: Any) -> Variant:
    return Variant("Lfm2Config", {**LFM2, "block_multiple_of": 16, **changes})


VARIANTS: dict[str, Variant] = {
    "mamba": Variant("MambaConfig", SIZES),
    "mamba_biases": Variant(
        "MambaConfig",
        {
            **SIZES,
            "use_bias": True,
            "use_conv_bias": False,
            "time_step_rank": "auto",
            "intermediate_size": 96,
        },
    ),
    "falcon_mamba": Variant("FalconMambaConfig", {**SIZES, "mixer_rms_eps": 1e-3}),
    "falcon_mamba_biases": Variant(
        "FalconMambaConfig", {**SIZES, "use_bias": True, "conv_kernel": 3, "tie_word_embeddings": True}
    ),
    "jamba": Variant("JambaConfig", JAMBA),
    "jamba_dense": Variant(
        "JambaConfig",
        {
            **JAMBA,
            "num_experts": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "mamba_dt_rank": "auto",
        },
    ),
    "lfm2": lfm2(block_ffn_dim_multiplier=1.2),
    "lfm2_biases": lfm2(conv_bias=True, conv_L_cache=4, block_auto_adjust_ff_dim=False),
    "lfm2_moe": Variant("Lfm2MoeConfig", {**LFM2_MOE, "num_dense_layers": 1, "routed_scaling_factor": 1.5}),
    "lfm2_moe_plain": Variant(
        "Lfm2MoeConfig",
        {**LFM2_MOE, "num_dense_layers": 0, "use_expert_bias": False, "norm_topk_prob": False},
    ),
    "zamba2": Variant(
        "Zamba2Config",
        {
            **ZAMBA2,
            "num_mem_blocks": 2,
            "mamba_ngroups": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "tie_word_embeddings": True,
        },
    ),
    "zamba2_plain": Variant(
        "Zamba2Config",
        {
            **ZAMBA2,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid"],
            "add_bias_linear": True,
            "time_step_min": 0.1,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
        },
    ),
}
