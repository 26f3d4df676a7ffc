"""Ling 2.5, which transformers has not, against a plain implementation."""

from __future__ import annotations

import torch

from plait.spec.model import MlaSpec
from plait.spec.recurrent import LightningSpec
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
