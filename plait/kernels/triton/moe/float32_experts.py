"""Experts in planes with x in float32: the products of `float32_planes`, each pair by its expert.

By slots a program has one pair of a token and an expert, by groups a tile of sorted pairs, as in
`plane_experts`. A pair has the same bits in both, alone and next to others. The activation is a launch of its
own.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm
from plait.kernels.triton.linear.float32_planes import BM, BN, OPTIONS, multiply_numbers
from plait.kernels.triton.linear.plane_arguments import decode_constants
from plait.kernels.triton.linear.plane_forms import EVERY, float32_form
from plait.kernels.triton.moe.grouped_experts import COUNTS
from plait.kernels.triton.moe.plane_experts import find_pairs, plane_arguments
from plait.ops.expert_stack import ExpertStack
from plait.ops.launch import launch
from plait.quant.planes import Planes


@triton.jit
def float32_pairs(
    x, codes, high, scales, levels, table, bias, index, starts, order, y,
    n_in, n, units, x_row,
    codes_expert, high_expert, scales_expert, levels_expert, table_expert,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, E: tl.constexpr, EP: tl.constexpr,
    SLOTS: tl.constexpr, K: tl.constexpr, BIASED: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows of x times the planes of their experts -> y [pairs, n]. Grid: (tiles of pairs, tiles of outputs).

    A pair's row of x is pair // K; bias: [E, n].
    """
    await_previous()
    e, pair, there = find_pairs(index, starts, order, tl.program_id(0), E, EP, SLOTS, BM)
    if e < E:
        rows, e64 = tl.program_id(1) * BN + tl.arange(0, BN), e.to(tl.int64)
        inside = rows < n
        total = multiply_numbers(
            x + (pair // K).to(tl.int64) * x_row, there, codes + e64 * codes_expert, high + e64 * high_expert,
            scales + e64 * scales_expert, levels + e64 * levels_expert, table + e64 * table_expert,
            tl.where(inside, rows, 0), units, n_in, codes_unit, high_unit, scales_row, levels_row,
            BITS, HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL, BN, BM,
        )  # fmt: skip
        if BIASED:
            # 32 bits hold a bias of all experts
            total += tl.load(bias + e * n + rows, mask=inside, other=0.0).to(tl.float32)[:, None]
        place = y + pair.to(tl.int64)[None, :] * n + rows[:, None]
        tl.store(place, total.to(y.dtype.element_ty), mask=inside[:, None] & there[None, :])


def multiply_pairs_in_float32(
    x: Tensor, stack: ExpertStack, index: Tensor, where: tuple[Tensor, Tensor] | None, k: int
) -> Tensor:
    """One product, [pairs, outputs] float32; arguments as of `expert_planes.multiply_stack`.

    Rows of x are in the order of the columns.
    """
    planes, pairs, count = stack.parts[0].template, index.numel(), stack.count
    assert isinstance(planes, Planes)
    tensors, strides = plane_arguments(stack.parts[0])
    y, starts_order = x.new_empty(pairs, stack.n_out), where or (index, index)
    tiles = pairs if where is None else pairs // BM + min(count, pairs)
    launch(
        float32_pairs, (tiles, triton.cdiv(stack.n_out, BN)),
        x, *tensors, y if stack.bias is None else stack.bias, index, *starts_order, y,
        stack.n_in, stack.n_out, planes.layout.padded(stack.n_in) // planes.layout.unit, x.stride(0),
        *strides, **decode_constants(planes.layout), E=count, EP=triton.next_power_of_2(count),
        SLOTS=where is None, K=k, BIASED=stack.bias is not None, BN=BN, BM=BM, **OPTIONS,
    )  # fmt: skip
    return y


INTEGERS = {"index": "i64*", "starts": "i32*", "order": "i32*"}
STRIDES = dict.fromkeys(("codes_expert", "high_expert", "scales_expert", "levels_expert"), "i32!")
TALL_STRIDES = dict.fromkeys(("scales_expert", "levels_expert", "scales_row", "levels_row"), "i32")


def forms() -> Iterator[KernelForm]:
    """Every layout, by slots and by groups."""
    count, tile = COUNTS["qwen3 30b-a3b"], {"BN": BN, "BM": BM}
    experts = {"E": count, "EP": triton.next_power_of_2(count), "K": 8}
    for name, (layout, scales) in EVERY.items():
        types = INTEGERS | {"y": "fp32*", "scales": scales} | STRIDES
        types |= TALL_STRIDES if layout.tall > 1 else {}
        for slots in (True, False):
            for biased in (False, True) if name == "MXFP4" else (False,):
                named = f"float32_pairs, {name}, {'slots' if slots else 'groups'}{', bias' if biased else ''}"
                own = experts | tile | {"SLOTS": slots, "BIASED": biased}
                yield float32_form(named, float32_pairs, layout, types, own)
