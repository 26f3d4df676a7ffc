"""One vocabulary from every config; what changes the arithmetic is honoured or refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from plait.errors import ConfigError, UnsupportedModel
from plait.families.common.registry import build_spec, families_by_name, find
from plait.families.config.neutral import NEUTRAL
from plait.families.config.normalize import SHARE, normalize
from plait.families.config.words import ROPE_KINDS
from plait.families.resolve import parse_override, resolve
from plait.ops.rope import KNOWN_KINDS
from plait.spec.model import AttentionSpec, MlaSpec, MlpSpec, MoeSpec

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "vocab_size": 100,
    "max_position_embeddings": 512,
}


def attentions(config: dict[str, Any]) -> list[AttentionSpec]:
    return list(build_spec(config)[0].mixers_of(AttentionSpec))


def test_every_rope_kind_of_the_ops_is_known_to_configs() -> None:
    assert set(ROPE_KINDS) == set(KNOWN_KINDS)


def test_absent_sizes_follow_from_the_others() -> None:
    first = attentions(LLAMA)[0]
    assert (first.num_kv_heads, first.head_dim, first.scale) == (4, 16, 0.25)
    assert attentions({**LLAMA, "head_dim": None, "num_key_value_heads": None})[0] == first
    assert attentions({**LLAMA, "head_dim": 32})[0].head_dim == 32


def test_unknown_words_are_refused_by_name() -> None:
    for change, word in (
        ({"rope_scaling": {"rope_type": "spiral", "factor": 2}}, "spiral"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2, "alpha": 9}}, "alpha"),
        ({"rope_scaling": {"type": "yarn", "factor": 2, "llama_4_scaling_beta": 9}}, "llama_4_scaling_beta"),
        ({"hidden_act": "xielu"}, "xielu"),
        ({"layer_types": ["full_attention"] * 3 + ["quantum_attention"]}, "quantum_attention"),
        ({"num_key_value_heads": [1, 2, 1, 2]}, "num_key_value_heads"),
    ):
        with pytest.raises(UnsupportedModel, match=word):
            build_spec({**LLAMA, **change})


@pytest.mark.parametrize("key", sorted(set(NEUTRAL) - {"position_embedding_type"}))
def test_a_key_that_changes_the_arithmetic_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} = .*--set {key}=null"):
        build_spec({**LLAMA, key: 3.5})
    build_spec({**LLAMA, key: None})


def test_keys_that_a_family_honours_are_honoured_by_every_family_that_says_so() -> None:
    assert {key for entry in families_by_name().values() for key in entry.honours} <= {
        *NEUTRAL,
        SHARE,
        "rotary_dim",
    }


def test_windows_by_each_way_of_telling_them() -> None:
    def windows(**changes: Any) -> list[int | None]:
        mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 8}
        return [a.window for a in attentions({**mistral, **changes})]

    assert windows() == [8] * 4
    assert windows(sliding_window=None) == [None] * 4
    assert windows(use_sliding_window=False) == [None] * 4
    assert windows(layer_types=["sliding_attention", "full_attention"] * 2) == [8, None] * 2
    qwen2 = {"architectures": ["Qwen2ForCausalLM"]}
    assert windows(**qwen2) == [None] * 4
    assert windows(**qwen2, use_sliding_window=True, max_window_layers=3) == [None, None, None, 8]
    moe = {"num_experts": 2, "num_experts_per_tok": 1, "shared_expert_intermediate_size": 8}
    qwen = {"architectures": ["Qwen2MoeForCausalLM"], "use_sliding_window": True, **moe}
    assert windows(**qwen, max_window_layers=3, moe_intermediate_size=8) == [8, None, 8, None]


def test_a_layer_pattern_must_fit_the_number_of_layers() -> None:
    with pytest.raises(UnsupportedModel, match="2 layer types for 4 layers"):
        build_spec({**LLAMA, "layer_types": ["full_attention"] * 2})


def test_which_layers_hold_experts() -> None:
    sizes = {**LLAMA, "num_experts": 4}
    for changes, wanted in (
        ({}, "ssss"),
        ({"mlp_only_layers": [2]}, "ssds"),
        ({"decoder_sparse_step": 2}, "dsds"),
        ({"first_k_dense_replace": 3}, "ddds"),
        ({"moe_layer_freq": [0, 1, 1, 0]}, "dssd"),
        ({"moe_layer_freq": 2}, "sdsd"),
        ({"mlp_layer_types": ["dense", "sparse", "dense", "sparse"]}, "dsds"),
    ):
        found = normalize({**sizes, **changes})["mlp_layer_types"]
        assert "".join(word[0] for word in found) == wanted, changes


def test_infinity_as_transformers_spells_it() -> None:
    assert normalize({**LLAMA, "time_step_limit": [0.0, {"__float__": "Infinity"}]})["time_step_limit"] == [
        0.0,
        float("inf"),
    ]


def test_an_unknown_architecture_is_named_with_the_nearest_and_the_command_that_lists_all() -> None:
    with pytest.raises(
        UnsupportedModel, match=r"'LlammaForCausalLM'.*nearest is LlamaForCausalLM; `plait families`"
    ):
        build_spec({**LLAMA, "architectures": ["LlammaForCausalLM"]})


def test_model_type_stands_in_for_architectures() -> None:
    config = {k: v for k, v in LLAMA.items() if k != "architectures"}
    assert build_spec({**config, "model_type": "llama"})[0] == build_spec(LLAMA)[0]


def test_deepseek_words_are_honoured_or_refused() -> None:
    config = {
        **LLAMA,
        "architectures": ["DeepseekV2ForCausalLM"],
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 8,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 8,
        "n_shared_experts": 2,
        "first_k_dense_replace": 1,
    }
    spec = build_spec(config)[0]
    moes = list(spec.mixers_of(MoeSpec))
    assert [m.shared.size for m in moes if m.shared] == [16, 16, 16]
    assert all(m.rope.interleaved for _, m in spec.mixers() if isinstance(m, MlaSpec))
    for change in ({"topk_method": "random"}, {"norm_topk_prob": True}):
        with pytest.raises(UnsupportedModel, match=next(iter(change))):
            build_spec({**config, **change})
    with pytest.raises(UnsupportedModel, match="scoring_func 'softmax'"):
        build_spec({**config, "architectures": ["DeepseekV3ForCausalLM"], "scoring_func": "softmax"})


def test_overrides_are_json_and_name_a_key_that_exists() -> None:
    assert parse_override("rope_theta=5e5") == ("rope_theta", 5e5)
    assert parse_override('layer_types=["mamba"]') == ("layer_types", ["mamba"])
    with pytest.raises(ConfigError, match="not JSON"):
        parse_override("hidden_act=silu")
    with pytest.raises(ConfigError, match="key=value"):
        parse_override("hidden_act")
    with pytest.raises(
        ConfigError, match="family llama, does not read it; near keys that are read: rope_theta"
    ):
        resolve(LLAMA, {}, read=dict[str, Any]().__getitem__, overrides=["rope_tetha=5"])


def test_a_key_of_unknown_value_is_named() -> None:
    with pytest.raises(UnsupportedModel, match=r"'intermediate_size'.*--set intermediate_size=VALUE"):
        build_spec({k: v for k, v in LLAMA.items() if k != "intermediate_size"})


def test_every_value_says_where_it_came_from() -> None:
    config = {**LLAMA, "rms_norm_eps": 1e-5}
    shapes = {"lm_head.weight": (100, 64)}
    found = resolve(config, shapes, read=dict[str, Any]().__getitem__, overrides=["rope_theta=5e5"])
    assert found.provenance["norm_eps"] == "config.json, as rms_norm_eps"
    assert found.provenance["hidden_act"] == "default (llama)"
    assert found.provenance["rope_theta"] == "--set"
    assert found.provenance["head_dim"] == "from the other keys"
    assert set(found.provenance) >= set(found.config)


def test_only_mistral_has_windows_and_has_them_where_its_config_is_silent() -> None:
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"]}
    assert {a.window for a in attentions(mistral)} == {4096}
    assert {a.window for a in attentions({**mistral, "sliding_window": None})} == {None}
    assert {a.window for a in attentions({**mistral, "sliding_window": 9})} == {9}
    with pytest.raises(UnsupportedModel, match="sliding_window = 9"):
        build_spec({**LLAMA, "sliding_window": 9})
    assert build_spec({**LLAMA, "sliding_window": 512}), "as wide as the longest sequence: it hides nothing"


def test_windows_may_be_a_word_of_letters() -> None:
    exaone = {**LLAMA, "architectures": ["Exaone4ForCausalLM"], "sliding_window": 9}
    layers = attentions({**exaone, "sliding_window_pattern": "LLLG"})
    assert [a.window for a in layers] == [9, 9, 9, None]
    with pytest.raises(UnsupportedModel, match="sliding_window_pattern 'X' is not known; known: L, G"):
        build_spec({**exaone, "sliding_window_pattern": "LXLG"})


@pytest.mark.parametrize("kind", ["dynamic", "yarn"])
def test_a_scaling_needs_the_length_that_it_stretches(kind: str) -> None:
    config = {**LLAMA, "architectures": ["HunYuanDenseV1ForCausalLM"], "max_position_embeddings": None}
    scaling = {"rope_type": kind, "factor": 2.0}
    with pytest.raises(
        UnsupportedModel, match=f"'max_position_embeddings', which positions of rope_type '{kind}'"
    ):
        build_spec({**config, "rope_scaling": scaling})
    build_spec({**config, "rope_scaling": {**scaling, "original_max_position_embeddings": 64}})


def test_the_familys_own_word_comes_first_where_a_config_has_two() -> None:
    """Gemma's published configs have hidden_act, which their models do not read."""
    words = {"hidden_act": "relu", "hidden_activation": "gelu_pytorch_tanh"}
    for name in ("Gemma2ForCausalLM", "Gemma3ForCausalLM", "VaultGemmaForCausalLM"):
        spec, _ = build_spec({**LLAMA, "architectures": [name], **words})
        assert {m.activation for m in spec.mixers_of(MlpSpec)} == {"gelu_pytorch_tanh"}


