"""Experts that give their input back (LongCat-Flash): their weights apart from those of other experts."""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm
from plait.ops.launch import launch
from plait.ops.moe import split_identities

NAME = "triton"


@triton.jit(do_not_specialize=["count"])
def split_weights(
    weight, index, own_weight, own_index, rest, count, weight_row, index_row,
    K: tl.constexpr, KP: tl.constexpr,
):  # fmt: skip
    """See `ops.moe.split_identities`. Grid: (T,)."""
    await_previous()
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    share = tl.load(weight + row * weight_row + k, mask=k < K, other=0.0)
    which = tl.load(index + row * index_row + k, mask=k < K, other=0)
    is_own = which < count
    tl.store(own_weight + row * K + k, tl.where(is_own, share, 0.0), mask=k < K)
    tl.store(own_index + row * K + k, tl.where(is_own, which, 0), mask=k < K)
    tl.store(rest + row, tl.sum(tl.where(is_own, 0.0, share), 0))


@split_identities.variant(NAME, on="cuda")
def split(weight: Tensor, index: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """`split_identities`: the same arguments and results."""
    weight, index = (m if m.stride(1) == 1 else m.contiguous() for m in (weight, index))
    rows, k = weight.shape
    own_weight, own_index = weight.new_empty(rows, k), index.new_empty(rows, k)
    rest = weight.new_empty(rows, 1)
    launch(
        split_weights, (rows,), weight, index, own_weight, own_index, rest, count, weight.stride(0),
        index.stride(0), K=k, KP=triton.next_power_of_2(k), num_warps=1,
    )  # fmt: skip
    return own_weight, own_index, rest


def forms() -> Iterator[KernelForm]:
    """LongCat-Flash's twelve of a token."""
    types = {
        **dict.fromkeys(("weight", "own_weight", "rest"), "fp32*"),
        **dict.fromkeys(("index", "own_index"), "i64*"),
    }
    yield KernelForm("split_weights, 12 of a token", split_weights, types, {"K": 12, "KP": 16}, num_warps=1)
