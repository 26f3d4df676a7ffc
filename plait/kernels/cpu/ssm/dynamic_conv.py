"""A short convolution with taps of each token: sixteen channels at a time, the oldest tap first."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.maths import silu
from plait.kernels.cpu.codegen.vec import fma, load_some, store_some, words, zero_f32
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.ops.dynamic_conv import dynamic_conv

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
            for r in range(past):  # oldest first, so that none is overwritten before it moves
                source = tokens + r
                v = zero_f32()
                if source >= past:
                    v = load_some(x + (source - past) * x_bytes, left)
                elif known:
                    v = load_some(tail + 4 * n * source, left)
                store_some(tail + 4 * n * r, v, left)


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
