"""MiniCPM-SALA, which transformers has not, against a plain implementation of its published description."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from plait.spec.model import AttentionSpec
from plait.spec.recurrent import LightningSpec
from tests.families.minicpm_sala_oracle import CONFIG, SLOPES, checkpoint, logits
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


def test_logits_of_minicpm_sala_are_those_of_its_description() -> None:
    tensors = checkpoint(CONFIG)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, CONFIG)
    model, wanted = decoder(found, memory), [logits(CONFIG, tensors, ids) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4


def test_names_alone_show_it_with_the_numbers_of_the_published_model() -> None:
    published = {**CONFIG, "dim_model_base": 256, "num_attention_heads": 2, "head_dim": 12}
    published |= {"num_key_value_heads": 1, "num_hidden_layers": 4, "lightning_nh": 3}
    tensors = checkpoint(published)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, None, ["num_attention_heads=2"])
    assert (found.spec.family, found.spec.max_len) == ("minicpm_sala", 8191)
    assert worst(whole(decoder(found, memory), IDS[0]).double(), logits(published, tensors, IDS[0])) <= 1e-4


def test_texts_are_shorter_than_what_would_be_read_in_blocks() -> None:
    spec, _ = build_spec(CONFIG)
    assert spec.max_len == 127
    assert build_spec({**CONFIG, "sparse_config": None})[0].max_len == 256
    kinds = [layer[0].mixer for layer in spec.layers]
    assert [type(m) for m in kinds] == [AttentionSpec, LightningSpec, LightningSpec, AttentionSpec]
    assert isinstance(kinds[1], LightningSpec)
    assert kinds[1].slopes == SLOPES


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"mixer_types": ["minicpm4"] * 3, "mup_denominator": None}, "one for each"),
        ({"mixer_types": ["minicpm4", "lightning", "mamba", "minicpm4"]}, "'mamba'.* are not known"),
        ({"mup_denominator": 32}, "mup_denominator = 32"),
        ({"lightning_nkv": 1}, "lightning_nkv = 1 of 3 heads"),
        ({"use_output_norm": False}, "use_output_norm = False"),
        ({"lightning_scale": "2/d"}, "lightning_scale = '2/d'"),
    ],
)
def test_what_a_config_cannot_mean_is_refused_by_name(change: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        build_spec({**CONFIG, **change})
