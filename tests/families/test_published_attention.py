"""Published configs of models with attention alone: windows, positions, scales and routers."""

from __future__ import annotations

import math
from typing import Any

import pytest

from plait.families.common.registry import build_spec
from plait.spec.model import AttentionSpec, MlpSpec, ModelSpec, MoeSpec, ParallelSpec, RouterSpec

FULL, SLIDING = "full_attention", "sliding_attention"
OLMO_3_7B: dict[str, Any] = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": [SLIDING, SLIDING, SLIDING, FULL] * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}
GPT_OSS_20B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": [SLIDING, FULL] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
PHI_3_MINI_128K: dict[str, Any] = {
    "architectures": ["Phi3ForCausalLM"],
    "attention_bias": False,
    "embd_pdrop": 0.0,
    "hidden_act": "silu",
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "phi3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "original_max_position_embeddings": 4096,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"long_factor": [2.0] * 48, "short_factor": [1.0] * 48, "type": "longrope"},
    "rope_theta": 10000.0,
    "sliding_window": 262144,
    "tie_word_embeddings": False,
    "vocab_size": 32064,
}
PHI_4_MINI: dict[str, Any] = {
    **PHI_3_MINI_128K,
    "full_attn_mod": 1,
    "interpolate_factor": 1,
    "lm_head_bias": False,
    "mlp_bias": False,
    "num_attention_heads": 24,
    "num_key_value_heads": 8,
    "partial_rotary_factor": 0.75,
    "tie_word_embeddings": True,
    "vocab_size": 200064,
}
SMOLLM3_3B: dict[str, Any] = {
    "architectures": ["SmolLM3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 11008,
    "layer_types": [FULL] * 36,
    "max_position_embeddings": 65536,
    "max_window_layers": 28,
    "model_type": "smollm3",
    "no_rope_layer_interval": 4,
    "no_rope_layers": [1, 1, 1, 0] * 9,
    "num_attention_heads": 16,
    "num_hidden_layers": 36,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_theta": 5000000.0,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 128256,
}
STARCODER2_3B: dict[str, Any] = {
    "architectures": ["Starcoder2ForCausalLM"],
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 3072,
    "intermediate_size": 12288,
    "max_position_embeddings": 16384,
    "mlp_type": "default",
    "model_type": "starcoder2",
    "norm_epsilon": 1e-05,
    "norm_type": "layer_norm",
    "num_attention_heads": 24,
    "num_hidden_layers": 30,
    "num_key_value_heads": 2,
    "rope_theta": 999999.4420358813,
    "sliding_window": 4096,
    "use_bias": True,
    "vocab_size": 49152,
}
COMMAND_R7B: dict[str, Any] = {
    "architectures": ["Cohere2ForCausalLM"],
    "cache_implementation": "hybrid",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "layer_norm_eps": 1e-05,
    "layer_switch": 4,
    "logit_scale": 0.25,
    "max_position_embeddings": 8192,
    "model_type": "cohere2",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "order_of_interleaved_layers": "local_attn_first",
    "position_embedding_type": "rope_gptj",
    "rope_theta": 50000,
    "rotary_pct": 1.0,
    "sliding_window": 4096,
    "sliding_window_pattern": 4,
    "use_parallel_block": True,
    "vocab_size": 256000,
}
COMMAND_R: dict[str, Any] = {
    "architectures": ["CohereForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 22528,
    "layer_norm_eps": 1e-05,
    "logit_scale": 0.0625,
    "max_position_embeddings": 8192,
    "model_max_length": 131072,
    "model_type": "cohere",
    "num_attention_heads": 64,
    "num_hidden_layers": 40,
    "num_key_value_heads": 64,
    "rope_theta": 8000000.0,
    "vocab_size": 256000,
}
GLM_4_5_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}
GRANITE_3_3_8B: dict[str, Any] = {
    "architectures": ["GraniteForCausalLM"],
    "attention_multiplier": 0.0078125,
    "embedding_multiplier": 12.0,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 12800,
    "logits_scaling": 16.0,
    "max_position_embeddings": 131072,
    "model_type": "granite",
    "num_attention_heads": 32,
    "num_hidden_layers": 40,
    "num_key_value_heads": 8,
    "residual_multiplier": 0.22,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000000.0,
    "tie_word_embeddings": True,
    "vocab_size": 49159,
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    return build_spec(config)[0]


def attention_of(spec: ModelSpec) -> list[Any]:
    return list(spec.mixers_of(AttentionSpec))


def test_olmo_3_stretches_only_what_sees_everything() -> None:
    found = attention_of(spec_of(OLMO_3_7B))
    assert [a.window for a in found] == [4096, 4096, 4096, None] * 8
    assert (found[0].rope.scaling, found[3].rope.scaling["factor"]) == ({}, 8.0)
    assert {a.rope.theta for a in found} == {5e5}


def test_gpt_oss_20b() -> None:
    spec = spec_of(GPT_OSS_20B)
    found, moe = attention_of(spec), spec.layers[0][1].mixer
    assert [a.window for a in found] == [128, None] * 12
    assert {(a.sinks, a.rope.scaling["truncate"]) for a in found} == {(True, False)}
    assert moe == MoeSpec(32, 4, MlpSpec(2880, "swiglu_oai"))


def test_phi_3_with_a_window_beyond_its_longest_sequence_has_none() -> None:
    found = attention_of(spec_of(PHI_3_MINI_128K))
    assert {a.window for a in found} == {None}
    assert found[0].rope.scaling["original_max_position_embeddings"] == 4096
    four_k = {"max_position_embeddings": 4096, "sliding_window": 2047, "rope_scaling": None}
    assert {a.window for a in attention_of(spec_of({**PHI_3_MINI_128K, **four_k}))} == {2047}


def test_phi_4_mini_turns_three_quarters_of_a_head() -> None:
    spec = spec_of(PHI_4_MINI)
    first = attention_of(spec)[0]
    assert (first.head_dim, first.rope.dim, first.num_kv_heads, spec.tied) == (128, 96, 8, True)


def test_smollm3_has_no_positions_in_every_fourth_layer() -> None:
    spec = spec_of(SMOLLM3_3B)
    assert [a.rope is None for a in attention_of(spec)] == [False, False, False, True] * 9
    assert spec.tied


def test_starcoder2_3b() -> None:
    spec = spec_of(STARCODER2_3B)
    assert {a.window for a in attention_of(spec)} == {4096}
    assert (spec.norm.kind, spec.norm.eps, spec.tied) == ("layer", 1e-5, True)
    assert spec.layers[0][1].mixer == MlpSpec(12288, "gelu_pytorch_tanh", gated=False)


def test_command_r7b() -> None:
    spec = spec_of(COMMAND_R7B)
    found = attention_of(spec)
    assert [(a.window, a.rope is None) for a in found[:4]] == [(4096, False)] * 3 + [(None, True)]
    assert (spec.logit_scale, spec.tied, found[0].rope.interleaved) == (0.25, True, True)
    assert isinstance(spec.layers[0][0].mixer, ParallelSpec)


def test_command_r_is_as_long_as_it_was_trained_for() -> None:
    spec = spec_of(COMMAND_R)
    assert (spec.max_len, attention_of(spec)[0].rope.theta) == (131072, 8e6)
    assert spec_of({**COMMAND_R, "model_max_length": None}).max_len == 8192


def test_glm_4_5_air() -> None:
    spec, names = build_spec(GLM_4_5_AIR)
    first = attention_of(spec)[0]
    assert (first.rope.dim, first.rope.interleaved, first.qk_norm) == (64, False, None)
    assert [isinstance(layer[1].mixer, MoeSpec) for layer in spec.layers] == [False] + [True] * 45
    moe: Any = spec.layers[1][1].mixer
    assert moe.router == RouterSpec("sigmoid", True, 1e-20, 1.0, 1, 1, "top2")
    assert moe.shared == MlpSpec(1408)
    assert names.ignored is not None
    assert names.ignored.search("model.layers.46.eh_proj.weight")


def test_granite_3_3_8b() -> None:
    spec = spec_of(GRANITE_3_3_8B)
    assert (spec.embed_scale, spec.logit_scale) == (12.0, 1 / 16)
    assert {branch.scale for layer in spec.layers for branch in layer} == {0.22}
    assert math.isclose(attention_of(spec)[0].scale, 1 / 128)


@pytest.mark.parametrize(("heads", "kv", "width"), [(96, 8, 12288), (64, 64, 8192)])
def test_the_larger_command_r_norms_every_head(heads: int, kv: int, width: int) -> None:
    changes = {"num_attention_heads": heads, "num_key_value_heads": kv, "hidden_size": width}
    plus = attention_of(spec_of({**COMMAND_R, **changes, "use_qk_norm": True}))[0]
    assert (plus.head_dim, plus.qk_norm.kind, plus.qk_norm_over) == (128, "layer", "each")
    assert attention_of(spec_of({**COMMAND_R, **changes}))[0].qk_norm is None
