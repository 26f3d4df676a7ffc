"""Jet-Nemotron, which transformers has not, against a plain implementation."""

from __future__ import annotations

import torch

from tests.families.jet_oracle import CONFIG, checkpoint, logits
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


def test_logits_are_those_of_the_description() -> None:
    tensors = checkpoint(CONFIG)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, CONFIG)
    assert [layer[0].name for layer in found.spec.layers] == ["jet", "attn", "jet", "attn"]
    model = decoder(found, memory)
    wanted = [logits(CONFIG, tensors, ids) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4
