"""Short convolutions with taps of each token: sixteen channels at a time, the oldest tap first."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.maths import silu
from plait.kernels.cpu.codegen.vec import (
    add,
    fma,
    get_f32,
    get_i64,
    load_some,
    spread,
    store_some,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.ops.dynamic_conv import dynamic_conv, head_conv

CHANNELS = 64  # of a sequence that one thread takes at a time


@kernel
def dynamic_conv_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """channels, taps; x, its row stride; taps, their row stride; tail, its slot stride; slots, query_start,
    has_history; out (dense)."""
    n, kernel, xs, x_bytes, taps, tap_bytes, tails, slot_bytes = words(args, 2, 10)
    slots, starts, history, outs = words(args, 10, 14)
    past, parts = kernel - 1, (n + CHANNELS - 1) // CHANNELS
    while True:
        i, slot, known, first, tokens = take_sequence(frame, args, parts, (slots, starts, history))
        if i < 0:
            return
        for c in range(i * CHANNELS, min((i + 1) * CHANNELS, np.int64(n)), 16):
            at, left = 4 * c, np.int32(min(n - c, 16))
            tail, x = tails + slot * slot_bytes + at, xs + first * x_bytes + at
            for t in range(tokens):
                y, own = zero_f32(), taps + (first + t) * tap_bytes + at
                for k in range(kernel):
                    source = t - past + k
                    if source >= 0:
                        y = fma(load_some(own + 4 * n * k, left), load_some(x + source * x_bytes, left), y)
                    elif known:
                        kept = load_some(tail + 4 * n * (past + source), left)
                        y = fma(load_some(own + 4 * n * k, left), kept, y)
                store_some(outs + 4 * n * (first + t) + at, silu(y), left)
            move_tail(tail, tail, n, x, x_bytes, (past, tokens, known), left)


@inline
def move_tail(
    tail: Int, to: Int, n: Int, x: Int, x_bytes: Int, counts: tuple[Int, Int, Int], left: Int
) -> None:
    """The last inputs of `left` channels, of n, behind some of the new tokens go `to` a tail, which may be
    the same; counts: (taps but one, tokens, whether the sequence has history)."""
    past, tokens, known = counts
    for r in range(past):  # oldest first, so that none is overwritten before it moves
        source = tokens + r
        v = zero_f32()
        if source >= past:
            v = load_some(x + (source - past) * x_bytes, left)
        elif known:
            v = load_some(tail + 4 * n * source, left)
        store_some(to + 4 * n * r, v, left)


@kernel
def head_conv_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """channels, taps, heads, scale; x, its row stride; taps, their row stride; fixed (dense); tail, its slot
    stride; slots, query_start, has_history; out (dense); 0, or where the tail behind each row is kept, too.
    A thread takes the channels of a head."""
    n, kernel, heads = words(args, 2, 5)
    scale, (xs, x_bytes, taps, tap_bytes, fixed, tails, slot_bytes) = get_f32(args + 40), words(args, 6, 13)
    slots, starts, history, outs, row_slots = words(args, 13, 18)
    past, d = kernel - 1, n // heads
    while True:
        head, slot, known, first, tokens = take_sequence(frame, args, heads, (slots, starts, history))
        if head < 0:
            return
        for c in range(head * d, head * d + d, 16):
            at, left = 4 * c, np.int32(min(head * d + d - c, 16))
            tail, x = tails + slot * slot_bytes + at, xs + first * x_bytes + at
            for t in range(tokens):
                y, own = zero_f32(), taps + (first + t) * tap_bytes + 4 * kernel * head
                for k in range(kernel):
                    source = t - past + k
                    v = zero_f32()
                    if source >= 0:
                        v = load_some(x + source * x_bytes, left)
                    elif known:
                        v = load_some(tail + 4 * n * (past + source), left)
                    tap = spread(np.float32(scale * get_f32(own + 4 * k)))
                    y = fma(add(load_some(fixed + 4 * n * k + at, left), tap), v, y)
                store_some(outs + 4 * n * (first + t) + at, y, left)
            if row_slots != 0:
                for t in range(tokens - 1):
                    kept = get_i64(row_slots + 8 * (first + t))
                    if kept != 0:
                        to = tails + kept * slot_bytes + at
                        move_tail(tail, to, n, x, x_bytes, (past, t + 1, known), left)
            move_tail(tail, tail, n, x, x_bytes, (past, tokens, known), left)


@dynamic_conv.variant("native", on="cpu", when=float32_rows, native=True)
def _dynamic_conv(
    cpu: Executor,
    x: Tensor,
    taps: Tensor,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
) -> Tensor:
    rows, own, (past, channels) = TensorRows.of(x), TensorRows.of(taps), tail.shape[1:]
    if x.dim() != 2 or rows.width != channels or tuple(taps.shape) != (len(x), (past + 1) * channels):
        raise ShapeMismatch(
            f"a convolution of x {list(x.shape)} with a tail of {past} wants taps "
            f"[T, {(past + 1) * channels}], got {list(taps.shape)}"
        )
    dense("a slot's tail", tail[0], past, channels)
    where, out = Sequences.of(slots, query_start, has_history), cpu.empty(rows.count, channels)
    cpu.launch(
        *(dynamic_conv_channels, channels, past + 1, x, rows.row_bytes, taps, own.row_bytes),
        *(tail, 4 * tail.stride(0), *where.words, out),
        rows=rows.count,
        seqs=len(slots),
    )
    return out


@head_conv.variant("native", on="cpu", when=float32_rows, native=True)
def _head_conv(
    cpu: Executor,
    x: Tensor,
    taps: Tensor,
    fixed: Tensor,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    scale: float,
) -> Tensor:
    rows, own, (past, channels) = TensorRows.of(x), TensorRows.of(taps), tail.shape[1:]
    heads = own.width // (past + 1)
    if x.dim() != 2 or rows.width != channels or own.count != rows.count:
        raise ShapeMismatch(
            f"a convolution of x {list(x.shape)} with a tail of {past} × {channels} wants as many channels, "
            f"and taps for each of its rows, not {list(taps.shape)}"
        )
    if own.width % (past + 1) or channels % max(1, heads):
        raise ShapeMismatch(
            f"{own.width} taps of a token are not {past + 1} for each of some heads of {channels} channels"
        )
    dense("fixed taps", fixed, past + 1, channels)
    dense("a slot's tail", tail[0], past, channels)
    where, out = Sequences.of(slots, query_start, has_history), cpu.empty(rows.count, channels)
    cpu.launch(
        *(head_conv_channels, channels, past + 1, heads, float(scale), x, rows.row_bytes),
        *(taps, own.row_bytes, fixed, tail, 4 * tail.stride(0), *where.words, out, cpu.row_slots_of(tail)),
        rows=rows.count,
        seqs=len(slots),
    )
    return out
