"""Griffin's recurrence, sixteen channels at a time: a channel's numbers depend on no other channel."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.maths import exp, sigmoid, tanh
from plait.kernels.cpu.codegen.vec import (
    add,
    atomic_add,
    div,
    fma,
    get_i64,
    get_u8,
    load_some,
    mul,
    root,
    spread,
    store_some,
    sub,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import SEQS, word
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.kernels.cpu.ssm.conv import Sequences, dense
from plait.ops.rg_lru import rg_lru

CHANNELS = 64  # of a head that one thread takes at a time


@inline
def _input_scale(log_a: Floats) -> Floats:
    """√(1 - a²), a = exp(log_a): 1 - exp(-2x) = 2 tanh(x) / (1 + tanh(x)) loses no digits near 0."""
    t, one = tanh(sub(zero_f32(), log_a)), spread(np.float32(1.0))
    return root(div(add(t, t), add(one, t)))


@inline
def _channels(
    state: Int,
    x: Int,
    x_bytes: Int,
    gates: Int,
    gate_bytes: Int,
    dim: Int,
    bias: Int,
    rate: Int,
    out: Int,
    out_bytes: Int,
    tokens: Int,
    past: Int,
    left: Int,
) -> None:
    """All tokens of a sequence over at most sixteen channels; the recurrence's gate is `dim` behind."""
    h, low, high = load_some(state, left), load_some(bias, left), load_some(bias + 4 * dim, left)
    speed = load_some(rate, left)
    for t in range(tokens):
        z = gates + t * gate_bytes
        u = mul(sigmoid(add(load_some(z, left), low)), load_some(x + t * x_bytes, left))
        log_a = mul(speed, sigmoid(add(load_some(z + 4 * dim, left), high)))
        h = fma(exp(log_a), h, mul(_input_scale(log_a), u)) if past or t > 0 else u
        store_some(out + t * out_bytes, h, left)
    store_some(state, h, left)


@kernel
def rg_lru_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, channels of one; x, its stride; gates, their row and head strides; bias, rate; state, its slot
    stride; slots, query_start, has_history; out (dense)."""
    heads, dim, x, x_bytes = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    gates, gate_bytes, gate_head = word(args, 6), word(args, 7), word(args, 8)
    bias, rate, state, slot_bytes = word(args, 9), word(args, 10), word(args, 11), word(args, 12)
    slots, starts, history, out = word(args, 13), word(args, 14), word(args, 15), word(args, 16)
    counter, parts = word(args, 1), (dim + CHANNELS - 1) // CHANNELS
    items = get_i64(frame + 8 * SEQS) * heads * parts
    while True:
        # The last sequences come first: prompts, the long work, are behind the decodes.
        i = items - 1 - np.int64(atomic_add(counter, np.int32(1)))
        if i < 0:
            return
        s, h, first = i // (heads * parts), i // parts % heads, i % parts * CHANNELS
        t, past = get_i64(starts + 8 * s), get_u8(history + s) != 0
        tokens = get_i64(starts + 8 * s + 8) - t
        if tokens < 1:
            continue
        last = min(first + CHANNELS, np.int64(dim))
        for c in range(first, last, 16):
            at = 4 * (h * dim + c)
            _channels(
                state + get_i64(slots + 8 * s) * slot_bytes + at,
                x + t * x_bytes + at,
                x_bytes,
                gates + t * gate_bytes + h * gate_head + 4 * c,
                gate_bytes,
                dim,
                bias + 4 * (2 * h * dim + c),
                rate + at,
                out + 4 * t * heads * dim + at,
                4 * heads * dim,
                tokens,
                past,
                np.int32(min(dim - c, 16)),
            )


@rg_lru.variant("native", on="cpu", when=float32_rows, native=True)
def _rg_lru(
    cpu: Executor,
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    rate: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> Tensor:
    """`num_decodes` changes from step to step, and nothing here depends on it."""
    (count, width), (heads, double) = x.shape, gates.shape[1:]
    if len(gates) != count or 2 * width != heads * double:
        raise ShapeMismatch(
            f"a recurrence of x {list(x.shape)} wants gates [T, H, 2 W/H], got {list(gates.shape)}"
        )
    dense("bias", bias, heads, double)
    dense("rate", rate, width)
    dense("a slot's state", state[0], width)
    where, rows = Sequences.of(slots, query_start, has_history), TensorRows.of(x)
    out = cpu.empty(count, width)
    cpu.launch(
        *(rg_lru_channels, heads, double // 2, x, rows.row_bytes, gates, *TensorRows.of(gates).strides),
        *(bias, rate, state, 4 * state.stride(0), *where.words, out),
        rows=count,
        seqs=len(slots),
    )
    return out
