"""Tiny checkpoints of mixtures of experts that are close to families of their own."""

from __future__ import annotations

from tests.families.variant import Variant

WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
PAD = {"pad_token_id": 0}
ROUTED = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
TWO_ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 5e5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
}

VARIANTS: dict[str, Variant] = {
    "hy_v3": Variant("HYV3Config", {**ROUTED, "head_dim": 8}),
    "hunyuan_moe": Variant("HunYuanMoEV1Config", {"num_experts": 6, "moe_topk": 2, "head_dim": 8}),
    "mellum": Variant(
        "MellumConfig",
        {**ROUTED, "head_dim": 8, "sliding_window": 6, "layer_types": WINDOWS, "rope_parameters": TWO_ROPES},
    ),
    "mimo_v2_flash": Variant(
        "MiMoV2FlashConfig",
        {
            "n_routed_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "head_dim": 12,
            "v_head_dim": 8,
            "sliding_window": 6,
            "layer_types": WINDOWS,
            "attention_bias": True,
        },
    ),
    "llama4": Variant(
        "Llama4TextConfig",
        {
            "num_hidden_layers": 4,
            "head_dim": 8,
            "num_local_experts": 6,
            "intermediate_size": 20,
            "intermediate_size_mlp": 28,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 6,
            "floor_scale": 8,
            **PAD,
        },
    ),
    "afmoe": Variant(
        "AfmoeConfig",
        {**ROUTED, "head_dim": 8, "sliding_window": 6, "layer_types": WINDOWS, "mup_enabled": True},
    ),
    "granite_swa": Variant(
        "GraniteSWAConfig",
        {**MULTIPLIERS, "sliding_window": 6, "layer_rope_theta": [1e4, 0, 1e5]},
    ),
    "granite_moe_swa": Variant(
        "GraniteMoeSWAConfig",
        {
            **MULTIPLIERS,
            "sliding_window": 6,
            "num_local_experts": 6,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 24,
        },
    ),
    "hyperclovax": Variant("HyperCLOVAXConfig", {**MULTIPLIERS, "attention_bias": True, **PAD}),
    "cohere2_moe": Variant(
        "Cohere2MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 6,
            "num_shared_experts": 2,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "prefix_dense_intermediate_size": 28,
        },
    ),
    "cohere2_moe_sigmoid": Variant(
        "Cohere2MoeConfig",
        {
            "head_dim": 8,
            "num_experts": 6,
            "sliding_window": 5,
            "rms_norm_eps": 1e-6,
            "expert_selection_fn": "sigmoid",
            "norm_topk_prob": False,
            "first_k_dense_replace": 1,
            "sliding_window_pattern": 2,
            "prefix_dense_intermediate_size": 28,
        },
    ),
}
