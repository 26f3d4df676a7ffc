"""Short convolutions to which the input is added: in bfloat16 a small newest tap is not lost in that 1."""

from __future__ import annotations

import pytest
import torch

from plait.checkpoint.names import NameMap
from plait.checkpoint.weights import Target, Weights
from plait.model.mixers.convolved import Convolved
from plait.model.mixers.relative import JoinedInputs, RelativeAttention
from plait.spec.attention import RelativeSpec
from plait.spec.branches import ConvolvedSpec
from plait.spec.model import MlpSpec
from tests.families.parity import Memory

HIDDEN = 8


@pytest.mark.parametrize("is_bfloat16", [True, False])
def test_small_taps_survive_the_1_that_was_added(is_bfloat16: bool) -> None:
    attention = RelativeSpec(2, 1, 4, 0.25, rank=2, extent=4, taps=2)
    shapes = {
        **{f"mlp.inner.{name}.weight": (HIDDEN, HIDDEN) for name in ("gate", "up", "down")},
        "attn.q.weight": (8, 8),
        "attn.k.weight": (4, 8),
        "attn.v.weight": (4, 8),
        "attn.mix.weight": (4, 8),
        "attn.o.weight": (8, 8),
        "attn.profiles": (4, 2),
    }
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items()}
    for name, channels in (("mlp", HIDDEN), ("attn", 8)):
        tensors[f"{name}.conv.weight"] = torch.tensor([[0.5, 1.001]]).repeat(channels, 1)
    dtype = torch.bfloat16 if is_bfloat16 else torch.float32
    weights = Weights(
        Memory(tensors),
        NameMap({name: name for name in tensors}),
        Target(torch.device("cpu"), dtype, 16, HIDDEN),
    )
    mlp = Convolved(ConvolvedSpec({"inner": MlpSpec(HIDDEN)}, taps=2), weights.scope("mlp"))
    inputs = RelativeAttention(attention, weights.scope("attn")).inputs
    assert isinstance(inputs, JoinedInputs)
    for conv in (mlp.conv, inputs.conv):
        assert torch.equal(conv.weight, tensors["mlp.conv.weight"])