def test_what_is_set_wins_over_every_name_that_the_config_has_for_it() -> None:
    config = {**LLAMA, "architectures": ["StableLmForCausalLM"], "rms_norm_eps": 0.25, "layer_norm_eps": 0.5}
    shapes = {"lm_head.weight": (100, 64)}
    for key in ("norm_eps", "rms_norm_eps", "layer_norm_eps"):
        spec = resolve(
            config, shapes, read=lambda _: pytest.fail("no number is read"), overrides=[f"{key}=0.125"]
        ).spec
        assert spec.norm.eps == 0.125


def test_a_falcon_that_names_no_length_has_that_of_its_family() -> None:
    falcon = {k: v for k, v in LLAMA.items() if k != "max_position_embeddings"}
    spec, _ = build_spec({**falcon, "architectures": ["FalconForCausalLM"]})
    assert spec.max_len == 2048


def test_a_whole_model_is_refused_before_the_text_model_inside_it() -> None:
    inner = {"text_config": {**LLAMA, "model_type": "gemma", "architectures": None}}
    names = {"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma"}
    with pytest.raises(
        UnsupportedModel, match="'paligemma' is not implemented: every token of a prompt sees"
    ):
        build_spec({**names, **inner})
    build_spec({"architectures": ["SomeGemmaWithEyes"], "model_type": "gemma_eyes", **inner})


