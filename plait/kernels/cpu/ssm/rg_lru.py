"""Griffin's recurrence, sixteen channels at a time: a channel's numbers depend on no other channel."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats
from plait.kernels.cpu.codegen.maths import exp, sigmoid, tanh
from plait.kernels.cpu.codegen.vec import (
    add,
    div,
    fma,
    load_bf16,
    load_some,
    mul,
    root,
    spread,
    store_some,
    sub,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense
from plait.kernels.cpu.ssm.rounding import (
    check_state,
    column_thresholds,
    is_rounded,
    round_state,
    rounds_columns,
    seed_at,
    store_kept,
)
from plait.ops.rg_lru import rg_lru

CHANNELS = 64  # of a head that one thread takes at a time


@inline
def _input_scale(log_a: Floats) -> Floats:
    """√(1 - a²), a = exp(log_a): 1 - exp(-2x) = 2 tanh(x) / (1 + tanh(x)) loses no digits near 0."""
    t, one = tanh(sub(zero_f32(), log_a)), spread(np.float32(1.0))
    return root(div(add(t, t), add(one, t)))


@kernel
def rg_lru_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, channels of one; x, its stride; gates, their row and head strides; bias, rate; state, its slot
    stride; slots, query_start, has_history; out (dense); positions
    where the state is bfloat16, else 0. The recurrence's gates are behind the input's."""
    heads, dim, xs, x_bytes, gates, gate_bytes, gate_head, bias, rate = words(args, 2, 11)
    state, slot_bytes, slots, starts, history, outs, positions = words(args, 11, 18)
    parts, out_bytes = (dim + CHANNELS - 1) // CHANNELS, 4 * heads * dim
    while True:
        i, slot, past, first, tokens = take_sequence(frame, args, heads * parts, (slots, starts, history))
        if i < 0:
            return
        head, begin = i // parts, i % parts * CHANNELS
        for c in range(begin, min(begin + CHANNELS, np.int64(dim)), 16):
            at, left = 4 * (head * dim + c), np.int32(min(dim - c, 16))
            own = state + slot * slot_bytes + (at if positions == 0 else at // 2)
            shifts = bias + 4 * (2 * head * dim + c)
            x, out = xs + first * x_bytes + at, outs + first * out_bytes + at
            z = gates + first * gate_bytes + head * gate_head + 4 * c
            h = load_some(own, left) if positions == 0 else load_bf16(own)
            low, high = load_some(shifts, left), load_some(shifts + 4 * dim, left)
            speed = load_some(rate + at, left)
            for t in range(tokens):
                u = mul(sigmoid(add(load_some(z, left), low)), load_some(x + t * x_bytes, left))
                log_a = mul(speed, sigmoid(add(load_some(z + 4 * dim, left), high)))
                h = fma(exp(log_a), h, mul(_input_scale(log_a), u)) if past or t > 0 else u
                store_some(out + t * out_bytes, h, left)
                if positions != 0:
                    h = round_state(h, column_thresholds(seed_at(positions, first + t), 0, at // 4))
                z += gate_bytes
            if positions == 0:
                store_some(own, h, left)
            else:
                store_kept(own, h)


@rg_lru.variant("native", on="cpu", when=rounds_columns("dim"), native=True)
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
    positions: Tensor | None = None,
) -> Tensor:
    """`num_decodes` changes from step to step, and nothing here depends on it."""
    (count, width), (heads, double) = x.shape, gates.shape[1:]
    if len(gates) != count or 2 * width != heads * double:
        raise ShapeMismatch(
            f"a recurrence of x {list(x.shape)} wants gates [T, H, 2 W/H], got {list(gates.shape)}"
        )
    dense("bias", bias, heads, double)
    dense("rate", rate, width)
    slot_bytes = check_state(state, positions, count, width)
    where, rows = Sequences.of(slots, query_start, has_history), TensorRows.of(x)
    out = cpu.empty(count, width)
    cpu.launch(
        *(rg_lru_channels, heads, double // 2, x, rows.row_bytes, gates, *TensorRows.of(gates).strides),
        *(bias, rate, state, slot_bytes, *where.words, out, positions if is_rounded(state) else None),
        rows=count,
        seqs=len(slots),
    )
    return out
