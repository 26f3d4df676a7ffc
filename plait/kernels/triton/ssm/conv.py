"""The short convolution of every sequence of a ragged batch, in one launch: decodes and chunks of prompts.

    tail of a slot [K-1, C]   o o o                 the last inputs, oldest first
    rows of the sequence            x x x x x x x
    tiles of BT rows                |-----||-----   tile 0 reads the tail, and so only tile 0 writes it

A program has BC channels of one sequence, and takes every Z-th tile of its rows. Tiles are counted from the
sequence's first row, and a tile has at least K-1 rows, so that the rows which need the tail are all in the
first one (or Z is 1). A thread has the same channels in every load and store of its program. So what reads a
number of the tail is the thread that writes it, after it: nothing has to be waited for.

Every number of the result is a sum of its own K products in the order of time, by fused multiply-adds. So it
depends on no tile, no grid and no chunk of a prompt. Slot 0 belongs to padding rows, of which several may
write it at once; nothing reads it. Gu & Dao 2023.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, widen, with_float16, with_float32
from plait.kernels.triton.maths import silu
from plait.ops.conv import causal_conv
from plait.ops.launch import launch

NAME = "triton"
CHANNELS = 256  # of a program: a warp reads eight 16-bit numbers for each lane
ROWS = 8  # of a tile in a step with prompts: so many loads are under way at once
MOST_PROGRAMS = 1024  # of a block of channels: they share the tiles of all sequences


@triton.jit
def read_input(
    old, new, at, x_row, c, count, past,
    C: tl.constexpr, OWN: tl.constexpr, K: tl.constexpr, MAYBE: tl.constexpr,
):  # fmt: skip
    """A sequence's input `at` rows behind its first, 0 where there is none; MAYBE: it may be in the tail.

    old, new: where channels c of OWN begin, in the tail's oldest entry (of C numbers) and in the first row.
    """
    value = tl.load(new + at * x_row, mask=c < tl.where((at >= 0) & (at < count), OWN, 0), other=0.0)
    if MAYBE:
        kept = tl.load(old + (at + (K - 1)) * C, mask=c < tl.where((at < 0) & past, OWN, 0), other=0.0)
        value = tl.where(at < 0, kept.to(value.dtype), value)
    return value


@triton.jit
def move_tail(
    old, new, x_row, c, count, past, C: tl.constexpr, OWN: tl.constexpr, K: tl.constexpr
):  # fmt: skip
    """The tail becomes the last K-1 inputs; see `read_input`."""
    for j in tl.static_range(K - 1):
        at = count + (j - (K - 1))  # an entry moves towards the front, where nothing reads it again
        value = tl.load(new + at * x_row, mask=c < tl.where(at >= 0, OWN, 0), other=0.0)
        kept = tl.load(old + (at + (K - 1)) * C, mask=c < tl.where((at < 0) & past, OWN, 0), other=0.0)
        tl.store(old + j * C, tl.where(at < 0, kept, value.to(kept.dtype)), mask=c < OWN)


@triton.jit
def convolve(
    x, weight, bias, tail, slots, query_start, has_history, y, x_row,
    C: tl.constexpr, K: tl.constexpr, W_CHANNEL: tl.constexpr, W_TAP: tl.constexpr,
    BT: tl.constexpr, BC: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """x: [T, C] with rows of x_row, weight: [C, K] in strides W_CHANNEL and W_TAP, bias: [C],
    tail: [slots, K-1, C] -> y [T, C]. Grid: (C / BC, S, Z), with BT ≥ K-1 or Z = 1.
    """
    await_previous()
    block, s, first = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = block * BC + tl.arange(0, BC)
    ok = c < C  # with a condition of a row: c < C or c < 0, because the interpreter joins no mask and scalar
    begin = tl.load(query_start + s).to(tl.int64)
    count = tl.load(query_start + s + 1).to(tl.int64) - begin
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
    old = tail + slot * ((K - 1) * C) + c
    new = x + begin * x_row + c
    for start in range(first * BT, count, tl.num_programs(2) * BT):
        tile = start + tl.zeros([], tl.int64)
        values = ()
        for j in tl.static_range(BT + K - 1):
            value = read_input(old, new, tile + (j - (K - 1)), x_row, c, count, past, C, C, K, j < K - 1)
            values += (value,)  # type: ignore[assignment]
        for j in tl.static_range(BT):
            acc = tl.zeros([BC], tl.float32)
            if HAS_BIAS:
                acc = tl.load(bias + c, mask=ok, other=0.0).to(tl.float32)
            for k in tl.static_range(K):
                tap = tl.load(weight + c * W_CHANNEL + k * W_TAP, mask=ok, other=0.0).to(tl.float32)
                acc = tl.fma(values[j + k].to(tl.float32), tap, acc)
            if SILU:
                acc = silu(acc)
            to = y + (begin + tile + j) * C + c
            tl.store(to, acc.to(y.dtype.element_ty), mask=c < tl.where(tile + j < count, C, 0))
    if first == 0:
        move_tail(old, new, x_row, c, count, past, C, C, K)


def tile_constants(weight: Tensor, one_each: bool) -> dict[str, int]:
    """The constants of a step. one_each: it has as many rows as sequences."""
    channels, taps = weight.shape
    return {
        "C": channels,
        "K": taps,
        "W_CHANNEL": weight.stride(0),
        "W_TAP": weight.stride(1),
        "BT": 1 if one_each else max(ROWS, triton.next_power_of_2(taps - 1)),
        "BC": min(triton.next_power_of_2(channels), widen(CHANNELS, channels, 4096)),
        "num_warps": 1,
    }


@causal_conv.variant(NAME, on="cuda")
def convolve_ragged(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """`causal_conv`: the same arguments and result."""
    y = x.new_empty(x.shape)
    if not len(x):
        return y
    if x.stride(1) != 1:
        x = x.contiguous()
    tokens, seqs = len(x), len(slots)
    constants = tile_constants(weight, tokens == seqs)
    tiles = triton.cdiv(tokens - seqs + 1, constants["BT"]) if tokens > seqs else 1  # of the longest, at most
    grid = (
        triton.cdiv(x.shape[1], constants["BC"]),
        seqs,
        min(tiles, triton.cdiv(MOST_PROGRAMS, seqs)),
    )
    launch(
        convolve, grid, x, weight, weight if bias is None else bias, tail, slots, query_start, has_history,
        y, x.stride(0), HAS_BIAS=bias is not None, SILU=activation == "silu", **constants,
    )  # fmt: skip
    return y


POINTERS = {
    "x": "bf16*", "weight": "bf16*", "bias": "bf16*", "tail": "bf16*", "slots": "i64*", "query_start": "i64*",
    "has_history": "i1*", "y": "bf16*", "x_row": "i32!",
}  # fmt: skip
SHAPES = {  # channels, taps, bias, SiLU
    "granite-4-h-small": (8448, 4, True, True),
    "nemotron-h-8b": (10240, 4, True, True),
    "qwen3-next": (8192, 4, False, True),
    "kimi-linear": (12288, 4, False, True),
    "lfm2": (2048, 3, False, False),
    "inkling": (4096, 4, False, False),
    "recurrentgemma 2b": (2560, 4, True, False),
}
FLOAT32_TAPS = ("inkling",)  # 1 was added to one of them


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch: steps of decodes, and steps with prompts."""
    for name, (channels, taps, bias, silu_too) in SHAPES.items():
        weight = torch.empty(taps, channels, device="meta").T
        types = POINTERS | ({"weight": "fp32*"} if name in FLOAT32_TAPS else {})
        for step, one_each in (("decodes", True), ("prompts", False)):
            constants = tile_constants(weight, one_each) | {"HAS_BIAS": bias, "SILU": silu_too}
            warps = constants.pop("num_warps")
            yield KernelForm(
                f"convolve, {name}, {step}", convolve, types, constants, warps, demands=(("LDG.128",),)
            )
