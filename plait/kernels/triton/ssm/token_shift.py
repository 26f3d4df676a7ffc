"""RWKV's token shift in one launch: what each share of the change from the last token makes of a row.

Tiles and tails are those of `ssm/conv.py`, of two taps. A program reads its rows once and writes one result
for each share; results lie one behind the other, [shares, T, C].
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.ssm.conv import MOST_PROGRAMS, move_tail, read_input, tile_constants
from plait.ops.launch import launch
from plait.ops.wkv import shift_rows

NAME = "triton"


@triton.jit
def shift_tokens(
    x, taps, shares, tail, slots, query_start, has_history, y, x_row, y_share,
    C: tl.constexpr, BT: tl.constexpr, BC: tl.constexpr, W_CHANNEL: tl.constexpr, W_TAP: tl.constexpr,
    SHARES: tl.constexpr,
):  # fmt: skip
    """x: [T, C], taps: [C, 2], shares: [SHARES, C], tail: [slots, 1, C] -> y: [SHARES, T, C], y_share numbers
    from one to the next. Grid: (C / BC, S, Z).
    """
    await_previous()
    block, s, first = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    c = block * BC + tl.arange(0, BC)
    ok = c < C
    begin = tl.load(query_start + s).to(tl.int64)
    count = tl.load(query_start + s + 1).to(tl.int64) - begin
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
    old = tail + slot * C + c
    new = x + begin * x_row + c
    before = tl.load(taps + c * W_CHANNEL, mask=ok, other=0.0).to(tl.float32)
    now = tl.load(taps + c * W_CHANNEL + W_TAP, mask=ok, other=0.0).to(tl.float32)
    for start in range(first * BT, count, tl.num_programs(2) * BT):
        tile = start + tl.zeros([], tl.int64)
        last = read_input(old, new, tile - 1, x_row, c, count, past, C, C, 2, True).to(tl.float32)
        for j in tl.static_range(BT):
            value = read_input(old, new, tile + j, x_row, c, count, past, C, C, 2, False).to(tl.float32)
            change = tl.fma(value, now, last * before)
            to = y + (begin + tile + j) * C + c
            for i in tl.static_range(SHARES):
                share = tl.load(shares + i * C + c, mask=ok, other=0.0).to(tl.float32)
                mixed = tl.fma(change, share, value).to(y.dtype.element_ty)
                tl.store(to + i * y_share, mixed, mask=c < tl.where(tile + j < count, C, 0))
            last = value
    if first == 0:
        move_tail(old, new, x_row, c, count, past, C, C, 2)


@shift_rows.variant(NAME, on="cuda")
def shift_ragged(
    x: Tensor,
    taps: Tensor,
    shares: Tensor,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
) -> tuple[Tensor, ...]:
    """`shift_rows`: the same arguments and results."""
    x = x if x.stride(1) == 1 else x.contiguous()
    (tokens, channels), seqs = x.shape, len(slots)
    y = x.new_empty(len(shares), tokens, channels)
    constants = _constants(taps, len(shares), tokens == seqs)
    tiles = triton.cdiv(tokens - seqs + 1, constants["BT"]) if tokens > seqs else 1  # of the longest, at most
    grid = (
        triton.cdiv(channels, constants["BC"]),
        seqs,
        min(tiles, triton.cdiv(MOST_PROGRAMS, max(seqs, 1))),
    )
    launch(
        shift_tokens, grid, x, taps, shares, tail, slots, query_start, has_history, y, x.stride(0),
        y.stride(0), **constants,
    )  # fmt: skip
    return y.unbind(0)


def _constants(taps: Tensor, shares: int, one_each: bool) -> dict[str, int]:
    """Those of a convolution, and how many results there are."""
    constants = tile_constants(taps, one_each) | {"SHARES": shares}
    return {name: value for name, value in constants.items() if name != "K"}


POINTERS = {
    "x": "bf16*", "taps": "bf16*", "shares": "bf16*", "tail": "bf16*", "slots": "i64*", "query_start": "i64*",
    "has_history": "i1*", "y": "bf16*", "x_row": "i32!", "y_share": "i32!",
}  # fmt: skip


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What mixers of RWKV-4 to 7 launch, some with gates: steps of decodes, and steps with prompts."""
    taps = torch.empty(4096, 2, device="meta")
    mixers = (
        *((7, "time mixing of RWKV-6"), (6, "time mixing of RWKV-7"), (1, "its channel mixing")),
        *((4, "time mixing of RWKV-5"), (3, "time mixing of RWKV-4"), (2, "channel mixing with a gate")),
    )
    for shares, mixer in mixers:
        for step, one_each in (("decodes", True), ("prompts", False)):
            constants = _constants(taps, shares, one_each)
            warps, name = constants.pop("num_warps"), f"shift_tokens, {mixer}, {step}"
            yield KernelForm(name, shift_tokens, POINTERS, constants, warps, demands=(("LDG.128",),))
