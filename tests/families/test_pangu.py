"""openPangu Ultra MoE from its own files: the logits of a plain description, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec, find
from tests.families.older_oracles import IDS
from tests.families.pangu_oracle import CONFIG, PANGU
from tests.families.parity import check_description

RENAMED = {
    "attention_q_lora_dim": "q_lora_rank", "attention_kv_lora_dim": "kv_lora_rank",
    "attention_qk_dim": "qk_nope_head_dim", "attention_qk_rope_dim": "qk_rope_head_dim",
    "attention_v_dim": "v_head_dim", "num_routed_experts": "n_routed_experts",
    "num_shared_experts": "n_shared_experts", "num_dense_layers": "first_k_dense_replace",
    "num_mtp_layers": "num_nextn_predict_layers",
}  # fmt: skip


@pytest.mark.parametrize(
    "changes", [{}, {"sandwich_norm": False}, {"router_enable_expert_bias": True}, {"norm_topk_prob": False}]
)
@pytest.mark.parametrize("words", ["own", "deepseek"])
def test_logits_are_those_of_the_description(words: str, changes: dict[str, Any]) -> None:
    described = {**CONFIG, **changes}
    tensors = PANGU.checkpoint(described)
    config = described if words == "own" else {RENAMED.get(k, k): v for k, v in described.items()}
    wanted = [PANGU.logits(described, tensors, ids) for ids in IDS]
    draft = {"model.layers.3.eh_proj.weight": torch.zeros(3)}  # of a layer that drafts
    check_description(config, {**tensors, **draft}, wanted, IDS)


@pytest.mark.parametrize(
    ("key", "value"),
    [("param_sink_number", 128), ("use_mhc", True), ("use_mome", True), ("swa_layers", [1]), ("n_group", 8)],
)
def test_later_forms_are_refused(key: str, value: object) -> None:
    with pytest.raises(UnsupportedModel, match=f"{key} = .* is not implemented for openPangu Ultra MoE"):
        build_spec({**CONFIG, key: value})


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"architectures": ["PanguProMoEV2ForCausalLM"]}, "learned keys and values next to those of a text"),
        (
            {"architectures": ["CpmAntForCausalLM"], "model_type": "cpmant"},
            "adds a bias for each distance",
        ),
    ],
)
def test_models_that_no_family_builds_are_refused_by_name(names: dict[str, Any], words: str) -> None:
    with pytest.raises(UnsupportedModel, match=words):
        find(names)
