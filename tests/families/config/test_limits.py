"""Counts that would fill memory or time are refused by name in every family, before anything is made."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch

from plait.checkpoint.names import NameMap, UnknownName
from plait.checkpoint.weights import Target, Weights
from plait.errors import ConfigError, UnsupportedModel
from plait.families.common.registry import MOST_NAMES, build_spec, names_in
from plait.families.common.spec_builders import see_both_ways
from plait.families.config.checks import check_config, check_spec
from plait.families.config.limits import MAX_LAYERS, MAX_SIZE, find_limit
from plait.families.qwen4_exp import MOST_ROWS, primes_from
from plait.families.resolve import resolve
from plait.loading.meta.shapes_only import ShapesOnly
from plait.model.layers.temperature import MOST_POSITIONS, Temperature, list_positions
from plait.spec.branches import GainSpec
from plait.spec.model import AttentionSpec, BranchSpec, ModelSpec, NormSpec
from plait.spec.positions import RopeSpec, TemperatureSpec
from plait.spec.recurrent import ShortConvSpec
from tests.families.config.test_normalize import LLAMA
from tests.families.parity import Memory

SPEC = build_spec(LLAMA)[0]


@pytest.mark.parametrize(
    ("key", "most"),
    [
        ("num_hidden_layers", 4096),
        ("n_recurrent_loops", 4096),
        ("num_key_value_heads", 1 << 14),
        ("n_head_kv", 1 << 14),
        ("multi_query_group_num", 1 << 14),
        ("mova_num_experts", 1 << 14),
        ("mova_num_experts_per_tok", 1 << 14),
        ("num_nextn_predict_layers", 64),
        ("linear_key_head_dim", 1 << 16),
        ("mamba_d_state", 1 << 16),
        ("ssm_state_size", 1 << 16),
        ("linear_conv_kernel_dim", 1 << 12),
        ("intermediate_size", None),
        ("moe_intermediate_size_by_layer", None),
        ("hidden_size_per_layer_input", None),
        ("rope_theta", None),
        ("eos_token_id", None),
    ],
)
def test_limit_of_a_key_follows_from_the_words_of_its_name(key: str, most: int | None) -> None:
    assert find_limit(key) == most


@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (
            {"num_key_value_heads": 2**40},
            r"num_key_value_heads = 1099511627776; .* 16384 \(--set num_key",
        ),
        (
            {"a_new_num_experts": 2**20},
            r"a_new_num_experts = 1048576; .* from 0 to 16384 \(--set a_new",
        ),
        ({"o_groups": [4, 2**31]}, r"o_groups = 2147483648; expected a whole number from 0 to 16384"),
        ({"attn": {"num_heads": 2**15}}, r"num_heads = 32768; .* \(--set 'attn=\{…\}' corrects it\)"),
        ({"blocks": [{"n_head": 2**15}]}, r"n_head = 32768; .* \(--set 'blocks=\{…\}' corrects it\)"),
        (
            {"n_heads": 2**12, "v_head_dim": 2**12},
            r"n_heads = 4096 and v_head_dim = 4096; .* a product",
        ),
        (
            {"indexer_types": ["full"] * 4097},
            r"4097 values in indexer_types.* at most 4096 \(--set index",
        ),
        ({"index_topk_pattern": "F" * 5000}, r"5000 values in index_topk_pattern, one for each layer"),
    ],
)
def test_counts_that_would_fill_memory_are_refused_by_name(config: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"config\.json (says|has) {wanted}"):
        check_config(config)


def test_usual_counts_are_none_too_many() -> None:
    check_config({"num_attention_heads": 128, "head_dim": 512, "num_experts": 16384, "n_layer": MAX_LAYERS})
    check_config(
        {"mamba_n_heads": 512, "mamba_d_state": 256, "vocab_size": MAX_SIZE, "vision_feature_layer": -2}
    )


def alter(spec: ModelSpec, **changes: Any) -> ModelSpec:
    """The spec with these fields in its first attention."""
    (attn, ffn), *rest = spec.layers
    assert isinstance(attn.mixer, AttentionSpec)
    return replace(spec, layers=((replace(attn, mixer=replace(attn.mixer, **changes)), ffn), *rest))


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"num_kv_heads": -4}, r"num_kv_heads is -4, not a size from 1 to"),
        ({"head_dim": 2**40}, r"head_dim is 1099511627776, not a size from 1 to 4194304"),
        ({"window": 2**41}, r"window is 2199023255552, not a size"),
        ({"gate": [1, 2]}, r"gate is \[1, 2\], not true or false"),
        ({"qk_norm_over": "none"}, r"qk_norm_over is 'none'; known: head, each, all"),
        ({"both_ways": "images"}, r"both_ways is 'images'; known: True, False, prompt"),
        ({"slopes": (0.5, "x", 1.0, 1.0)}, r"slopes is 'x', not a number"),
        ({"scale": 10**20}, r"scale is 100000000000000000000, no float32"),
        ({"qk_norm": NormSpec(-1.0)}, r"qk_norm: eps is -1, and is added to squares"),
        (
            {"temperature": TemperatureSpec(0.1, 0.0)},
            r"temperature: queries grow every 0 tokens",
        ),
        ({"rope": RopeSpec(-2)}, r"positions turn -2 of 16 dimensions"),
        (
            {"rope": RopeSpec(16, scaling={"rope_type": "linear", "factor": -1})},
            r"factor of .* is -1, not",
        ),
    ],
)
def test_field_of_a_spec_out_of_its_bounds_is_refused(changes: dict[str, Any], wanted: str) -> None:
    check_spec(SPEC)
    with pytest.raises(UnsupportedModel, match=rf"layers\.0\.attn: (rope: )?{wanted}"):
        check_spec(alter(SPEC, **changes))


def test_mixers_inside_of_others_are_checked_too() -> None:
    inner = GainSpec({"inner": GainSpec({"inner": ShortConvSpec(2**50)})})
    spec = replace(SPEC, layers=((BranchSpec("conv", inner, None),),))
    with pytest.raises(UnsupportedModel, match=r"layers\.0\.conv\.inner\.inner: kernel is \d+, not a size"):
        check_spec(spec)


def test_table_of_positions_has_a_largest_size() -> None:
    check_spec(replace(SPEC, positions=2048))
    with pytest.raises(UnsupportedModel, match="4194304 positions of 64 numbers each are too many"):
        check_spec(replace(SPEC, positions=MAX_SIZE))


def test_numbers_of_positions_are_made_for_none_that_a_config_alone_names() -> None:
    def weights(device: str, max_len: int) -> Weights:
        return Weights(Memory(), NameMap(), Target(torch.device(device), torch.float32, max_len, 64))

    with ShapesOnly():
        table = Temperature(TemperatureSpec(0.1, 8.0), weights("meta", 1 << 40)).table
    assert table.shape == (1 << 40, 1)
    assert list_positions(weights("cpu", 5)).tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]
    with pytest.raises(UnsupportedModel, match=f"--max-model-len {MOST_POSITIONS} serves shorter sequences"):
        list_positions(weights("cpu", MOST_POSITIONS + 1))


def test_primes_are_those_of_a_sieve() -> None:
    sieve = [n for n in range(2, 1000) if all(n % d for d in range(2, int(n**0.5) + 1))]
    assert [*islice(primes_from(0), len(sieve))] == sieve
    assert next(primes_from(20_000_000)) == 20_000_003
    assert [*islice(primes_from(MOST_ROWS), 3)] == [2147483659, 2147483693, 2147483713]


def test_first_rule_of_names_wins_whether_it_has_fields_or_none() -> None:
    names = NameMap(
        {"layers.0.a": "first", "layers.{i}.a": "some.{i}", "layers.1.a.weight": "never", "norm.weight": "n"},
        {"layers.0.a.bias": "late", "head": ("h", "other"), "norm": "m"},
    )
    found = {
        name: names.resolve(name, {"other.weight"})
        for name in (
            "layers.0.a.weight",
            "layers.0.a.bias",
            "layers.1.a.weight",
            "head.weight",
            "norm.weight",
        )
    }
    assert found == {
        "layers.0.a.weight": ("first.weight", {}),
        "layers.0.a.bias": ("first.bias", {}),
        "layers.1.a.weight": ("some.1.weight", {"i": "1"}),
        "head.weight": ("other.weight", {}),
        "norm.weight": ("n", {}),
    }
    with pytest.raises(UnknownName):
        names.resolve("layers.0.b.weight")


def test_of_many_architectures_the_first_ones_are_looked_at() -> None:
    names = names_in({"architectures": ["Odd"] * 10**5, "model_type": "llama"})
    assert names == ["Odd"] * MOST_NAMES + ["llama", "llama"]
    nested = {"text_config": {"model_type": "qwen3"}, "llm_config": "none"}
    assert names_in(nested) == ["qwen3"]  # a text model is inside of an object


def build(config: dict[str, Any], *overrides: str) -> ModelSpec:
    shapes = {"lm_head.weight": (100, 64)}
    return resolve(config, shapes, read=lambda _: pytest.fail("no number is read"), overrides=overrides).spec


STABLE = {**LLAMA, "architectures": ["StableLmForCausalLM"], "num_key_value_heads": 4}
IQUEST = {**LLAMA, "architectures": ["XllmForCausalLM"], "rope_head_dim": 2**20}


def test_what_a_message_advises_to_set_may_be_set() -> None:
    with pytest.raises(UnsupportedModel, match="--set num_key_value_heads=… corrects it"):
        build({**STABLE, "num_key_value_heads": 2**40})
    assert build({**STABLE, "num_key_value_heads": 2**40}, "num_key_value_heads=4") == build(STABLE)
    with pytest.raises(UnsupportedModel, match="--set rope_head_dim=… corrects it"):
        build(IQUEST)
    assert build(IQUEST, "rope_head_dim=8")  # no family's default, and no alias
    with pytest.raises(ConfigError, match="does not read it; near keys that are read: rope_head_dim"):
        build({**IQUEST, "rope_head_dim": 8}, "rope_haed_dim=8")
    unread = {**LLAMA, "encoder_layers": 2**40}  # which is refused, although no decoder reads it
    with pytest.raises(UnsupportedModel, match="--set encoder_layers=… corrects it"):
        build(unread)
    assert build(unread, "encoder_layers=2") == build(LLAMA)
    with pytest.raises(ConfigError, match=r"--set encoder_layers=…: this model, .* does not read it"):
        build({**LLAMA, "encoder_layers": 2}, "encoder_layers=3")


def test_a_key_that_a_family_cannot_do_without_may_be_set() -> None:
    config = {**LLAMA, "architectures": ["InklingForCausalLM"], "model_type": "inkling_text"}
    said = r"does not say '(?P<key>\w+)'.*--set (?P=key)=VALUE"
    with pytest.raises(UnsupportedModel, match=said) as refused:
        build(config)
    key = str(refused.value).split("'")[1]
    with pytest.raises(UnsupportedModel) as later:
        build(config, f"{key}=4")
    assert repr(key) not in str(later.value)


def test_tokens_that_see_both_ways_name_the_key_that_says_so() -> None:
    experts = {"num_local_experts": 2, "num_experts_per_tok": 1, "is_causal": False}
    config = {**LLAMA, **experts, "architectures": ["MixtralForCausalLM"]}
    with pytest.raises(UnsupportedModel, match="--set is_causal=true"):
        build(config)
    spec = build(config, "is_causal=true")
    assert spec.causal
    with pytest.raises(UnsupportedModel, match="--set use_bidirectional_attention=false"):
        see_both_ways(spec, "use_bidirectional_attention=false")
