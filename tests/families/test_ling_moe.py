"""Ling 1 and 2 and DeepSeek-MoE under their own names: the logits of the same arithmetic."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from plait.errors import UnsupportedModel
from plait.spec import MoeSpec
from tests.families import tiny
from tests.families.gguf.published import as_published
from tests.families.gguf.recorded import variant
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

FAMILIES = {"bailing_v1": "bailing_moe", "bailing_v2": "bailing_moe_v2", "deepseek_v1": "deepseek"}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "bailing_v2" else [pytest.mark.slow]) for name in FAMILIES],
)
def test_published_names_give_the_logits_of_the_same_arithmetic(name: str, tmp_path: Path) -> None:
    tiny.write(name, tmp_path, variant(name))
    config, tensors, oracle = tiny.read(tmp_path)
    config, tensors = as_published(name, config, tensors)
    checkpoint = Memory(tensors)
    found = resolved(checkpoint, json.loads(json.dumps(config)))
    assert found.spec.family == FAMILIES[name]
    model = decoder(found, checkpoint)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    for logits, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(logits, want) <= 1e-4
    assert next(found.spec.mixers_of(MoeSpec)).router.renormalize is (name == "bailing_v1")


def test_a_head_that_is_normalised_is_refused_by_name() -> None:
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2, "vocab_size": 97}
    sizes |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "intermediate_size": 16}
    with pytest.raises(UnsupportedModel, match="norm_head = True is not implemented for Ling"):
        resolved(Memory(), {"architectures": ["BailingMoeForCausalLM"], **sizes, "norm_head": True})
