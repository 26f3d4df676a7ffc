"""Tiny checkpoints of families with linear attention and gated recurrences."""

from __future__ import annotations

from typing import Any

from tests.families.variant import Variant

KINDS = ["linear_attention", "full_attention", "linear_attention"]
NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# Fewer key heads than value heads, and widths that differ: every row has one place only.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
QWEN = {**DELTA, "head_dim": 16, "layer_types": KINDS}
QWEN["rope_parameters"] = {"rope_theta": 1e4, "partial_rotary_factor": 0.25}
# As many of both: nothing is shared between heads.
EVEN = {**DELTA, "linear_num_key_heads": 3, "linear_num_value_heads": 3}
SPARSE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}
MROPE = {
    "rope_theta": 1e5,
    "partial_rotary_factor": 0.5,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
}
KIMI = {
    **NO_IDS,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "layer_types": KINDS,
}
OLMO = {**NO_IDS, "layer_types": KINDS}
MINIMAX = {"head_dim": 16, "layer_types": KINDS, "num_local_experts": 4, "num_experts_per_tok": 2}
FACTORS = {
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.8,
    "linear_attn_alpha_factor": 1.3,
    "linear_attn_beta_factor": 0.7,
    "mlp_alpha_factor": 1.2,
    "mlp_beta_factor": 0.9,
}
GEMMA = {"num_attention_heads": 2, "num_key_value_heads": 1, "attention_window_size": 6}


def qwen3_next(**changes: Any) -> Variant:
    return Variant("Qwen3NextConfig", {**QWEN, **SPARSE, **changes})


VARIANTS: dict[str, Variant] = {
    "qwen3_next": qwen3_next(mlp_only_layers=[1], norm_topk_prob=False),
    "qwen3_next_biases": qwen3_next(**EVEN, attention_bias=True, linear_conv_kernel_dim=3),
    "qwen3_5": Variant("Qwen3_5TextConfig", {**QWEN, "rope_parameters": MROPE}),
    "qwen3_5_tied": Variant("Qwen3_5TextConfig", {**QWEN, **EVEN, "tie_word_embeddings": True}),
    "qwen3_5_moe": Variant("Qwen3_5MoeTextConfig", {**QWEN, **SPARSE}),
    "kimi_linear": Variant("KimiLinearConfig", {**KIMI, "q_lora_rank": None}),
    "kimi_linear_groups": Variant(
        "KimiLinearConfig",
        {**KIMI, "q_lora_rank": 12, "n_group": 4, "topk_group": 2, "n_shared_experts": 2},
    ),
    "olmo_hybrid": Variant("OlmoHybridConfig", {**OLMO, "rope_parameters": {"rope_theta": 1e4}}),
    "olmo_hybrid_nope": Variant(
        "OlmoHybridConfig",
        {**OLMO, **DELTA, "rope_parameters": {"rope_theta": None}, "linear_allow_neg_eigval": False},
    ),
    # What GGUF can say: one factor for all that stays, none for what is added.
    "minimax": Variant("MiniMaxConfig", {**MINIMAX, **{k: 1.5 for k in FACTORS if "alpha" in k}}),
    "minimax_factors": Variant(
        "MiniMaxConfig",
        {
            **MINIMAX,
            **FACTORS,
            "sliding_window": 6,
            "rope_parameters": {"rope_theta": 1e4},
        },
    ),
    "recurrent_gemma": Variant("RecurrentGemmaConfig", {**GEMMA, "tie_word_embeddings": True}),
    "recurrent_gemma_wide": Variant(
        "RecurrentGemmaConfig",
        {
            "lru_width": 48,
            "attention_bias": True,
            "block_types": ["recurrent", "attention"],
            "attention_window_size": 5,
            "conv1d_width": 3,
        },
    ),
}