def test_windows_of_tokens_that_see_both_ways_count_each_side() -> None:
    """As transformers has it: `is_causal` counts the tokens of one side, without the token itself."""
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 9, "is_causal": False}
    assert {(a.window, a.both_ways) for a in attentions(mistral)} == {(10, True)}


def test_the_first_falcon_of_40b_counts_its_heads_of_keys_in_old_words() -> None:
    old = {"hidden_size": 64, "n_head": 8, "n_head_kv": 2, "n_layer": 2, "vocab_size": 100}
    new = {**old, "num_kv_heads": 2, "new_decoder_architecture": True}
    found = build_spec({**old, "architectures": ["RWForCausalLM"], "model_type": "RefinedWeb"})[0]
    assert found == build_spec({**new, "architectures": ["FalconForCausalLM"]})[0]
    assert {a.num_kv_heads for a in found.mixers_of(AttentionSpec)} == {2}


def test_gemma_3n_scales_no_scores() -> None:
    """Published configs have query_pre_attn_scalar, which transformers does not read."""
    sizes = {
        **LLAMA,
        "architectures": ["Gemma3nForCausalLM"],
        "head_dim": 16,
        "layer_types": ["full_attention"] * 4,
    }
    sizes |= {"num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.0] * 4}
    assert build_spec(sizes)[0] == build_spec({**sizes, "query_pre_attn_scalar": 256})[0]


def test_the_first_bloom_named_its_width_in_one_letter_more() -> None:
    old = {"architectures": ["BloomForCausalLM"], "n_embed": 64, "n_layer": 2, "n_head": 4, "vocab_size": 100}
    spec, _ = build_spec(old)
    assert (spec.hidden_size, len(spec.layers)) == (64, 2)


SCALED = {
    "GptOssForCausalLM": "gpt_oss",
    "CwmForCausalLM": "cwm",
    "ApertusForCausalLM": "apertus",
    "Ministral3ForCausalLM": "ministral3",
    "Mistral4ForCausalLM": "mistral4",
}


def scaling_of(architecture: str, **keys: object) -> dict[str, Any]:
    """The parameters of positions that a config of this family has."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "qk_rope_head_dim": 8}
    config = {"architectures": [architecture], "max_position_embeddings": 64, **sizes, **keys}
    entry = find(config)
    found: dict[str, Any] = normalize(config, entry.defaults, entry.honours)["rope_parameters"]
    return found


@pytest.mark.parametrize("architecture", SCALED)
def test_a_null_scaling_that_two_versions_of_transformers_read_apart_is_refused(architecture: str) -> None:
    usual = scaling_of(architecture)["full_attention"]
    theirs = transformers.AutoConfig.for_model(SCALED[architecture], rope_scaling=None).rope_parameters
    assert (usual["rope_type"], usual["factor"]) == (theirs["rope_type"], theirs["factor"])
    for null in (None, {}):
        with pytest.raises(UnsupportedModel, match=rf"no scaling at all.*own \({usual['rope_type']}, "):
            scaling_of(architecture, rope_scaling=null)
    plain = scaling_of(architecture, rope_scaling={"rope_type": "default"})["full_attention"]
    assert plain["rope_type"] == "default"
    given = {"rope_type": "linear", "factor": 2.0, "rope_theta": 5.0}
    assert (
        scaling_of(architecture, rope_scaling=None, rope_parameters=given)["full_attention"]["factor"] == 2.0
    )


def test_a_null_scaling_of_a_family_with_bases_by_layer_leaves_these_bases() -> None:
    usual = scaling_of("Lfm3ForCausalLM")
    theirs = transformers.AutoConfig.for_model("lfm3", rope_scaling=None).rope_parameters
    assert {kind: p["rope_theta"] for kind, p in usual.items()} == {
        k: p["rope_theta"] for k, p in theirs.items()
    }
    assert scaling_of("Lfm3ForCausalLM", rope_scaling=None) == usual
