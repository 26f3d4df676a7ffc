"""The short convolution in front of a state-space scan, sixteen channels at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.executor import Executor
from plait.kernels.cpu.frame import SEQS, scratch_of, word
from plait.kernels.cpu.kernel import inline, kernel
from plait.kernels.cpu.maths import silu
from plait.kernels.cpu.rows import Rows, float32_rows
from plait.kernels.cpu.vec import (
    fma,
    get_f32,
    get_i64,
    get_u8,
    load_f32,
    load_some,
    put_f32,
    store_f32,
    store_some,
    zero_f32,
)
from plait.ops.conv import causal_conv


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the sequences of a batch lie: what kernels read per sequence, checked."""

    slots: Tensor
    query_start: Tensor
    has_history: Tensor

    @classmethod
    def of(cls, slots: Tensor, query_start: Tensor, has_history: Tensor) -> Sequences:
        """Raises ShapeMismatch if a kernel would misread them."""
        wanted = (
            ("slots", slots, torch.int64, len(slots)),
            ("query_start", query_start, torch.int64, len(slots) + 1),
            ("has_history", has_history, torch.bool, len(slots)),
        )
        for name, tensor, dtype, size in wanted:
            if tensor.dtype != dtype or tensor.shape != (size,) or not tensor.is_contiguous():
                raise ShapeMismatch(
                    f"a kernel wants {name} as {dtype} [{size}], dense; got {tensor.dtype} "
                    f"{list(tensor.shape)} with strides {tensor.stride()}"
                )
        return cls(slots, query_start, has_history)

    @property
    def words(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.slots, self.query_start, self.has_history


def dense(name: str, tensor: Tensor, *shape: int) -> Tensor:
    """The float32 tensor of that shape, dense. Raises ShapeMismatch if it is another."""
    if tensor.dtype != torch.float32 or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ShapeMismatch(
            f"a kernel wants {name} as torch.float32 {list(shape)}, dense; got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor


@inline
def _load(a, left):
    """Sixteen floats, or the `left` that there are; without a mask where all are there."""
    if left >= 16:
        return load_f32(a)
    return load_some(a, np.int32(left))


@inline
def _store(a, x, left):
    if left >= 16:
        store_f32(a, x)
    else:
        store_some(a, x, np.int32(left))


@inline
def _gather_taps(weight, kernel, left, taps):
    """taps [kernel, 16] of sixteen channels, from weight [channel, kernel]."""
    for k in range(kernel):
        store_f32(taps + 64 * k, zero_f32())
    for c in range(min(left, 16)):
        for k in range(kernel):
            put_f32(taps + 64 * k + 4 * c, get_f32(weight + 4 * (c * kernel + k)))


@inline
def _outputs(x, x_bytes, tail, tail_bytes, tokens, taps, kernel, bias, silent, out, out_bytes, left):
    """Sixteen channels of one sequence; tail 0: there is no history. Taps are added oldest first."""
    past = kernel - 1
    for t in range(tokens):
        y = bias
        first = t - past  # row of the oldest input, counted from this chunk's first
        unseen = min(max(-first, 0), kernel)
        if tail != 0:
            for k in range(unseen):
                y = fma(_load(tail + (t + k) * tail_bytes, left), load_f32(taps + 64 * k), y)
        row = x + (first + unseen) * x_bytes
        for k in range(unseen, kernel):
            y = fma(_load(row, left), load_f32(taps + 64 * k), y)
            row += x_bytes
        _store(out + t * out_bytes, y if silent else silu(y), left)


@inline
def _move_tail(x, x_bytes, tail, tail_bytes, tokens, past, has_history, left):
    """The tail becomes the last `past` inputs; oldest first, so that none is overwritten before it moves."""
    for r in range(past):
        at = tokens + r  # counted from the first row of the old tail
        if at >= past:
            v = _load(x + (at - past) * x_bytes, left)
        elif has_history:
            v = _load(tail + at * tail_bytes, left)
        else:
            v = zero_f32()
        _store(tail + r * tail_bytes, v, left)


@kernel
def conv_channels(frame, args, thread, threads):
    """x, row stride, channels, weight, kernel, bias or 0, tail, slot and row strides, slots, query_start,
    has_history, silent (no activation), out (dense)."""
    x, x_bytes, channels, weight = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    kernel, bias, tail, slot_bytes = word(args, 6), word(args, 7), word(args, 8), word(args, 9)
    tail_bytes, slots, start, history = word(args, 10), word(args, 11), word(args, 12), word(args, 13)
    silent, out = word(args, 14) != 0, word(args, 15)
    seqs, taps, past = get_i64(frame + 8 * SEQS), scratch_of(frame, thread), kernel - 1
    blocks = (channels + 15) // 16
    for block in range(blocks * thread // threads, blocks * (thread + 1) // threads):
        at, left = 64 * block, channels - 16 * block
        _gather_taps(weight + at * kernel, kernel, left, taps)
        shift = zero_f32()
        if bias != 0:
            shift = _load(bias + at, left)
        for s in range(seqs):
            begin = get_i64(start + 8 * s)
            tokens = get_i64(start + 8 * s + 8) - begin
            has_history = get_u8(history + s) != 0
            own = tail + get_i64(slots + 8 * s) * slot_bytes + at
            rows = x + begin * x_bytes + at
            to = out + 4 * begin * channels + at
            known = own if has_history else np.int64(0)
            _outputs(
                rows, x_bytes, known, tail_bytes, tokens, taps, kernel, shift, silent, to, 4 * channels, left
            )
            if tokens > 0:
                _move_tail(rows, x_bytes, own, tail_bytes, tokens, past, has_history, left)


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
    rows, (channels, width) = Rows.of(x), weight.shape
    if x.dim() != 2 or rows.width != channels or tail.shape[1:] != (width - 1, channels):
        raise ShapeMismatch(
            f"a convolution of weight {list(weight.shape)} wants x [T, {channels}] and a tail [slots, "
            f"{width - 1}, {channels}]; got {list(x.shape)} and {list(tail.shape)}"
        )
    if activation not in ("silu", None):
        raise ShapeMismatch(f"a convolution is followed by 'silu' or None, not by {activation!r}")
    memory, where = Rows.of(tail), Sequences.of(slots, query_start, has_history)
    dense("weight", weight, channels, width)
    if bias is not None:
        dense("bias", bias, channels)
    out = cpu.empty(rows.count, channels)
    cpu.launch(
        *(conv_channels, x, rows.row_bytes, channels, weight, width, bias),
        *(tail, *memory.strides, *where.words, activation is None, out),
        rows=rows.count,
        seqs=len(slots),
        scratch=64 * width,
    )
    return out
