"""Made-up checkpoints: the same for the same seed, sensible for every kind of tensor."""

from __future__ import annotations

import hashlib

import pytest
import torch

from plait.checkpoint.synthetic import Synthetic
from plait.errors import MissingTensor

SHAPES = {
    "layers.0.attn.q.weight": (32, 256),
    "layers.0.norm.weight": (256,),
    "layers.0.attn.q.bias": (32,),
    "layers.0.ssm.A_log": (64,),
    "layers.0.ssm.A": (64,),
    "layers.0.ssm.dt_bias": (64,),
    "layers.0.ssm.D": (64,),
    "blk.0.ssm_dt.bias": (64,),
    "layers.0.attn_hc.scale": (3,),
}


def test_the_same_seed_gives_the_same_numbers_in_any_order() -> None:
    one, two = Synthetic(SHAPES, 7), Synthetic(dict(reversed(SHAPES.items())), 7)
    for name in SHAPES:
        assert torch.equal(one.read(name), two.read(name))
        assert torch.equal(one.read(name), one.read(name))


def test_every_processor_has_the_same_numbers() -> None:
    """Recorded on x86-64 and on arm64: a certificate of one may be held against the other's."""
    read = Synthetic(SHAPES, 7).read
    found = hashlib.sha256(b"".join(read(name).numpy().tobytes() for name in sorted(SHAPES)))
    assert found.hexdigest()[:16] == "6ae406affb35297a"


def test_another_seed_or_name_gives_other_numbers() -> None:
    shapes = {"a.weight": (8, 8), "b.weight": (8, 8)}
    one = Synthetic(shapes, 0)
    assert not torch.equal(one.read("a.weight"), one.read("b.weight"))
    assert not torch.equal(one.read("a.weight"), Synthetic(shapes, 1).read("a.weight"))


def test_it_answers_as_a_checkpoint() -> None:
    checkpoint = Synthetic(SHAPES, dtype=torch.bfloat16)
    assert list(checkpoint.names()) == list(SHAPES)
    assert "layers.0.ssm.D" in checkpoint
    assert "x" not in checkpoint
    for name, shape in SHAPES.items():
        assert tuple(checkpoint.read(name).shape) == checkpoint.shape(name) == shape
        assert checkpoint.read(name).dtype is torch.bfloat16
    assert checkpoint.nbytes("layers.0.attn.q.weight") == 32 * 256 * 2
    assert checkpoint.format_of("layers.0.ssm.D") == "bfloat16"
    with pytest.raises(MissingTensor, match="'x'"):
        checkpoint.read("x")


def test_every_kind_of_tensor_is_in_its_range() -> None:
    read = Synthetic(SHAPES).read
    assert abs(read("layers.0.attn.q.weight").std() * 16 - 1) < 0.05
    assert (read("layers.0.norm.weight") - 1).abs().max() < 0.2
    assert (read("layers.0.attn_hc.scale") - 1).abs().max() < 0.2
    assert read("layers.0.attn.q.bias").abs().max() < 0.2
    assert read("layers.0.ssm.A").max() < 0
    assert 0 <= read("layers.0.ssm.A_log").min() <= read("layers.0.ssm.A_log").max() < 2.78
    for name in ("layers.0.ssm.dt_bias", "blk.0.ssm_dt.bias"):
        step = torch.nn.functional.softplus(read(name))
        assert 0.0009 < step.min() <= step.max() < 0.12
