"""Tiny checkpoints of families with attention layers."""

from __future__ import annotations

from typing import Any

from tests.families.variant import Variant

PLAIN = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
GRANITE = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.5,
    "attention_multiplier": 0.2,
    "logits_scaling": 4.0,
    "attention_bias": True,
}
PAD = {"pad_token_id": 0}  # the usual one is no token of so small a vocabulary
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 6, "head_dim": 8}
GLM_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "num_mtp_layers": 0}
HALF: dict[str, Any] = {"partial_rotary_factor": 0.5, "rope_theta": 1e4}
PHI_LONG: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.3],
    "long_factor": [1.5, 2.0, 3.5],
}

VARIANTS: dict[str, Variant] = {
    "olmo2": Variant("Olmo2Config", {"attention_bias": True, "rope_parameters": YARN}),
    "olmo2_plain": Variant("Olmo2Config", {"num_attention_heads": 2, "num_key_value_heads": 1}),
    "olmo3": Variant(
        "Olmo3Config",
        {
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
            "rope_parameters": {
                "full_attention": {**YARN, "attention_factor": 1.3},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
    "olmo3_plain": Variant(
        "Olmo3Config", {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 4}
    ),
    "gpt_oss": Variant("GptOssConfig", {**GPT_OSS, "rope_parameters": {**YARN, "truncate": False}}),
    "gpt_oss_plain": Variant(
        "GptOssConfig",
        {
            **GPT_OSS,
            "num_local_experts": 4,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150_000.0},
        },
    ),
    "phi3": Variant("Phi3Config", {**PAD, "sliding_window": 7}),
    "phi3_longrope": Variant(
        "Phi3Config",
        {
            **PAD,
            "original_max_position_embeddings": 16,
            "rope_parameters": PHI_LONG,
            "tie_word_embeddings": True,
        },
    ),
    "smollm3": Variant(
        "SmolLM3Config",
        {
            **PAD,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 5,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "smollm3_plain": Variant(
        "SmolLM3Config",
        {**PAD, "num_hidden_layers": 5, "tie_word_embeddings": True},
    ),
    "starcoder2": Variant("Starcoder2Config", {"sliding_window": 5, "hidden_act": "relu", "use_bias": False}),
    "starcoder2_plain": Variant("Starcoder2Config", {"tie_word_embeddings": True}),
    "cohere": Variant(
        "CohereConfig",
        {"use_qk_norm": True, "logit_scale": 0.25, "attention_bias": True, "layer_norm_eps": 1e-3},
    ),
    "cohere_plain": Variant("CohereConfig", {"tie_word_embeddings": True}),
    "cohere2": Variant("Cohere2Config", {"num_hidden_layers": 4, "sliding_window": 5, "logit_scale": 0.5}),
    "cohere2_plain": Variant(
        "Cohere2Config",
        {
            "tie_word_embeddings": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "attention_bias": True,
        },
    ),
    "glm": Variant("GlmConfig", {**PAD, "head_dim": 12, "attention_bias": False, "rms_norm_eps": 1e-3}),
    "glm_plain": Variant("GlmConfig", {**PAD, "head_dim": 16}),
    "glm4": Variant(
        "Glm4Config", {**PAD, "head_dim": 12, "rope_parameters": {**HALF, "partial_rotary_factor": 1.0}}
    ),
    "glm4_plain": Variant("Glm4Config", {**PAD, "head_dim": 16}),
    "glm4_moe": Variant(
        "Glm4MoeConfig",
        {
            **GLM_MOE,
            "head_dim": 12,
            "n_group": 4,
            "topk_group": 2,
            "n_shared_experts": 2,
            "use_qk_norm": True,
            "attention_bias": True,
            "routed_scaling_factor": 1.7,
            "norm_topk_prob": False,
        },
    ),
    "glm4_moe_plain": Variant("Glm4MoeConfig", {**GLM_MOE, **PLAIN, "first_k_dense_replace": 0}),
    "granite_dense": Variant("GraniteConfig", {**GRANITE, "mlp_bias": True}),
    "granite_dense_plain": Variant("GraniteConfig", {**PLAIN}),
    "granite_moe": Variant("GraniteMoeConfig", {**GRANITE, "num_local_experts": 6, "num_experts_per_tok": 3}),
    "granite_moe_plain": Variant("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "granite_moe_shared": Variant(
        "GraniteMoeSharedConfig", {**GRANITE, "num_local_experts": 4, "shared_intermediate_size": 24}
    ),
}
