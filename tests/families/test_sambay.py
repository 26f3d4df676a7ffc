"""SambaY, which transformers has not, against a plain implementation."""

from __future__ import annotations

import pytest
import torch

from plait.errors import UnsupportedModel
from plait.families.common.registry import build_spec
from tests.families.parity import Memory, decoder, in_pieces, resolved, whole, worst
from tests.families.sambay_oracle import CONFIG, checkpoint, logits

IDS = [torch.randint(0, 97, (n,), generator=torch.Generator().manual_seed(7)) for n in (23, 17)]


def test_logits_are_those_of_the_description() -> None:
    tensors = checkpoint(CONFIG)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, CONFIG)
    assert [layer[0].mixer.window for layer in found.spec.layers[1::2]] == [6, 6, None, None]
    model = decoder(found, memory)
    wanted = [logits(CONFIG, tensors, ids) for ids in IDS]
    assert worst(whole(model, IDS[0]).double(), wanted[0]) <= 1e-4
    for got, want in zip(in_pieces(model, IDS), wanted, strict=True):
        assert worst(got.double(), want) <= 1e-4


def test_names_alone_show_it() -> None:
    config = {**CONFIG, "sliding_window": 512}
    tensors = checkpoint(config)
    memory = Memory({name: t.float() for name, t in tensors.items()})
    found = resolved(memory, None)
    assert found.spec.family == "phi4flash"
    got = whole(decoder(found, memory), IDS[0])
    assert worst(got.double(), logits(config, tensors, IDS[0])) <= 1e-4


@pytest.mark.parametrize("wrong", [{"num_key_value_heads": 1}, {"num_hidden_layers": 6}, {"mb_per_layer": 4}])
def test_another_order_of_layers_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UnsupportedModel, match=r"SambaY"):
        build_spec({**CONFIG, **wrong})
