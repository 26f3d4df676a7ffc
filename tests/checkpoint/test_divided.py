"""Weights of every storage, cut along rows and along columns, against the whole product."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from plait.checkpoint.divided import Cuts, divide_linear, keep_joined, keep_rows
from plait.errors import ShapeMismatch
from plait.ops.blocks import random_weight
from plait.ops.linear import Linear
from plait.ops.ranks import Alone, Comm, GatheredLinear, sum_ranks
from plait.partition import Cut, Rank, sum_of
from plait.quant.gguf import BLOCK_TYPES
from plait.quant.weight import Dense, Weight, as_weight
from tests.model.together import run_ranks

ROWS, COLS = 24, 1024
STORAGES = [
    *("float32", "bfloat16"),
    *(kind.name for kind in BLOCK_TYPES.values()),
    *("int4_g128", "int4_g128+zeros+order", "int8", "int8_g64", "int3_g128+zeros"),
    *("fp8", "fp8_b128", "mxfp4", "nvfp4", "bnb_nf4"),
]


def weight_of(storage: str) -> Weight:
    torch.manual_seed(5)
    if storage in ("float32", "bfloat16"):
        return Dense((torch.randn(ROWS, COLS) / COLS**0.5).to(getattr(torch, storage)))
    return random_weight(storage, ROWS, COLS)


def one(weight: Weight, bias: Tensor | None, change: object = None) -> Linear:
    return Linear([weight], [bias], lambda op, **_: op, torch.float32)


def divided(name: str, weight: Weight, bias: Tensor | None, cuts: Cuts) -> Any:
    """The linear layer of a rank, made of no more than the rank's part."""
    part = cuts.part_of(f"{name}.weight")
    kept = as_weight(part.keep(weight))
    assert kept.nbytes < 0.55 * weight.nbytes + 4 * COLS  # the order of columns is whole
    return divide_linear(part, kept, bias, ROWS, cuts, one, lambda op, **_: op)


def cuts_of(rank: Rank) -> Mapping[str, Cut]:
    return {"down": Cut(cols=sum_of(rank.divide_blocks(COLS, "features")))}


@pytest.mark.parametrize("shares", [0, 4])
@pytest.mark.parametrize("storage", STORAGES)
def test_columns_that_ranks_sum_give_the_whole_product(storage: str, shares: int) -> None:
    weight, bias = weight_of(storage), torch.randn(ROWS)
    x = torch.randn(5, COLS)
    whole = one(weight, bias)(x)

    def work(comm: Comm) -> Tensor:
        cuts = Cuts.for_rank(comm, cuts_of)
        linear = divided("down", weight, bias, cuts)
        assert isinstance(linear, GatheredLinear) == ("order" in storage)
        (start, stop) = (
            cuts.inputs("down")[comm.rank.index][0][0],
            cuts.inputs("down")[comm.rank.index][-1][1],
        )
        assert linear.n_in == stop - start
        return sum_ranks(linear(x[:, start:stop]), comm, torch.float32)

    first, second = run_ranks(work, 2, shares)
    assert torch.equal(first, second)
    assert (first - whole).abs().max() < 1e-5 * max(1.0, float(whole.abs().max()))


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_that_ranks_have_are_those_of_the_whole(storage: str) -> None:
    weight = weight_of(storage)
    kept: Any = keep_rows(weight, ((3, 7), (16, 21)))
    whole = weight.dequantize(torch.float32)
    assert torch.equal(kept.dequantize(torch.float32), torch.cat([whole[3:7], whole[16:21]]))


@pytest.mark.parametrize("storage", ["float32", "Q8_0", "int4_g128", "fp8"])
def test_of_parts_that_lie_apart_only_those_with_rows_of_the_rank_are_joined(storage: str) -> None:
    parts: list[Any] = [weight_of(storage).rows(*rows) for rows in ((0, 5), (5, 6), (6, 20), (20, 24))]
    whole = torch.cat([part.dequantize(torch.float32) for part in parts])
    for rows in (((0, 24),), ((4, 21),), ((6, 20),), ((1, 3), (19, 22))):
        kept: Any = keep_joined(parts, rows)
        wanted = torch.cat([whole[start:stop] for start, stop in rows])
        assert torch.equal(kept.dequantize(torch.float32), wanted)
    with pytest.raises(ShapeMismatch, match="too few"):
        keep_joined(parts, ((20, 25),))


def test_plain_columns_that_will_be_encoded_are_cut_at_whole_blocks() -> None:
    comm, weight = Alone(Rank(0, 2)), Dense(torch.randn(8, 640))
    cuts = Cuts.for_rank(comm, lambda rank: {"o": Cut(cols=sum_of(rank.divide(10, "heads", 64)))})
    kept: Any = [cuts.part_of("o.weight", kind).keep(weight) for kind in (None, "q8_0", "q4_k")]
    assert [some.shape for some in kept] == [(8, 320), (8, 320), (8, 320)]
    narrow = Cuts.for_rank(comm, lambda rank: {"o": Cut(cols=sum_of(rank.divide(8, "heads", 32)))})
    inside: Any = narrow.part_of("o.weight", "q4_k").keep(Dense(torch.randn(8, 256)))
    assert inside.shape == (4, 256)  # a half is no whole block: inputs are gathered, and rows are divided


def test_whole_blocks_are_cut_where_there_are_enough() -> None:
    sizes = [Rank(index, 4, block=256).divide_blocks(11_008, "features")[0] for index in range(4)]
    assert [stop - start for start, stop in sizes] == [2560, 2816, 2816, 2816]
    assert all(start % 256 == 0 for start, _ in sizes)
    shares = Rank(0, 2, shares=8, block=256).divide_blocks(11_008, "features")
    assert shares[-1][1] == sizes[1][1]  # of two ranks the first has what the first two of four have


def test_experts_that_cannot_be_cut_are_refused_by_name() -> None:
    weight = weight_of("int4_g128+zeros+order")

    def work(comm: Comm) -> Any:
        cuts = Cuts.for_rank(
            comm, lambda rank: {"moe.experts.*.down": Cut(cols=sum_of(rank.divide_blocks(COLS, "features")))}
        )
        return divided("moe.experts.3.down", weight, None, cuts)

    with pytest.raises(ShapeMismatch, match=r"moe\.experts\.3\.down\.weight: .*--ep"):
        run_ranks(work, 2)
