"""Text models that transformers has only inside ones that also see, hear or talk."""

from __future__ import annotations

from typing import Any

from tests.families.tiny_latest import TEXT
from tests.families.variant import Variant

ALONE: dict[str, Any] = {"tie_word_embeddings": False}
QWEN_EYE = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
QWEN_EAR = {
    "d_model": 16,
    "encoder_layers": 1,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 24,
    "num_mel_bins": 16,
    "max_source_positions": 20,
    "output_dim": 32,
}
QWEN2_OMNI: dict[str, Any] = {
    "text_config": {
        "model_type": "qwen2_5_omni_text",
        **TEXT,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e5, "mrope_section": [2, 1, 1]},
    },
    "vision_config": QWEN_EYE,
    "audio_config": QWEN_EAR,
}
QWEN3_OMNI: dict[str, Any] = {
    "text_config": {
        "model_type": "qwen3_omni_moe_text",
        **TEXT,
        "head_dim": 8,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_only_layers": [1],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "interleaved": True,
            "mrope_interleaved": True,
            "mrope_section": [2, 1, 1],
        },
    },
    "vision_config": {**QWEN_EYE, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    "audio_config": {**QWEN_EAR, "downsample_hidden_size": 8},
}
EYE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
SMALL_EYE = {**EYE, "image_size": 8, "patch_size": 4}
ROPE = {"rope_type": "default", "rope_theta": 1e5}
QWEN3_VL: dict[str, Any] = {
    "text_config": {**TEXT, "head_dim": 8, "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]}},
    "vision_config": QWEN3_OMNI["vision_config"],
}
ERNIE: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "moe_num_experts": 6,
        "moe_k": 2,
        "moe_intermediate_size": [20, 12],
        "rope_parameters": {**ROPE, "mrope_section": [1, 1, 2]},
    },
    "vision_config": {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 24,
        "patch_size": 4,
    },
    **ALONE,
}
MOLMO2: dict[str, Any] = {
    "text_config": {**TEXT, "head_dim": 8, "additional_vocab_size": 5, "rope_parameters": ROPE},
    "vision_config": {**EYE, "num_key_value_heads": 2, "head_dim": 8, "patch_size": 4},
    "adapter_config": {
        **EYE,
        "vision_feature_layer": [0],
        "num_key_value_heads": 2,
        "head_dim": 8,
        "text_hidden_size": 32,
    },
}
# As Molmo 2 on OLMo: norms behind the mixers, of q and k over all heads, scaled positions in some layers.
MOLMO2_O: dict[str, Any] = {
    **MOLMO2,
    "text_config": {
        **MOLMO2["text_config"],
        "qk_norm_type": "olmo",
        "norm_after": True,
        "attention_bias": True,
        "rope_scaling_layers": [1],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
}
PADDLE: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "head_dim": 16,
        "pad_token_id": None,
        "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]},
    },
    "vision_config": SMALL_EYE,
}
HUNYUAN: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "head_dim": 16,
        "pad_token_id": None,
        "rope_parameters": {
            "rope_type": "xdrope",
            "rope_theta": 1e4,
            "alpha": 50.0,
            "factor": 1.0,
            "xdrope_section": [2, 2, 2, 2],
        },
    },
    "vision_config": {**EYE, "patch_size": 4, "out_hidden_size": 32},
}
DOCLING: dict[str, Any] = {
    "text_config": {**TEXT, "pad_token_id": None},
    "pad_token_id": None,
    "vision_config": {**SMALL_EYE, "out_hidden_size": 32},
}
DEEPSEEK_OCR: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 20,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
        "routed_scaling_factor": 1.5,
    },
    "vision_config": {
        "sam_config": {
            "hidden_size": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "mlp_dim": 24,
            "output_channels": 8,
            "image_size": 32,
            "patch_size": 8,
            "global_attn_indexes": [0],
            "downsample_channels": [8, 16],
        },
        "encoder_config": {**EYE, "max_query": 4},
    },
}
GLM_OCR: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "head_dim": 16,
        "pad_token_id": None,
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5},
    },
    "vision_config": QWEN_EYE,
}
COSMOS3: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "head_dim": 8,
        "pad_token_id": None,
        "rope_parameters": {**ROPE, "mrope_section": [2, 1, 1]},
    },
    "vision_config": {**EYE, "num_patches": 4, "patch_size": 4},
}
GRANITE4: dict[str, Any] = {
    "text_config": {
        **TEXT,
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.3,
        "attention_multiplier": 0.1,
    },
    "vision_config": {"model_type": "siglip_vision_model", **SMALL_EYE, "hidden_size": 64},
    "downsample_rate": "1/2",
    "deepstack_layer_map": [[-1, 0]],
    "spatial_target_layers": [1],
    "qformer_config": {"hidden_size": 64, "num_attention_heads": 1, "intermediate_size": 24},
}
# A config's beginning, and its keys, of wrappers that have text models of their own.
WRAPPERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_5_omni": ("Qwen2_5OmniThinker", QWEN2_OMNI),
    "qwen3_omni": ("Qwen3OmniMoeThinker", QWEN3_OMNI),
    "qwen3_vl": ("Qwen3VL", QWEN3_VL),
    "ernie_vl": ("Ernie4_5_VLMoe", ERNIE),
    "molmo2": ("Molmo2", MOLMO2),
    "molmo2_olmo": ("Molmo2", MOLMO2_O),
    "paddleocr": ("PaddleOCRVL", PADDLE),
    "hunyuan_vl": ("HunYuanVL", HUNYUAN),
    "granite_docling": ("GraniteDocling", DOCLING),
    "deepseek_ocr2": ("DeepseekOcr2", DEEPSEEK_OCR),
    "granite4_vision": ("Granite4Vision", GRANITE4),
    "cosmos3_edge": ("Cosmos3Edge", COSMOS3),
    "glm_ocr": ("GlmOcr", GLM_OCR),
}
VARIANTS: dict[str, Variant] = {
    name: Variant(f"{kind}Config", keys, model=f"{kind}ForConditionalGeneration")
    for name, (kind, keys) in WRAPPERS.items()
}
