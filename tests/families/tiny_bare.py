"""Tiny checkpoints that are detected by names and shapes alone: sizes and values as usual."""

from __future__ import annotations

from typing import Any

from tests.families.variant import Variant

PAD = {"pad_token_id": 0}
NO_IDS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
PLAIN = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
TWO: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}
KINDS = ["linear_attention", "full_attention", "linear_attention"]
STATE = {"state_size": 8, "expand": 2, "time_step_rank": 5, "conv_kernel": 4}
# Key heads as wide as value heads.
DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
QWEN = {**DELTA, "head_dim": 16, "layer_types": KINDS}
QWEN["rope_parameters"] = {"rope_theta": 1e7, "partial_rotary_factor": 0.25}
SPARSE = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": theta, **more}}


VARIANTS: dict[str, Variant] = {
    "olmo2": Variant("Olmo2Config", {**TWO, **rope(5e5), "rms_norm_eps": 1e-6}),
    # A vocabulary distinguishes these two from families with the same tensors.
    "olmo3": Variant(
        "Olmo3Config",
        {
            **TWO,
            "rope_parameters": {
                "full_attention": {
                    "rope_type": "yarn",
                    "rope_theta": 5e5,
                    "factor": 8.0,
                    "beta_fast": 32.0,
                    "beta_slow": 1.0,
                    "original_max_position_embeddings": 8192,
                },
                "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
            },
            "rms_norm_eps": 1e-6,
            "num_hidden_layers": 4,
            "vocab_size": 100_278,
            "max_position_embeddings": 65_536,
        },
    ),
    "falcon_mamba": Variant("FalconMambaConfig", {**STATE, "vocab_size": 65_024, "num_hidden_layers": 2}),
    "gpt_oss": Variant(
        "GptOssConfig",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 4,
            "head_dim": 8,
            "sliding_window": 128,
            "num_hidden_layers": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150_000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131_072,
        },
    ),
    "phi3": Variant("Phi3Config", {**PAD, **TWO, "sliding_window": None}),
    "starcoder2": Variant(
        "Starcoder2Config", {**TWO, **rope(1e6), "tie_word_embeddings": True, "sliding_window": None}
    ),
    "cohere": Variant("CohereConfig", {**PAD, **TWO, **rope(8e6), "tie_word_embeddings": True}),
    "cohere_norms": Variant("CohereConfig", {**PAD, **rope(8e6), "use_qk_norm": True}),
    "glm": Variant("GlmConfig", {**PAD, **PLAIN, "rms_norm_eps": 1.5625e-7}),
    "glm4": Variant("Glm4Config", {**PAD, **PLAIN, "rms_norm_eps": 1e-5}),
    "glm4_moe": Variant(
        "Glm4MoeConfig",
        {
            **PLAIN,
            **rope(1e6, partial_rotary_factor=0.5),
            "n_routed_experts": 8,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 20,
            "use_qk_norm": True,
            "num_mtp_layers": 0,
        },
    ),
    "granite_moe": Variant("GraniteMoeConfig", {**TWO, "num_local_experts": 8, "num_experts_per_tok": 8}),
    "granite_moe_shared": Variant(
        "GraniteMoeSharedConfig",
        {**TWO, "num_local_experts": 8, "num_experts_per_tok": 8, "shared_intermediate_size": 24},
    ),
    "mamba": Variant("MambaConfig", STATE),
    "jamba": Variant(
        "JambaConfig",
        {
            **TWO,
            "mamba_d_state": 8,
            "mamba_dt_rank": 5,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "num_experts": 4,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
        },
    ),
    "zamba2": Variant(
        "Zamba2Config",
        {
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
            "mamba_d_state": 16,
            "n_mamba_heads": 8,
            "chunk_size": 8,
            "adapter_rank": 6,
            "num_hidden_layers": 5,
            "layers_block_type": ["linear_attention", "hybrid", "hybrid", "linear_attention", "hybrid"],
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "use_mem_rope": True,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2": Variant(
        "Lfm2Config",
        {
            **rope(1e6),
            "layer_types": ["conv", "full_attention", "conv"],
            "head_dim": 8,
            "block_auto_adjust_ff_dim": False,
        },
    ),
    "lfm2_moe": Variant(
        "Lfm2MoeConfig",
        {
            **rope(1e6),
            "layer_types": ["conv", "full_attention", "conv"],
            "head_dim": 8,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "num_dense_layers": 1,
        },
    ),
    "qwen3_next": Variant("Qwen3NextConfig", {**QWEN, **SPARSE, "mlp_only_layers": [1]}),
    "qwen3_5": Variant("Qwen3_5TextConfig", QWEN),
    "qwen3_5_moe": Variant("Qwen3_5MoeTextConfig", {**QWEN, **SPARSE}),
    "kimi_linear": Variant(
        "KimiLinearConfig",
        {
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
            "q_lora_rank": 12,
        },
    ),
    "olmo_hybrid": Variant(
        "OlmoHybridConfig",
        {**NO_IDS, **rope(5e5), "layer_types": KINDS, "num_attention_heads": 4, "rms_norm_eps": 1e-6},
    ),
    "minimax": Variant(
        "MiniMaxConfig",
        {
            **rope(1e7),
            "head_dim": 16,
            "layer_types": KINDS,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "recurrent_gemma": Variant(
        "RecurrentGemmaConfig",
        {**TWO, "tie_word_embeddings": True, "block_types": ["recurrent", "attention"]},
    ),
}
