"""State-space scans, token by token: every state is read and written once per call, in its slot.

A state's rows are shared out over threads; a row's numbers, and what belongs to its y, are computed in one
order whatever the batch, the threads, or how a prompt is cut.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Int
from plait.kernels.cpu.codegen.maths import exp, load_left, store_left
from plait.kernels.cpu.codegen.vec import (
    atomic_add,
    fma,
    get_f32,
    get_i64,
    get_u8,
    mul,
    put_f32,
    spread,
    total,
    where_less,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import SEQS, word
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.kernels.cpu.ssm.conv import Sequences, dense
from plait.kernels.cpu.ssm.scan_source import LARGEST, mamba2_kernel, scratch_bytes
from plait.ops.registry import OpFacts
from plait.ops.ssm import mamba1_scan, mamba2_scan

CHANNELS = 64  # of a Mamba1 layer that one thread takes at a time


def narrow_states(facts: OpFacts) -> str | None:
    """The `when` of scans with generated text that has a line per sixteen columns."""
    if (size := facts.sizes.get("state", 0)) > LARGEST:
        return f"its states have {size} columns, more than {LARGEST}"
    return float32_rows(facts)


@mamba2_scan.variant("native", on="cpu", when=narrow_states, native=True)
def _mamba2_scan(
    cpu: Executor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
) -> Tensor:
    """`num_decodes` and `chunk_size` change from step to step, and nothing here depends on them."""
    count, heads, dim = x.shape
    groups, size = B.shape[1:]
    rows, steps, where = TensorRows.of(x), TensorRows.of(dt), Sequences.of(slots, query_start, has_history)
    if dt.shape != (count, heads) or heads % groups or B.shape[0] != count or B.shape != C.shape:
        raise ShapeMismatch(
            f"a scan of x {list(x.shape)} wants dt [T, H] and B, C [T, G, N], H a multiple of G; got "
            f"{list(dt.shape)}, {list(B.shape)} and {list(C.shape)}"
        )
    dense("A", A, heads)
    if D is not None:
        dense("D", D, heads)
    dense("a slot's state", state[0], heads, dim, size)
    out = cpu.empty(count, heads, dim)
    cpu.launch(
        *(mamba2_kernel(size), heads, dim, heads // groups, x, *rows.strides, dt, steps.row_bytes, A, D),
        *(
            B,
            *TensorRows.of(B).strides,
            C,
            *TensorRows.of(C).strides,
            state,
            4 * state.stride(0),
            *where.words,
            out,
        ),
        rows=count,
        seqs=len(slots),
        scratch=scratch_bytes(size),
    )
    return out


@inline
def _channel(
    h: Int, n: Int, step: Float, u: Float, a: Int, b: Int, c: Int, limit: Float, limited: Int
) -> float:
    """One token of one channel: its n numbers move on; what they add to y."""
    y, size, v = zero_f32(), spread(step), spread(step * u)
    low, high = spread(-limit), spread(limit)
    for i in range(0, n, 16):
        left = n - i
        decay = exp(mul(size, load_left(a + 4 * i, left)))
        s = fma(decay, load_left(h + 4 * i, left), mul(v, load_left(b + 4 * i, left)))
        if limited:  # by comparisons, which leave a NaN as it is
            s = where_less(s, low, low, s)
            s = where_less(high, s, high, s)
        store_left(h + 4 * i, s, left)
        y = fma(s, load_left(c + 4 * i, left), y)
    return total(y)


@kernel
def mamba1_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """channels, n; x, dt, B, C with a row stride each; A, D or 0; limit, limited; state, its slot stride;
    slots, query_start, has_history; out (dense)."""
    inner, n, x, x_bytes, dt = word(args, 2), word(args, 3), word(args, 4), word(args, 5), word(args, 6)
    dt_bytes, b, b_bytes = word(args, 7), word(args, 8), word(args, 9)
    c, c_bytes = word(args, 10), word(args, 11)
    decay, skip, limit, limited = word(args, 12), word(args, 13), get_f32(args + 112), word(args, 15) != 0
    state, slot_bytes, slots, starts = word(args, 16), word(args, 17), word(args, 18), word(args, 19)
    history, out, counter = word(args, 20), word(args, 21), word(args, 1)
    parts = (inner + CHANNELS - 1) // CHANNELS
    items = get_i64(frame + 8 * SEQS) * parts
    while True:
        # The last sequences come first: prompts, the long work, are behind the decodes.
        i = items - 1 - np.int64(atomic_add(counter, np.int32(1)))
        if i < 0:
            return
        s, first = i // parts, i % parts * CHANNELS
        own = state + get_i64(slots + 8 * s) * slot_bytes
        last = min(first + CHANNELS, np.int64(inner))
        begin, end = get_i64(starts + 8 * s), get_i64(starts + 8 * s + 8)
        if end > begin and get_u8(history + s) == 0:
            for j in range(first * n, last * n, 16):
                store_left(own + 4 * j, zero_f32(), last * n - j)
        for t in range(begin, end):
            ub, uc, to = b + t * b_bytes, c + t * c_bytes, out + 4 * t * inner
            for k in range(first, last):
                u, step = get_f32(x + t * x_bytes + 4 * k), get_f32(dt + t * dt_bytes + 4 * k)
                y = _channel(own + 4 * n * k, n, step, u, decay + 4 * n * k, ub, uc, limit, limited)
                if skip != 0:
                    y += get_f32(skip + 4 * k) * u
                put_f32(to + 4 * k, y)


@mamba1_scan.variant("native", on="cpu", when=float32_rows, native=True)
def _mamba1_scan(
    cpu: Executor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    state_limit: float | None = None,
) -> Tensor:
    (count, inner), size = x.shape, B.shape[-1]
    rows, where = [TensorRows.of(m) for m in (x, dt, B, C)], Sequences.of(slots, query_start, has_history)
    if x.shape != dt.shape or B.shape != (count, size) or C.shape != B.shape:
        raise ShapeMismatch(
            f"a scan of x {list(x.shape)} wants dt of that shape and B, C [T, N]; got {list(dt.shape)}, "
            f"{list(B.shape)} and {list(C.shape)}"
        )
    dense("A", A, inner, size)
    if D is not None:
        dense("D", D, inner)
    dense("a slot's state", state[0], inner, size)
    out = cpu.empty(count, inner)
    strided = [word for m, r in zip((x, dt, B, C), rows, strict=True) for word in (m, r.row_bytes)]
    limit = 0.0 if state_limit is None else float(state_limit)
    cpu.launch(
        mamba1_channels,
        *(inner, size, *strided, A, D, limit, state_limit is not None),
        *(state, 4 * state.stride(0), *where.words, out),
        rows=count,
        seqs=len(slots),
    )
    return out
