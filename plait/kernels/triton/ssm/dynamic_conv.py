"""Short convolutions with taps that each token makes for itself, in one launch, decodes and prompts alike.

Tiles, tails and the order of sums are those of `ssm/conv.py`, with taps that are read for each row. A program
has BC channels of one head of one sequence: where taps are made for heads, a tap is one number for them all.
Gu et al. 2025 (JetBlock), and Inkling 2.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, widen, with_float16, with_float32
from plait.kernels.triton.maths import silu
from plait.kernels.triton.ssm.conv import CHANNELS, MOST_PROGRAMS, ROWS, move_tail, read_input
from plait.ops.dynamic_conv import dynamic_conv, head_conv
from plait.ops.launch import launch

NAME = "triton"


@triton.jit
def convolve_by_taps(
    x, taps, fixed, tail, slots, query_start, has_history, y, x_row, taps_row, scale,
    C: tl.constexpr, D: tl.constexpr, K: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr,
    OF_HEADS: tl.constexpr,
):  # fmt: skip
    """x: [T, C], tail: [slots, K-1, C] -> y [T, C]. Grid: (heads · parts of D channels, S, Z).

    taps: [T, K · C], and silu of the sum; OF_HEADS: [T, heads · K], times `scale`, added to fixed [K, C].
    """
    await_previous()
    PARTS: tl.constexpr = (D + BC - 1) // BC
    head, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    s, first = tl.program_id(1), tl.program_id(2)
    d = part * BC + tl.arange(0, BC)  # of the head
    c = head * D + d
    begin = tl.load(query_start + s).to(tl.int64)
    count = tl.load(query_start + s + 1).to(tl.int64) - begin
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
    old = tail + slot * ((K - 1) * C) + c
    new = x + begin * x_row + c
    for start in range(first * BT, count, tl.num_programs(2) * BT):
        tile = start + tl.zeros([], tl.int64)
        values = ()
        for j in tl.static_range(BT + K - 1):
            value = read_input(old, new, tile + (j - (K - 1)), x_row, d, count, past, C, D, K, j < K - 1)
            values += (value,)  # type: ignore[assignment]
        for j in tl.static_range(BT):
            row, there = begin + tile + j, d < tl.where(tile + j < count, D, 0)
            acc = tl.zeros([BC], tl.float32)
            for k in tl.static_range(K):
                if OF_HEADS:
                    own = tl.load(taps + row * taps_row + head * K + k, mask=tile + j < count, other=0.0)
                    tap = tl.load(fixed + k * C + c, mask=d < D, other=0.0) + scale * own.to(tl.float32)
                else:
                    tap = tl.load(taps + row * taps_row + k * C + c, mask=there, other=0.0).to(tl.float32)
                acc = tl.fma(values[j + k].to(tl.float32), tap, acc)
            if not OF_HEADS:
                acc = silu(acc)
            tl.store(y + row * C + c, acc.to(y.dtype.element_ty), mask=there)
    if first == 0:
        move_tail(old, new, x_row, d, count, past, C, D, K)


def _constants(channels: int, heads: int, kernel: int, one_each: bool) -> dict[str, int]:
    """The constants of a step. one_each: it has as many rows as sequences."""
    own = channels // heads
    return {
        "C": channels,
        "D": own,
        "K": kernel,
        "BT": 1 if one_each else max(ROWS, triton.next_power_of_2(kernel - 1)),
        "BC": min(triton.next_power_of_2(own), widen(CHANNELS, own, 4096)),
        "num_warps": 1,
    }


def _convolve(
    x: Tensor,
    taps: Tensor,
    fixed: Tensor | None,
    where: tuple[Tensor, Tensor, Tensor, Tensor],
    scale: float,
    heads: int,
) -> Tensor:
    """where: the tail, slots, query_start, has_history. fixed: None if each channel has taps of its own."""
    y, seqs, kernel = x.new_empty(x.shape), len(where[1]), where[0].shape[1] + 1
    x, taps = (t if t.stride(1) == 1 else t.contiguous() for t in (x, taps))
    tokens, channels = x.shape
    constants = _constants(channels, heads, kernel, tokens == seqs)
    tiles = triton.cdiv(tokens - seqs + 1, constants["BT"]) if tokens > seqs else 1  # of the longest, at most
    grid = (
        heads * triton.cdiv(constants["D"], constants["BC"]),
        seqs,
        min(tiles, triton.cdiv(MOST_PROGRAMS, max(seqs, 1))),
    )
    launch(
        convolve_by_taps, grid, x, taps, y if fixed is None else fixed, *where, y, x.stride(0),
        taps.stride(0), scale, **constants, OF_HEADS=fixed is not None,
    )  # fmt: skip
    return y


@dynamic_conv.variant(NAME, on="cuda")
def convolve_by_own_taps(
    x: Tensor, taps: Tensor, tail: Tensor, slots: Tensor, query_start: Tensor, has_history: Tensor
) -> Tensor:
    """`dynamic_conv`: the same arguments and result."""
    return _convolve(x, taps, None, (tail, slots, query_start, has_history), 1.0, 1)


@head_conv.variant(NAME, on="cuda")
def convolve_heads(
    x: Tensor,
    taps: Tensor,
    fixed: Tensor,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    scale: float,
) -> Tensor:
    """`head_conv`: the same arguments and result."""
    where = (tail, slots, query_start, has_history)
    return _convolve(x, taps, fixed, where, scale, taps.shape[1] // len(fixed))


POINTERS = {
    "x": "bf16*", "taps": "bf16*", "fixed": "bf16*", "tail": "bf16*", "slots": "i64*", "query_start": "i64*",
    "has_history": "i1*", "y": "bf16*", "x_row": "i32!", "taps_row": "i32!", "scale": "fp32",
}  # fmt: skip
SHAPES = {  # channels, heads, taps
    "jet-nemotron 2b": (2304, 1, 4),
    "inkling-2": (1024, 8, 4),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch: steps of decodes, and steps with prompts."""
    for name, (channels, heads, kernel) in SHAPES.items():
        types = POINTERS | ({"fixed": "fp32*"} if heads > 1 else {})
        for step, one_each in (("decodes", True), ("prompts", False)):
            constants = _constants(channels, heads, kernel, one_each) | {"OF_HEADS": heads > 1}
            warps = constants.pop("num_warps")
            wide = ((("LDG.64",) if heads > 1 else ("LDG.128",)),)
            yield KernelForm(
                f"convolve_by_taps, {name}, {step}", convolve_by_taps, types, constants, warps, demands=wide
            )
