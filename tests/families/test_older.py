"""Families that transformers lacks, from their own files: the logits of a plain description of each."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.families.config.normalize import CHUNKED, FULL, SLIDING
from tests.families.newer_oracles import DESCRIBED
from tests.families.older_oracles import IDS, NANBEIGE, OPENELM
from tests.families.parity import check_description
from tests.families.small_oracles import IQUEST_Q1, RNJ1

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
