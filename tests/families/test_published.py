"""Published configs, old and new: each is read to the right spec, whatever the age of its keys."""

from __future__ import annotations

from typing import Any

import pytest

from plait.families.common.registry import build_spec
from plait.spec.model import AttentionSpec, MlaSpec, ModelSpec, MoeSpec, ParallelSpec, RouterSpec
from plait.spec.recurrent import Mamba2Spec

LLAMA_31_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GEMMA_3_4B = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {"hidden_size": 1152, "num_hidden_layers": 27},
}
NEMOTRON_H_8B = {
    "architectures": ["NemotronHForCausalLM"],
    "attention_bias": False,
    "attention_head_dim": 128,
    "chunk_size": 128,
    "conv_kernel": 4,
    "hidden_size": 4096,
    "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
    "intermediate_size": 21504,
    "layer_norm_epsilon": 1e-05,
    "mamba_head_dim": 64,
    "mamba_hidden_act": "silu",
    "mamba_num_heads": 128,
    "max_position_embeddings": 8192,
    "mlp_hidden_act": "relu2",
    "model_type": "nemotron_h",
    "n_groups": 8,
    "num_attention_heads": 32,
    "num_hidden_layers": 52,
    "num_key_value_heads": 8,
    "sliding_window": None,
    "ssm_state_size": 128,
    "vocab_size": 131072,
}
CODESTRAL_MAMBA = {
    "architectures": ["Mamba2ForCausalLM"],
    "chunk_size": 256,
    "conv_kernel": 4,
    "expand": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba2",
    "n_groups": 8,
    "num_heads": 128,
    "num_hidden_layers": 64,
    "state_size": 128,
    "time_step_limit": [0.0, float("inf")],
    "tie_word_embeddings": False,
    "vocab_size": 32768,
}
MAMBA2_130M = {
    "d_model": 768,
    "d_intermediate": 0,
    "n_layer": 24,
    "vocab_size": 50277,
    "ssm_cfg": {"layer": "Mamba2"},
    "attn_layer_idx": [],
    "attn_cfg": {},
    "rms_norm": True,
    "residual_in_fp32": True,
    "fused_add_norm": True,
    "pad_vocab_size_multiple": 16,
    "tie_embeddings": True,
}


def spec(config: dict[str, Any]) -> ModelSpec:
    return build_spec(config)[0]


def only(kind: type, config: dict[str, Any]) -> list[Any]:
    return [mixer for _, mixer in spec(config).mixers() if isinstance(mixer, kind)]


def test_llama_3() -> None:
    found = only(AttentionSpec, LLAMA_31_8B)
    assert len(found) == 32
    assert (found[0].num_kv_heads, found[0].head_dim, found[0].rope.theta) == (8, 128, 5e5)
    assert found[0].rope.scaling["rope_type"] == "llama3"
    assert spec(LLAMA_31_8B).max_len == 131072


def test_deepseek_v3() -> None:
    attention, moe = only(MlaSpec, DEEPSEEK_V3)[0], only(MoeSpec, DEEPSEEK_V3)
    assert len(moe) == 58
    assert moe[0].router == RouterSpec("sigmoid", True, 1e-20, 2.5, 8, 4, "top2")
    assert attention.scale == pytest.approx(0.1352337788608801)  # 192^-1/2 (0.1 ln 40 + 1)^2
    names = build_spec(DEEPSEEK_V3)[1]
    assert names.ignored is not None
    assert names.ignored.search("model.layers.61.eh_proj.weight")
    assert not names.ignored.search("model.layers.6.mlp.gate.weight")


def test_gemma_3_with_a_config_that_leaves_most_to_its_class() -> None:
    found = only(AttentionSpec, GEMMA_3_4B)
    assert [a.window for a in found[:7]] == [1024] * 5 + [None, 1024]
    assert (found[0].num_heads, found[0].num_kv_heads, found[0].head_dim) == (8, 4, 256)
    assert (found[0].rope.theta, found[5].rope.theta) == (1e4, 1e6)
    assert (dict(found[0].rope.scaling), found[5].rope.scaling["factor"]) == ({}, 8.0)
    assert spec(GEMMA_3_4B).tied
    assert spec(GEMMA_3_4B).vocab_size == 262208


def test_nemotron_h() -> None:
    layers = spec(NEMOTRON_H_8B).layers
    assert [len(layer) for layer in layers] == [1] * 52
    assert len(only(AttentionSpec, NEMOTRON_H_8B)) == 4
    assert {(a.head_dim, a.rope) for a in only(AttentionSpec, NEMOTRON_H_8B)} == {(128, None)}
    assert {m.norm_groups for m in only(Mamba2Spec, NEMOTRON_H_8B)} == {8}


def test_mamba2_in_three_formats() -> None:
    codestral = only(Mamba2Spec, CODESTRAL_MAMBA)
    assert len(codestral) == 64
    assert (codestral[0].num_groups, codestral[0].state_size, codestral[0].norm_groups) == (8, 128, 8)
    small = only(Mamba2Spec, MAMBA2_130M)[0]
    assert (small.num_heads, small.head_dim, small.state_size, small.num_groups) == (24, 64, 128, 1)
    assert (spec(MAMBA2_130M).vocab_size, spec(MAMBA2_130M).tied) == (50288, True)


def test_falcon_h1_without_its_multipliers_is_plain() -> None:
    config = {
        "architectures": ["FalconH1ForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "vocab_size": 100,
        "mamba_d_ssm": 128,
        "mamba_n_heads": 8,
        "attn_layer_indices": None,
    }
    first = spec(config).layers[0][0].mixer
    assert isinstance(first, ParallelSpec)
    assert only(Mamba2Spec, config)[0].head_dim == 16
    assert only(AttentionSpec, config)[0].scale == 0.25
