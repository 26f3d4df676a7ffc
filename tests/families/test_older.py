"""Families that transformers lacks, from their own files: the logits of a plain description of each."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from tests.families.newer_oracles import DESCRIBED
from tests.families.older_oracles import IDS, NANBEIGE, OPENELM
from tests.families.parity import check_description

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


@pytest.mark.parametrize("loops", [0, -1, 5000, "many"])
def test_rounds_without_end_are_refused(loops: object) -> None:
    with pytest.raises(UnsupportedModel, match=r"num_loops is .* of 3 layers; known is a whole number"):
        build_spec({**NANBEIGE, "num_loops": loops})


@pytest.mark.parametrize("key", ["num_query_heads", "num_kv_heads"])
def test_a_list_of_another_length_is_refused(key: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{key} is \[2, 2\]; expected is a list of 3 numbers"):
        build_spec({**OPENELM, key: [2, 2]})
