"""What every storage of a weight does with its rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.ops.blocks import random_blocks
from plait.quant.gguf import BLOCK_TYPES
from plait.quant.weight import Dense, Weight, pick_rows

WEIGHTS = {
    "float16": lambda: Dense(torch.randn(7, 32).half()),
    "Q4_0": lambda: random_blocks("Q4_0", 7, 64),
    "Q6_K": lambda: random_blocks("Q6_K", 7, 512),
}
EACH = pytest.mark.parametrize("name", WEIGHTS)


def made(name: str) -> Weight:
    torch.manual_seed(0)
    return WEIGHTS[name]()


@EACH
@pytest.mark.parametrize("index", [[3], [6, 0, 2, 2, 5], list(range(7))[::-1], []])
def test_picked_rows_are_those_of_the_whole_in_the_same_storage(name: str, index: list[int]) -> None:
    weight, rows = made(name), torch.tensor(index, dtype=torch.int64)
    picked = weight.pick(rows)
    assert (picked.format, picked.shape) == (weight.format, (len(index), weight.shape[1]))
    assert picked.nbytes == weight.nbytes // 7 * len(index)
    assert torch.equal(picked.dequantize(torch.float32), weight.dequantize(torch.float32)[rows])


@EACH
@pytest.mark.parametrize("index", [[7], [-1], [0, 6, 9]])
def test_a_row_that_is_not_there_cannot_be_picked(name: str, index: list[int]) -> None:
    with pytest.raises(ShapeMismatch, match=r"rows .* of a .* weight of \[7, "):
        made(name).pick(torch.tensor(index))


@EACH
@pytest.mark.parametrize("index", [torch.ones(7, dtype=torch.bool), torch.zeros(2), torch.zeros(1, 1).long()])
def test_rows_are_picked_by_a_list_of_integers(name: str, index: Tensor) -> None:
    with pytest.raises(ShapeMismatch, match="rows are picked by integers"):
        made(name).pick(index)


def test_plain_tensors_are_picked_from_in_the_same_words() -> None:
    index, stack = torch.tensor([2, 0]), torch.randn(3, 4, 5)
    assert torch.equal(pick_rows(stack, index), stack[index])
    weight = made("Q4_0")
    picked = pick_rows(weight, index)
    assert isinstance(picked, type(weight))
    assert picked.shape == (2, 64)


@pytest.mark.parametrize("name", [kind.name for kind in BLOCK_TYPES.values()])
def test_a_matrix_of_one_block_can_be_made_of_every_format(name: str) -> None:
    elements = next(kind.elements for kind in BLOCK_TYPES.values() if kind.name == name)
    numbers = random_blocks(name, 1, elements).dequantize(torch.float32)
    assert numbers.shape == (1, elements)
    assert numbers.isfinite().all()
    assert numbers.any()
