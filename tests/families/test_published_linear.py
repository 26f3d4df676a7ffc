"""Configs as published models with linear attention have them: layers and sizes, given by their own keys."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.spec.model import AttentionSpec, MlaSpec, MoeSpec
from plait.spec.recurrent import DeltaNetSpec, LightningSpec, RgLruSpec

QWEN3_NEXT_80B: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "vocab_size": 151936,
}
QWEN3_5_WRAPPED: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "image_token_id": 248056,
    "text_config": {
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 1024,
        "intermediate_size": 3584,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": "qwen3_5_text",
        "mtp_num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_hidden_layers": 24,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": True,
        "vocab_size": 248320,
    },
    "tie_word_embeddings": True,
    "vision_config": {"depth": 12, "hidden_size": 768},
}
KIMI_LINEAR_48B: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "first_k_dense_replace": 1,
    "head_dim": 72,
    "hidden_act": "silu",
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "kv_lora_rank": 512,
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "kda_layers": [n for n in range(1, 28) if n not in (4, 8, 12, 16, 20, 24, 27)],
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "mla_use_nope": True,
    "model_max_length": 1048576,
    "model_type": "kimi_linear",
    "moe_intermediate_size": 1024,
    "moe_layer_freq": 1,
    "moe_renormalize": True,
    "moe_router_activation_func": "sigmoid",
    "num_attention_heads": 32,
    "num_expert_group": 1,
    "num_experts": 256,
    "num_experts_per_token": 8,
    "num_hidden_layers": 27,
    "num_key_value_heads": 32,
    "num_nextn_predict_layers": 0,
    "num_shared_experts": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "routed_scaling_factor": 2.446,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_grouped_topk": True,
    "v_head_dim": 128,
    "vocab_size": 163840,
}
MINIMAX_TEXT_01: dict[str, Any] = {
    "architectures": ["MiniMaxText01ForCausalLM"],
    "attn_type_list": [int((i + 1) % 8 == 0) for i in range(80)],
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 6144,
    "intermediate_size": 9216,
    "layernorm_full_attention_alpha": 3.5565588200778455,
    "layernorm_full_attention_beta": 1.0,
    "layernorm_linear_attention_alpha": 3.5565588200778455,
    "layernorm_linear_attention_beta": 1.0,
    "layernorm_mlp_alpha": 3.5565588200778455,
    "layernorm_mlp_beta": 1.0,
    "max_position_embeddings": 10240000,
    "model_type": "minimax_text_01",
    "num_attention_heads": 64,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 80,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "postnorm": True,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000,
    "rotary_dim": 64,
    "shared_intermediate_size": 0,
    "shared_moe_mode": "sigmoid",
    "sliding_window": None,
    "tie_word_embeddings": False,
    "vocab_size": 200064,
}
RECURRENT_GEMMA_2B: dict[str, Any] = {
    "architectures": ["RecurrentGemmaForCausalLM"],
    "attention_bias": False,
    "attention_window_size": 2048,
    "block_types": ["recurrent", "recurrent", "attention"],
    "conv1d_width": 4,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 15360,
    "logits_soft_cap": 30.0,
    "lru_width": 2560,
    "model_type": "recurrent_gemma",
    "num_attention_heads": 10,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "vocab_size": 256000,
}


def spec_of(config: dict[str, Any]) -> Any:
    return build_spec(config)[0]


def test_qwen3_next() -> None:
    spec = spec_of(QWEN3_NEXT_80B)
    first, fourth = spec.layers[0][0].mixer, spec.layers[3][0].mixer
    assert [isinstance(layer[0].mixer, AttentionSpec) for layer in spec.layers] == [
        False,
        False,
        False,
        True,
    ] * 12
    assert isinstance(first, DeltaNetSpec)
    assert (first.num_heads, first.num_key_heads, first.key_dim, first.value_dim) == (32, 16, 128, 128)
    assert (fourth.gate, fourth.qk_norm_over, fourth.rope.dim, fourth.rope.theta) == (True, "head", 64, 1e7)
    moe = spec.layers[0][1].mixer
    assert (moe.num_experts, moe.top_k, moe.expert.size, moe.shared.size) == (512, 10, 512, 512)
    assert moe.shared_gate
    assert moe.router.renormalize


def test_qwen3_5_in_its_wrapper() -> None:
    spec = spec_of(QWEN3_5_WRAPPED)
    assert spec.tied
    assert len(spec.layers) == 24
    assert spec.layers[0][0].mixer.num_key_heads == 16
    attention = spec.layers[3][0].mixer
    assert (attention.rope.dim, attention.rope.scaling, attention.gate) == (64, {}, True)
    text = {**QWEN3_5_WRAPPED["text_config"], "rope_parameters": {"spiral": 1}}
    with pytest.raises(UnsupportedModel, match=r"rope parameters \['spiral'\] are not known"):
        spec_of({**QWEN3_5_WRAPPED, "text_config": text})


def test_qwen3_5_with_experts_has_no_width_of_dense_layers() -> None:
    """Every layer has experts, and the config says nothing of what no layer has."""
    text = {k: v for k, v in QWEN3_5_WRAPPED["text_config"].items() if k != "intermediate_size"}
    text |= {"model_type": "qwen3_5_moe_text", "num_experts": 256, "num_experts_per_tok": 8}
    text |= {"moe_intermediate_size": 512, "shared_expert_intermediate_size": 512}
    named = {"architectures": ["Qwen3_5MoeForConditionalGeneration"], "model_type": "qwen3_5_moe"}
    spec = spec_of({**QWEN3_5_WRAPPED, **named, "text_config": text})
    moe = spec.layers[0][1].mixer
    assert (moe.num_experts, moe.top_k, moe.expert.size, moe.shared.size) == (256, 8, 512, 512)


def test_kimi_linear() -> None:
    spec = spec_of(KIMI_LINEAR_48B)
    assert spec.max_len == 1048576
    latent = [i for i, layer in enumerate(spec.layers) if isinstance(layer[0].mixer, MlaSpec)]
    assert latent == [3, 7, 11, 15, 19, 23, 26]
    assert spec.layers[3][0].mixer.scale == 192**-0.5
    assert [isinstance(layer[1].mixer, MoeSpec) for layer in spec.layers] == [False] + [True] * 26
    router = spec.layers[1][1].mixer.router
    assert (router.score, router.scale, router.renormalize, router.groups) == ("sigmoid", 2.446, True, 1)


def test_minimax_text_01() -> None:
    spec = spec_of(MINIMAX_TEXT_01)
    softmax = [i for i, layer in enumerate(spec.layers) if isinstance(layer[0].mixer, AttentionSpec)]
    assert softmax == list(range(7, 80, 8))
    assert spec.layers[7][0].mixer.rope.dim == 64
    assert isinstance(spec.layers[0][0].mixer, LightningSpec)
    assert {branch.keep for layer in spec.layers for branch in layer} == {3.5565588200778455}
    slopes = spec.layers[0][0].mixer.slopes
    assert slopes[0] == pytest.approx(2**-0.125 * 1.00001)
    assert slopes[63] == pytest.approx(2**-8 * 1.00001)


def test_recurrent_gemma_2b() -> None:
    spec = spec_of(RECURRENT_GEMMA_2B)
    assert [isinstance(layer[0].mixer, RgLruSpec) for layer in spec.layers].count(True) == 18
    attention = spec.layers[2][0].mixer
    assert (attention.window, attention.num_kv_heads, attention.head_dim) == (2048, 1, 256)
    assert (attention.rope.dim, spec.embed_scale, spec.logit_softcap) == (128, 50.5, 30.0)
    assert spec.layers[0][1].mixer.size == 7680
    assert spec.tied
