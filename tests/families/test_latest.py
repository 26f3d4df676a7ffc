"""Families of 2025 and 2026 that transformers lacks: the logits of a plain description of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from tests.families.latest_oracles import HORIZON, LATEST
from tests.families.older_oracles import IDS
from tests.families.parity import Memory, check_description, decoder, resolved, whole

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in LATEST},
    "k2 horizon, half turned": (
        "k2_horizon",
        {"rope_head_dim": 4, "query_key_norm": True, "attention_bias": True, "router_score_func": "softmax"},
    ),
    "k2 horizon, one value": ("k2_horizon", {"mova_num_experts_per_tok": 1, "attention_gate_func": "silu"}),
    "k2 horizon without values": (
        "k2_horizon",
        {"mova_num_experts": 0, "attention_gate_func": None, "layernorm_num_groups": 1, "rope_head_dim": 6},
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_logits_are_those_of_the_description(name: str) -> None:
    which, changes = CHANGES[name]
    family = LATEST[which]
    config = {**family.config, **changes}
    tensors = family.checkpoint(config)
    check_description(config, tensors, [family.logits(config, tensors, ids) for ids in IDS], IDS)


def test_xllm_has_other_words_and_norms_around_zero() -> None:
    family, ids = LATEST["k2_horizon"], IDS[0]
    tensors = {name: w.float() for name, w in family.checkpoint().items()}
    checkpoint = Memory(tensors)
    want = whole(decoder(resolved(checkpoint, HORIZON), checkpoint), ids)
    words = {"mova_num_experts": "num_values", "mova_num_experts_per_tok": "num_values_per_tok"}
    words |= {"attention_gate_func": "attn_gate_func"}
    config = {words.get(key, key): value for key, value in HORIZON.items()}
    config |= {"architectures": ["XllmForCausalLM"], "model_type": "xllm", "apply_attn_gate": True}
    config |= {"num_dense_layers": 1}
    around = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight")
    stored = {name: w - 1 if name.endswith(around) else w for name, w in tensors.items()}
    for i in (1, 2):  # in one tensor
        at = f"model.layers.{i}.self_attn.v_experts"
        stored[f"{at}.weight"] = torch.stack([stored.pop(f"{at}.{e}.weight") for e in range(5)])
    checkpoint = Memory(stored)
    torch.testing.assert_close(whole(decoder(resolved(checkpoint, config), checkpoint), ids), want)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"layernorm_num_groups": 5}, "layernorm_num_groups is 5"),
        ({"rope_head_dim": 10}, "rope_head_dim is 10 of head_dim 8"),
        ({"rope_head_dim": 3}, "rope_head_dim is 3"),
        ({"mova_num_experts_per_tok": 6}, "mova_num_experts_per_tok is 6, of 5"),
        ({"mova_num_experts_per_tok": None}, "mova_num_experts_per_tok is 0, of 5"),
        ({"attention_gate_func": "relu"}, "attention_gate_func 'relu' is not known"),
        ({"router_score_func": "tanh"}, "router_score_func = 'tanh' is not implemented"),
        ({"norm_topk_prob": False}, "norm_topk_prob = False is not implemented"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"dual_chunk_attention_config": {"chunk_size": 8}}, "dual_chunk_attention_config"),
    ],
)
def test_what_k2_horizon_does_not_have_is_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UnsupportedModel, match=wanted):
        build_spec({**HORIZON, **changes})
