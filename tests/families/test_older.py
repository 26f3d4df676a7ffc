"""Families that transformers lacks, from their own files: the logits of a plain description of each."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.families.config.normalize import CHUNKED, FULL, SLIDING
from plait.spec.model import AttentionSpec, MoeSpec
from tests.families.newer_oracles import DESCRIBED
from tests.families.older_oracles import IDS, NANBEIGE, OPENELM
from tests.families.parity import check_description
from tests.families.small_oracles import DOMYN_EDGE, IQUEST_Q1, RNJ1

BLOOM = {
    "architectures": ["BloomForCausalLM"],
    "model_type": "bloom",
    "hidden_size": 32,
    "n_head": 4,
    "n_layer": 1,
    "vocab_size": 97,
}
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in DESCRIBED},
    "nanbeige without a norm between": ("nanbeige", {"skip_loop_final_norm": True}),
    "nanbeige in one round": ("nanbeige", {"num_loops": 1}),
    "grok 1": ("grok", {"residual_moe": False}),
    "smallthinker by a softmax": ("smallthinker", {"moe_primary_router_apply_softmax": True}),
    "iquest q1 without learned keys": ("iquest_q1", {"enable_sink_attention": False}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_logits_are_those_of_the_description(name: str) -> None:
    which, changes = CHANGES[name]
    family = DESCRIBED[which]
    config = {**family.config, **changes}
    tensors = family.checkpoint(config)
    check_description(config, tensors, [family.logits(config, tensors, ids) for ids in IDS], IDS)


def test_the_local_base_of_rnj_1_is_that_of_layers_with_chunks() -> None:
    apart = RNJ1["rope_parameters"]
    old = {**RNJ1, "rope_parameters": None, "rope_theta": 1e6, "rope_local_base_freq": 1e4}
    mixed = {CHUNKED: {"rope_type": "default"}, FULL: apart[FULL]}
    assert build_spec(old)[0] == build_spec(RNJ1)[0]
    assert (
        build_spec({**RNJ1, "rope_parameters": mixed, "rope_local_base_freq": 1e4})[0] == build_spec(RNJ1)[0]
    )
    unnamed = {SLIDING: apart[CHUNKED], FULL: apart[FULL]}
    with pytest.raises(
        UnsupportedModel, match=f"rope_parameters have sets for layers, and none for {CHUNKED}"
    ):
        build_spec({**RNJ1, "rope_parameters": unnamed})


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (IQUEST_Q1, "sinks"),
        (RNJ1, "chunks"),
        (BLOOM, "slopes of heads"),
    ],
    ids=["iquest_q1", "rnj1", "bloom"],
)
def test_what_has_an_order_is_not_read_both_ways(config: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=f"later ones, which AttentionSpec with {words} cannot"):
        build_spec({**config, "is_causal": False})


@pytest.mark.parametrize("loops", [0, -1, 5000, "many"])
def test_rounds_without_end_are_refused(loops: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"num_loops is .* of 3 layers; known is a whole number"):
        build_spec({**NANBEIGE, "num_loops": loops})


@pytest.mark.parametrize("key", ["num_query_heads", "num_kv_heads"])
def test_a_list_of_another_length_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{key} is \[2, 2\]; expected is a list of 3 numbers"):
        build_spec({**OPENELM, key: [2, 2]})


def test_null_lists_of_iquest_q1_are_its_usual_ones() -> None:
    c: dict[str, Any] = {**IQUEST_Q1, "num_hidden_layers": 8, "no_rope_layers": None}
    lists = ("first_layers_types", "hybrid_layers_types_block", "last_layers_types", "mlp_only_layers")
    usual = {key: value for key, value in c.items() if key not in lists}
    spec, _ = build_spec({**usual, **dict.fromkeys(lists)})
    assert spec == build_spec(usual)[0]
    assert [m.window for m in spec.mixers_of(AttentionSpec)] == [None, None, 6, 6, 6, None, None, None]
    assert len([*spec.mixers_of(MoeSpec)]) == 7


def test_layers_of_iquest_q1_may_be_listed_as_without_windows() -> None:
    c = {**IQUEST_Q1, "use_sliding_window": False}
    spec, _ = build_spec({**c, "layer_types": ["full_attention"] * 5})
    assert spec == build_spec(c)[0]
    with pytest.raises(UnsupportedModel, match="as in layer_types"):
        build_spec({**IQUEST_Q1, "layer_types": ["full_attention"] * 5})


@pytest.mark.parametrize(
    "given",
    [5, "x", [], [{}], [{}, {}, {}, {}], {"3": {}}, {"a": {}}, {0: {}}, [{}, {}, 3], [{"head_dim": "x"}] * 3],
    ids=str,
)
def test_sizes_by_layer_of_domyn_edge_are_for_its_layers(given: object) -> None:
    with pytest.raises(UnsupportedModel, match="per_layer_config"):
        build_spec({**DOMYN_EDGE, "per_layer_config": given})


@pytest.mark.parametrize("given", [None, {}, {"1": {}}])
def test_layers_of_domyn_edge_without_a_size_have_the_usual_one(given: object) -> None:
    spec, _ = build_spec({**DOMYN_EDGE, "per_layer_config": given})
    assert {m.head_dim for m in spec.mixers_of(AttentionSpec)} == {DOMYN_EDGE["head_dim"]}
