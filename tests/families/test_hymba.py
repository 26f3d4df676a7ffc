"""Hymba, which transformers has not, against a plain implementation."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from tests.families.hymba_oracle import CONFIG, checkpoint, logits
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


@pytest.mark.parametrize(
    "change", [{}, {"num_memory_tokens": 0}, {"rope_type": "default", "kv_reuse_group": [[1, 2]]}]
)
def test_logits_are_those_of_the_description(change: dict[str, Any]) -> None:
    config = {**CONFIG, **change}
    tensors = checkpoint(config)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, config)
    assert [layer[0].mixer.attention.window for layer in found.spec.layers] == [None, 7, 7, 7, None]
    model = decoder(found, memory)
    wanted = [logits(config, tensors, ids) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4


def test_names_alone_show_it() -> None:
    config = {**CONFIG, "hidden_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    config |= {"sliding_window": 1024, "global_attn_idx": [0, 1, 4], "rope_theta": 10_000.0}
    config |= {"kv_reuse_group": [[2, 3]], "max_position_embeddings": 8192, "rms_norm_eps": 1e-6}
    config |= {"orig_max_position_embeddings": 2048}
    tensors = checkpoint(config)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, None)
    assert (found.spec.family, found.spec.front) == ("hymba", 9)
    got = whole(decoder(found, memory), IDS[0])
    assert worst(got.double(), logits(config, tensors, IDS[0])) <= 1e-3


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"kv_reuse_group": [[0, 1]]}, "only one of them has a window"),
        ({"kv_reuse_group": [[1, 2], [2, 3]]}, "keys of layer 2, which has none"),
        ({"kv_reuse_group": [[3, 2]]}, "layer 2 read keys of layer 3"),
        ({"rope_type": "dynamic_ntk"}, "rope_type = 'dynamic_ntk'"),
        ({"memory_tokens_interspersed_every": 64}, "memory_tokens_interspersed_every = 64"),
        ({"num_memory_tokens": -1}, "num_memory_tokens is -1"),
    ],
)
def test_what_no_published_model_has_is_refused(wrong: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**CONFIG, **wrong})
