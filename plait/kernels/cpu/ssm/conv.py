"""The short convolution in front of a state-space scan, sixteen channels at a time."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.maths import load_left, silu, store_left
from plait.kernels.cpu.codegen.vec import (
    fma,
    get_f32,
    get_i64,
    get_u8,
    interleave_high,
    interleave_low,
    load_f32,
    put_f32,
    store_f32,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import scratch_of
from plait.kernels.cpu.runtime.frame_words import SEQS
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.ops.conv import causal_conv

CHANNELS = 128  # that are done together: some lines of a row, and their taps
Rows = tuple[Int, Int]  # an address, and the bytes from row to row


@inline
def _gather_taps(weight: Int, kernel: Int, left: Int, taps: Int) -> None:
    """taps [kernel, 16] of sixteen channels, from weight [channel, kernel]."""
    for k in range(kernel):
        store_f32(taps + 64 * k, zero_f32())
    for c in range(min(left, 16)):
        for k in range(kernel):
            put_f32(taps + 64 * k + 4 * c, get_f32(weight + 4 * (c * kernel + k)))


@inline
def _gather_four(weight: Int, taps: Int) -> None:
    """The same for sixteen channels of four taps: each round moves the two halves of 64 numbers between
    each other, which turns a place's bits by one; after four, the channel's bits are the low ones."""
    a, b, c, d = load_f32(weight), load_f32(weight + 64), load_f32(weight + 128), load_f32(weight + 192)
    for _ in range(4):
        e, f = interleave_low(a, c), interleave_high(a, c)
        c, d = interleave_low(b, d), interleave_high(b, d)
        a, b = e, f
    store_f32(taps, a)
    store_f32(taps + 64, b)
    store_f32(taps + 128, c)
    store_f32(taps + 192, d)


@inline
def _outputs(
    x: Rows, tail: Rows, first: Int, taps: Int, kernel: Int, bias: Int, silent: Int, out: Int, channels: Int
) -> None:
    """One row of some channels. x: its newest input; `first`: which row of its chunk the oldest one is;
    tail: of the row that `first` is counted from, 0 if there is no history. Taps are added oldest first."""
    (x_at, x_bytes), (tail_at, tail_bytes) = x, tail
    unseen = min(max(-first, 0), kernel)
    for at in range(0, channels, 16):
        left, y, own = channels - at, zero_f32(), taps + 4 * at * kernel
        if bias != 0:
            y = load_left(bias + 4 * at, left)
        if tail_at != 0:
            row = tail_at + (first + kernel - 1) * tail_bytes + 4 * at
            for k in range(unseen):
                y = fma(load_left(row, left), load_f32(own + 64 * k), y)
                row += tail_bytes
        row = x_at + (unseen - kernel + 1) * x_bytes + 4 * at
        for k in range(unseen, kernel):
            y = fma(load_left(row, left), load_f32(own + 64 * k), y)
            row += x_bytes
        store_left(out + 4 * at, y if silent else silu(y), left)


@inline
def _move_tail(
    x: Int, x_bytes: Int, tail: Int, to: Int, tail_bytes: Int, tokens: Int, past: Int, channels: Int
) -> None:
    """What is at `to`, which may be `tail`, becomes the last `past` inputs behind so many tokens.

    tail: of the row before them, 0 if there is no history. Oldest first: none is overwritten before it moves.
    """
    for r in range(past):
        source = tokens + r  # counted from the first row of the old tail
        for at in range(0, channels, 16):
            v, left = zero_f32(), channels - at
            if source >= past:
                v = load_left(x + (source - past) * x_bytes + 4 * at, left)
            elif tail != 0:
                v = load_left(tail + source * tail_bytes + 4 * at, left)
            store_left(to + r * tail_bytes + 4 * at, v, left)


@kernel
def conv_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """x, row stride, channels, weight, kernel, bias or 0, tail, slot and row strides, slots, query_start,
    has_history, silent (no activation), out (dense); 0, or where the tail behind each row is kept, too."""
    x, x_bytes, channels, weight, kernel, bias, tail, slot_bytes, tail_bytes = words(args, 2, 11)
    slots, start, history, silent, out, row_slots = words(args, 11, 17)
    seqs, taps, past = get_i64(frame + 8 * SEQS), scratch_of(frame, thread), kernel - 1
    blocks = (channels + 15) // 16
    last = min(blocks * (thread + 1) // threads * 16, channels)
    for begin in range(blocks * thread // threads * 16, last, CHANNELS):
        at, width = 4 * begin, min(last - begin, CHANNELS)
        for c in range(0, width, 16):
            if kernel == 4 and width - c >= 16:
                _gather_four(weight + 16 * (begin + c), taps + 16 * c)
            else:
                _gather_taps(weight + 4 * (begin + c) * kernel, kernel, width - c, taps + 4 * c * kernel)
        shift = bias + at if bias != 0 else np.int64(0)
        for s in range(seqs):
            first, end = get_i64(start + 8 * s), get_i64(start + 8 * s + 8)
            if end <= first:
                continue
            has_history, own = get_u8(history + s) != 0, tail + get_i64(slots + 8 * s) * slot_bytes + at
            known = own if has_history else np.int64(0)
            for t in range(first, end):
                row, to = x + t * x_bytes + at, out + 4 * t * channels + at
                oldest = t - first - past
                _outputs((row, x_bytes), (known, tail_bytes), oldest, taps, kernel, shift, silent, to, width)
            row = x + first * x_bytes + at
            if row_slots != 0:
                for t in range(first, end - 1):
                    slot = get_i64(row_slots + 8 * t)
                    if slot != 0:
                        to = tail + slot * slot_bytes + at
                        _move_tail(row, x_bytes, known, to, tail_bytes, t + 1 - first, past, width)
            _move_tail(row, x_bytes, known, own, tail_bytes, end - first, past, width)


@causal_conv.variant("native", on="cpu", when=float32_rows, native=True)
def _causal_conv(
    cpu: Executor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    rows, (channels, width) = TensorRows.of(x), weight.shape
    if x.dim() != 2 or rows.width != channels or tail.shape[1:] != (width - 1, channels):
        raise ShapeMismatch(
            f"a convolution of weight {list(weight.shape)} wants x [T, {channels}] and a tail [slots, "
            f"{width - 1}, {channels}]; got {list(x.shape)} and {list(tail.shape)}"
        )
    if activation not in ("silu", None):
        raise ShapeMismatch(f"a convolution is followed by 'silu' or None, not by {activation!r}")
    memory, where = TensorRows.of(tail), Sequences.of(slots, query_start, has_history)
    dense("weight", weight, channels, width)
    if bias is not None:
        dense("bias", bias, channels)
    out = cpu.empty(rows.count, channels)
    cpu.launch(
        *(conv_channels, x, rows.row_bytes, channels, weight, width, bias),
        *(tail, *memory.strides, *where.words, activation is None, out, cpu.row_slots_of(tail)),
        rows=rows.count,
        seqs=len(slots),
        scratch=4 * CHANNELS * width,
    )
    return out
