"""Stacks of weights: items come back as they were, and the device may choose one."""

from __future__ import annotations

import pytest
import torch

from plait.errors import ShapeMismatch
from plait.ops.blocks import random_weight
from plait.ops.expert_stack import ExpertStack
from plait.quant.stack import TensorStack
from plait.quant.weight import Dense


@pytest.mark.parametrize("kind", ["Q4_K", "mxfp4", "nvfp4", "fp8_b128", "int4_g64+zeros+order", "bnb_nf4"])
def test_items_of_every_storage_come_back(kind: str) -> None:
    items = [random_weight(kind, 32, 256) for _ in range(3)]
    stack = TensorStack(3)
    for at, item in enumerate(items):
        stack.put(at, item)
    for at, item in enumerate(items):
        for found in (stack[at], stack.pick(torch.tensor([at]))):
            assert type(found) is type(item)
            assert torch.equal(found.dequantize(torch.float32), item.dequantize(torch.float32))
    assert stack.nbytes >= 3 * items[0].nbytes


def test_an_item_of_another_make_is_rejected() -> None:
    stack = TensorStack(2)
    stack.put(0, random_weight("Q4_K", 32, 256))
    other = random_weight("Q6_K", 32, 256)
    assert not stack.fits(other)
    with pytest.raises(ShapeMismatch, match="another make"):
        stack.put(1, other)


def test_experts_of_several_storages_become_plain_numbers() -> None:
    weights = [random_weight(kind, 32, 256) for kind in ("Q4_K", "Q4_K", "Q8_0", "Q4_K")]
    stack = ExpertStack(4, torch.float32, lambda weight, dtype: weight)
    for e, weight in enumerate(weights):
        stack.put(e, [weight], [None])
    for e, weight in enumerate(weights):
        assert torch.equal(stack.decode(e), weight.dequantize(torch.float32))
        assert torch.equal(stack.pick(torch.tensor([e])), weight.dequantize(torch.float32))


def test_gate_and_up_of_two_storages_are_two_parts() -> None:
    gate, up = random_weight("Q4_K", 32, 256), random_weight("Q6_K", 32, 256)
    stack = ExpertStack(1, torch.float32, lambda weight, dtype: weight)
    stack.put(0, [gate, up], [None, torch.ones(32)])
    assert stack.widths == [32, 32]
    assert torch.equal(stack.decode(0), torch.cat([w.dequantize(torch.float32) for w in (gate, up)]))
    assert stack.bias is not None
    assert stack.bias[0].tolist() == [0.0] * 32 + [1.0] * 32


def test_plain_weights_are_one_tensor() -> None:
    gate, up = torch.randn(8, 16), torch.randn(8, 16)
    stack = ExpertStack(1, torch.float32, lambda weight, dtype: weight.dequantize(dtype))
    stack.put(0, [Dense(gate), Dense(up)], [None, None])
    assert [part.tensors[0].shape for part in stack.parts] == [(1, 16, 16)]
    assert torch.equal(stack.decode(0), torch.cat([gate, up]))
