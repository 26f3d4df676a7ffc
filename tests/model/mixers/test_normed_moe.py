"""Experts with a norm each, and norms that scale first: what they give, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from plait.checkpoint.names import NameMap
from plait.checkpoint.weights import Target, Weights
from plait.errors import UnsupportedModel
from plait.model.layers.layers import Norm
from plait.model.mixers.normed_moe import NormedMoe
from plait.spec.model import MlpSpec, NormSpec
from plait.spec.moe import NormedMoeSpec
from tests.families.parity import Memory

SPEC = NormedMoeSpec(4, 2, MlpSpec(6), latent=5)


def empty() -> Weights:
    return Weights(Memory({}), NameMap({}), Target(torch.device("cpu"), torch.float32, 16, 8))


@pytest.mark.parametrize(
    "spec",
    [
        replace(SPEC, latent=None),
        replace(SPEC, shared=MlpSpec(6)),
        replace(SPEC, identities=2),
        replace(SPEC, expert=MlpSpec(6, gated=False)),
        replace(SPEC, expert=MlpSpec(6, "swiglu_7")),
    ],
)
def test_what_is_not_implemented_is_refused(spec: NormedMoeSpec) -> None:
    with pytest.raises(UnsupportedModel, match="normed experts"):
        NormedMoe(spec, empty())


def test_a_scaled_norm_weighs_what_it_norms() -> None:
    weights = Weights(
        Memory({"weight": torch.tensor([2.0, 0.5, 1.0])}),
        NameMap({"weight": "weight"}),
        Target(torch.device("cpu"), torch.float32, 16, 8),
    )
    norm, x = Norm(NormSpec(0.1, "scaled"), weights, 3), torch.tensor([[1.0, -4.0, 3.0]])
    scaled = torch.tensor([[2.0, -2.0, 3.0]])
    want = scaled / (scaled.square().mean() + 0.1).sqrt()
    assert torch.allclose(norm(x), want)
    total, normed = norm.add(x - 1, torch.ones_like(x))
    assert torch.equal(total, x)
    assert torch.allclose(normed, want)
    with pytest.raises(UnsupportedModel, match="scales before it norms"):
        _ = norm.weights
