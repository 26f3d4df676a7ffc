"""Tiny checkpoints of families of 2026, some of them outside of transformers' table of causal models."""

from __future__ import annotations

from typing import Any

from tests.families.tiny_mixers import SPARSE
from tests.families.variant import Variant

MUSE = {
    "text_config": {
        "vocab_size": 97,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 5,
        "intermediate_size": 44,
        "head_dim": 8,
        "sliding_window": 6,
        "qk_scale_factor": 1.7,
        "output_multiplier": 0.4,
        "max_position_embeddings": 128,
        "pad_token_id": None,
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "pos_emb_height": 2,
        "pos_emb_width": 2,
        "patch_size": 2,
    },
    "out_hidden_size": 64,
    "projector_hidden_size": 8,
    "image_token_id": 98,
    "video_token_id": 99,
}
# Stored scales are random: with the usual initializer_range scores would be in the thousands.
DORY = {
    "num_hidden_layers": 5,
    "n_input_layers": 1,
    "n_recurrent_layers": 3,
    "n_output_layers": 1,
    "n_recurrent_loops": 3,
    "head_dim": 12,
    "sliding_window": 6,
    "initializer_range": 0.35,
    "ngpt_alpha_init": 0.4,
    "layer_types": [
        *("sliding_attention", "full_attention", "sliding_attention"),
        *("sliding_attention", "full_attention"),
    ],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
# The sizes of a text model inside another one.
TEXT: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 3,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}
QWEN3_VL_MOE = {
    "text_config": {
        "model_type": "qwen3_vl_moe_text",
        **TEXT,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [2, 1, 1]},
        "tie_word_embeddings": False,
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_heads": 2,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
    "tie_word_embeddings": False,
}
GLM_ROPE = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "mrope_section": [1, 1, 0],
    "partial_rotary_factor": 0.5,
}
GLM_EYE = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
GLM4V: dict[str, Any] = {
    "text_config": {
        "model_type": "glm4v_text",
        **TEXT,
        "attention_bias": True,
        "pad_token_id": None,
        "rope_parameters": GLM_ROPE,
        "tie_word_embeddings": False,
    },
    "vision_config": GLM_EYE,
    "tie_word_embeddings": False,
}
HY_VL: dict[str, Any] = {
    "text_config": {
        **TEXT,
        **SPARSE,
        "num_hidden_layers": 4,
        "rms_norm_eps": 1e-2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "indexer_types": ["full", "shared", "full", "shared"],
        "index_head_dim": 20,
        "hc_mult": 3,
        "hc_magnitude": 1.7,
        "hc_eps": 1e-2,
        "routed_scaling_factor": 1.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 0]},
    },
    "vision_config": {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 2,
        "max_image_size": 8,
    },
}
# Four layers in a row: whole ones with and without positions, then two that read their latents.
LARGE4: dict[str, Any] = {
    "text_config": {
        **TEXT,
        **{key: value for key, value in SPARSE.items() if key != "q_lora_rank"},
        "num_hidden_layers": 6,
        "rms_norm_eps": 1e-2,
        "n_group": 4,
        "topk_group": 2,
        "attention_bias": True,
        "routed_scaling_factor": 1.3,
        "index_head_dim": 20,
        "indexer_types": ["full", "full", "shared", "full", "shared", "full"],
        "no_rope_layers": [1, 0, 1, 0, 1, 0],
        "kv_source_layers": [0, 1, 0, 1, 4, 5],
        "final_logit_softcapping": 3.0,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 16.0,
            "original_max_position_embeddings": 16,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "attention_factor": 1.0,
        },
    },
    "vision_config": {
        "model_type": "pixtral",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 8,
        "patch_size": 4,
    },
}
VARIANTS: dict[str, Variant] = {
    "mistral4": Variant(
        "Mistral4Config",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 12,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "first_k_dense_replace": 1,
            "n_group": 4,
            "topk_group": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 16.0,
                "original_max_position_embeddings": 8,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.3,
                "partial_rotary_factor": 1 / 3,
            },
            "pad_token_id": 0,
        },
        model="Mistral4ForCausalLM",
    ),
    "hrm_text": Variant(
        "HrmTextConfig",
        {
            "num_hidden_layers": 2,
            "H_cycles": 2,
            "L_cycles": 3,
            "head_dim": 12,
            "prefix_lm": False,
            "embedding_scale": 1.7,
            "attention_bias": True,
        },
    ),
    "dory": Variant(
        "DoryConfig",
        {**DORY, "attention_bias": True, "mlp_bias": True},
    ),
    "dory_once": Variant(
        "DoryConfig",
        {
            **DORY,
            "n_input_layers": 0,
            "n_recurrent_layers": 2,
            "n_output_layers": 3,
            "n_recurrent_loops": 1,
            "recurrent_kv_cache_mode": "last_loop",
            "tie_word_embeddings": True,
            "hidden_act": "gelu",
        },
        slow=True,
    ),
    "muse_glimmer": Variant("MuseGlimmerConfig", MUSE, model="MuseGlimmerForConditionalGeneration"),
    "sarvam_mla": Variant(
        "SarvamMLAConfig",
        {
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 4,
            "v_head_dim": 6,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1e4,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
                "mscale": 0.707,
                "mscale_all_dim": 0.707,
            },
        },
    ),
    "sarvam_moe": Variant(
        "SarvamMoEConfig",
        {
            "head_dim": 12,
            "num_key_value_heads": 2,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "rope_parameters": {"rope_type": "default", "rope_theta": 8e6},
            "pad_token_id": None,
        },
    ),
    "lara_mini": Variant(
        "LaraMiniConfig",
        {
            "num_hidden_layers": 5,
            "head_dim": 8,
            "sliding_window": 6,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 6,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 20,
            "shared_expert_intermediate_size": 24,
            "pad_token_id": None,
        },
    ),
    "qwen3_vl_moe": Variant("Qwen3VLMoeConfig", QWEN3_VL_MOE, model="Qwen3VLMoeForConditionalGeneration"),
    "mistral_large4": Variant("MistralLarge4Config", LARGE4, model="MistralLarge4ForConditionalGeneration"),
    "hy_v4_vl": Variant("HYV4VLConfig", HY_VL, model="HYV4VLForConditionalGeneration"),
    "glm4v": Variant("Glm4vConfig", GLM4V, model="Glm4vForConditionalGeneration"),
}
