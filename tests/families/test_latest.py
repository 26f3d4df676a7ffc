"""Families of 2025 and 2026 that transformers lacks: the logits of a plain description of each."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.spec.model import MoeSpec
from tests.families import longcat_oracle
from tests.families.latest_oracles import HORIZON, LATEST, STEP1, STEP3
from tests.families.longcat_oracle import CONFIG as LONGCAT
from tests.families.older_oracles import IDS
from tests.families.parity import Memory, check_description, decoder, resolved, whole

CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    **{name: (name, {}) for name in LATEST},
    "k2 horizon, half turned": (
        "k2_horizon",
        {"rope_head_dim": 4, "query_key_norm": True, "attention_bias": True, "router_score_func": "softmax"},
    ),
    "k2 horizon, one value": ("k2_horizon", {"mova_num_experts_per_tok": 1, "attention_gate_func": "silu"}),
    "step 1, other slopes": ("step1", {"num_attention_heads": 12, "num_attention_groups": 4}),
    "step 3, weights as they are": ("step3", {"norm_expert_weight": False, "moe_layers_enum": "0,2"}),
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
        ({"num_values": 7}, "mova_num_experts is 5, and num_values 7"),
        ({"attention_gate_func": "silu", "apply_attn_gate": False}, "'silu', and apply_attn_gate is false"),
    ],
)
def test_what_k2_horizon_does_not_have_is_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UnsupportedModel, match=wanted):
        build_spec({**HORIZON, **changes})


NONE: dict[str, Any] = dict.fromkeys(("ngram_vocab_size_ratio", "emb_neighbor_num", "emb_split_num"))
ENDS = (0, 6, 7, 11)  # places of the token that ends a text
ENDING = [torch.tensor([5 if n in ENDS else i for n, i in enumerate(ids.tolist())]) for ids in IDS]


@pytest.mark.parametrize(
    "changes", [{}, {"emb_neighbor_num": 2, "emb_split_num": 3}, {"emb_neighbor_num": 5, "emb_split_num": 1}]
)
def test_longcat_flash_lite_is_longcat_flash_over_other_embeddings(changes: dict[str, Any]) -> None:
    config = {**LONGCAT, **changes}
    tensors = longcat_oracle.checkpoint(config)
    wanted = [longcat_oracle.logits(config, tensors, ids) for ids in ENDING]
    check_description(config, tensors, wanted, ENDING)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"emb_neighbor_num": None}, "comes with emb_neighbor_num None"),
        ({"emb_neighbor_num": 1}, "2 tables of 145.5 rows for each of n-grams up to 1 tokens"),
        ({"emb_neighbor_num": 1000}, "known are up to 16 tokens"),
        ({"emb_split_num": 0}, "0 tables of 145.5 rows"),
        ({"emb_split_num": 10**9}, "256 tables in all"),
        ({"ngram_vocab_size_ratio": -1}, "2 tables of -97 rows"),
        ({"ngram_vocab_size_ratio": 1e300}, "and 2147483648 rows"),
        ({"ngram_vocab_size_ratio": "many"}, "ngram_vocab_size_ratio 'many'"),
        ({"eos_token_id": 97}, "eos_token_id is 97"),
        ({"eos_token_id": []}, "eos_token_id is"),
        ({"mla_scale_q_lora": False}, "mla_scale_q_lora = False is not implemented"),
        ({"emb_neighbor_num": 2, "emb_split_num": 99}, "hidden_size 36 is less than 99 tables"),
        ({"ngram_exclude_sp_token": True}, "ngram_exclude_sp_token is True"),
        ({"moe_group_size": 4}, "moe_group_size is 4, which is not implemented"),
    ],
)
def test_n_grams_that_cannot_be_are_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UnsupportedModel, match=wanted):
        build_spec({**LONGCAT, **changes})


def test_the_first_configs_of_longcat_flash_lite_have_other_words() -> None:
    words = {"ngram_vocab_size_ratio": "oe_vocab_size_ratio", "emb_neighbor_num": "oe_neighbor_num"}
    words |= {"emb_split_num": "oe_split_num"}
    first = {words.get(key, key): value for key, value in LONGCAT.items()}
    assert build_spec(first)[0] == build_spec(LONGCAT)[0] != build_spec({**LONGCAT, **NONE})[0]


def test_a_table_of_tokens_may_be_among_those_of_n_grams() -> None:
    tensors = {name: w.float() for name, w in longcat_oracle.checkpoint(LONGCAT).items()}
    checkpoint = Memory(tensors)
    want = whole(decoder(resolved(checkpoint, LONGCAT), checkpoint), ENDING[0])
    tensors["model.ngram_embeddings.word_embeddings.weight"] = tensors.pop("model.embed_tokens.weight")
    checkpoint = Memory(tensors)
    assert torch.equal(whole(decoder(resolved(checkpoint, LONGCAT), checkpoint), ENDING[0]), want)


def test_step_3_with_eyes_is_read_as_text() -> None:
    family, config = LATEST["step3"], {key: value for key, value in STEP3.items() if key != "architectures"}
    tensors = {name: w.float() for name, w in family.checkpoint().items()}
    checkpoint = Memory(tensors)
    want = whole(decoder(resolved(checkpoint, STEP3), checkpoint), IDS[0])
    outer = {"architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl"}
    outer |= {"text_config": config, "vision_config": {"hidden_size": 8}}
    eyes = ("vision_model.conv1", "vit_downsampler", "vit_downsampler2", "vit_large_projector")
    checkpoint = Memory({**tensors, **{f"{name}.weight": torch.ones(2, 2) for name in eyes}})
    assert torch.equal(whole(decoder(resolved(checkpoint, outer), checkpoint), IDS[0]), want)


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"num_attention_groups": 2}, "num_key_value_heads = 2 is not implemented for Step 3"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not implemented"),
        ({"sliding_window": 8}, "sliding_window"),
        ({"norm_expert_weight": "yes"}, "norm_expert_weight = 'yes'"),
    ],
)
def test_what_step_3_does_not_have_is_refused(changes: dict[str, Any], wanted: str) -> None:
    with pytest.raises(UnsupportedModel, match=wanted):
        build_spec({**STEP3, **changes})


def test_step_3_without_a_list_of_experts_has_one_dense_layer() -> None:
    spec, count = build_spec({**STEP3, "moe_layers_enum": None})[0], STEP3["num_hidden_layers"]
    assert [isinstance(layer[1].mixer, MoeSpec) for layer in spec.layers] == [False, *[True] * (count - 1)]


@pytest.mark.parametrize("changes", [{"hidden_act": "gelu"}, {"sliding_window": 8}, {"head_dim": 10}])
def test_what_step_1_does_not_have_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModel, match=next(iter(changes))):
        build_spec({**STEP1, **changes})
