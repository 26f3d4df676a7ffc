"""Ling 2.5, which transformers has not, against a plain implementation; Ling 3 as it is published."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.spec.model import MlaSpec
from plait.spec.recurrent import LightningSpec
from tests.families import tiny
from tests.families.ling_oracle import CONFIG, checkpoint, logits
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


def test_logits_of_ling_2_5_are_those_of_its_description() -> None:
    tensors = checkpoint(CONFIG)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, CONFIG)
    assert [type(layer[0].mixer) for layer in found.spec.layers] == [
        *(LightningSpec, LightningSpec, MlaSpec, LightningSpec)
    ]
    model, wanted = decoder(found, memory), [logits(CONFIG, tensors, ids) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4


# What published configs of Ling 3 have and transformers does not write.
PUBLISHED: dict[str, Any] = {
    "architectures": ["BailingMoeV3ForCausalLM"], "expert_swiglu_limit_list": None,
    "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1, "linear_silu": True,
    "moe_router_enable_expert_bias": True, "moe_shared_expert_intermediate_size": 24, "n_group": 4,
    "no_kda_lora": True, "norm_topk_prob": True, "num_experts_per_tok": 2, "num_kv_heads_for_linear_attn": 0,
    "num_nextn_predict_layers": 0, "partial_rotary_factor": 0.5, "pregate_enabled": True,
    "pregate_inference": False, "rope_interleave": True, "rotary_dim": 4, "score_function": "sigmoid",
    "scoring_func": "sigmoid", "share_expert_swiglu_limit_list": None, "topk_method": "noaux_tc",
    "use_bias": False, "use_kda_lora": False, "use_mla_nope": False, "use_nGPT": False, "use_qk_norm": True,
    "use_qkv_bias": False, "value_norm": False, "up_proj_norm": False, "scale_router_input": False,
    "head_dim": 10, "max_position_embeddings": 128,
}  # fmt: skip
NOT_THERE = ("layer_types", "mlp_layer_types", "linear_head_dim", "moe_renormalize", "model_max_length")


def published(folder: Path) -> tuple[dict[str, Any], Any, Any]:
    tiny.write("ling3", folder)
    config, tensors, oracle = tiny.read(folder)
    kept = {key: value for key, value in config.items() if key not in NOT_THERE}
    return {**kept, **PUBLISHED}, tensors, oracle


@pytest.mark.parametrize("kind", ["bailing_hybrid", "bailing_moe_v3"])
def test_ling_3_as_it_is_published_gives_the_logits_of_transformers(kind: str, tmp_path: Path) -> None:
    config, tensors, oracle = published(tmp_path)
    memory = Memory(tensors)
    model = decoder(resolved(memory, {**config, "model_type": kind}), memory)
    assert worst(whole(model, oracle["ids"][0]), oracle["logits"][0]) <= 1e-4
    for found, want in zip(in_pieces(model, oracle["ids"]), oracle["logits"], strict=True):
        assert worst(found, want) <= 1e-4


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gated_attention_proj_granularity_type": "element_wise"}, "'element_wise' is not implemented"),
        ({"use_mla_nope": True}, "use_mla_nope = True is not implemented for Ling 3"),
        ({"pregate_inference": True}, "pregate_inference = True is not implemented for Ling 3"),
        ({"expert_swiglu_limit_list": [0, 7.0, 0]}, "expert_swiglu_limit_list has limits"),
        ({"num_hidden_layers": 4}, "4 layers are no whole groups of 3: in the last 1"),
    ],
)
def test_ling_3_refuses_keys_with_an_effect(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    config, _, _ = published(tmp_path)
    with pytest.raises(UnsupportedModel, match=words):
        build_spec({**config, **changes})
