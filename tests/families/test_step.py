"""Step 3.5's own config, which transformers 5 writes in other words: both are one model."""

from __future__ import annotations

from typing import Any

from plait.families.common.registry import build_spec
from tests.families.tiny_mixers import STEP

KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
PUBLISHED: dict[str, Any] = {
    "architectures": ["Step3p5ForCausalLM"],
    "model_type": "step3p5",
    "vocab_size": 97,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_attention_groups": 2,
    "num_hidden_layers": 4,
    "num_nextn_predict_layers": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "head_dim": 10,
    "layer_types": [*KINDS, "full_attention", "sliding_attention"],
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 10,
    },
    "sliding_window": 6,
    "rope_theta": [5e5, 1e4, 1e4, 5e5, 5e5, 1e4],
    "partial_rotary_factors": [0.6, 1.0, 1.0, 0.6, 0.6, 1.0],
    "rope_scaling": None,
    "att_impl_type": "GQA",
    "use_head_wise_attn_gate": True,
    "use_moe_router_bias": True,
    "need_fp32_gate": True,
    "norm_expert_weight": True,
    "moe_router_activation": "sigmoid",
    "moe_router_scaling_factor": 1.7,
    "moe_layers_enum": "1,2,3",
    "moe_num_experts": 6,
    "moe_top_k": 2,
    "moe_intermediate_size": 20,
    "share_expert_dim": 22,
    "swiglu_limits": [0.0, 0.0, 7.0, 7.0, 0.0, 0.0],
    "swiglu_limits_shared": [0.0, 0.0, 16.0, 7.0, 0.0, 0.0],
    "tie_word_embeddings": False,
}


def test_the_published_config_is_what_transformers_makes_of_it() -> None:
    written = {"architectures": ["Step3p7ForConditionalGeneration"], "model_type": "step3p7", **STEP}
    assert build_spec(PUBLISHED)[0] == build_spec(written)[0]
