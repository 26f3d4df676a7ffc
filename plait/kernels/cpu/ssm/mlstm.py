"""xLSTM's matrix memory: a thread takes one head of one sequence through all of its tokens.

memory   [key column][value column]   64 value columns are moved on over all key columns at a time
norms    [key column]                 moved on first, for the divisor
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.maths import exp, softplus
from plait.kernels.cpu.codegen.vec import (
    absolute,
    add,
    div,
    fma,
    get_f32,
    load_f32,
    load_some,
    mul,
    peak,
    prefetch_l2,
    put_f32,
    spread,
    spread_f32,
    store_f32,
    store_some,
    sub,
    total,
    where_less,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.ops.mlstm import mlstm_scan

WIDTH = 64  # value columns that move on together: four vectors
AHEAD = 8  # rows of a memory that are fetched early
Gates = tuple[Floats, Floats, Floats, Floats]
"""Of the input and of the memory, in every lane; the scale of what is read, and what divides it."""


@inline
def _clear(at: Int, n: Int) -> None:
    """n floats become 0."""
    for c in range(0, n, 16):
        store_some(at + 4 * c, zero_f32(), np.int32(n - c))


@inline
def _move_norms(q: Int, k: Int, n: Int, f: Floats, i: Floats, norms: Int) -> Floats:
    """n ← f n + i k; q · n, in every lane."""
    dot = zero_f32()
    for c in range(0, n, 16):
        left = np.int32(n - c)
        new = fma(f, load_some(norms + 4 * c, left), mul(i, load_some(k + 4 * c, left)))
        store_some(norms + 4 * c, new, left)
        dot = fma(load_some(q + 4 * c, left), new, dot)
    return spread(total(dot))


@inline
def _move(
    C: Int, row: Int, size: Int, q: Int, k: Int, v: Int, gates: Gates, out: Int, left: np.int32
) -> None:
    """At most sixteen value columns move on over all key columns: C ← f C + i k v; out is what q reads."""
    i, f, scale, divisor = gates
    value, y = mul(i, load_some(v, left)), zero_f32()
    for j in range(size):
        at = C + row * j
        new = fma(f, load_some(at, left), mul(spread(get_f32(k + 4 * j)), value))
        store_some(at, new, left)
        y = fma(spread(get_f32(q + 4 * j)), new, y)
    store_some(out, div(mul(y, scale), divisor), left)


@inline
def _move_wide(C: Int, row: Int, size: Int, q: Int, k: Int, v: Int, gates: Gates, out: Int) -> None:
    """`_move` of WIDTH columns: so whole lines of each row come from memory together."""
    i, f, scale, divisor = gates
    v_a, v_b, y_a, y_b = mul(i, load_f32(v)), mul(i, load_f32(v + 64)), zero_f32(), zero_f32()
    v_c, v_d, y_c, y_d = mul(i, load_f32(v + 128)), mul(i, load_f32(v + 192)), zero_f32(), zero_f32()
    for j in range(size):
        at, key, query = C + row * j, spread_f32(k + 4 * j), spread_f32(q + 4 * j)
        for n in range(0, 256, 64):
            prefetch_l2(at + AHEAD * row + n)
        a, b = fma(f, load_f32(at), mul(key, v_a)), fma(f, load_f32(at + 64), mul(key, v_b))
        c, d = fma(f, load_f32(at + 128), mul(key, v_c)), fma(f, load_f32(at + 192), mul(key, v_d))
        store_f32(at, a)
        store_f32(at + 64, b)
        store_f32(at + 128, c)
        store_f32(at + 192, d)
        y_a, y_b, y_c, y_d = fma(query, a, y_a), fma(query, b, y_b), fma(query, c, y_c), fma(query, d, y_d)
    store_f32(out, div(mul(y_a, scale), divisor))
    store_f32(out + 64, div(mul(y_b, scale), divisor))
    store_f32(out + 128, div(mul(y_c, scale), divisor))
    store_f32(out + 192, div(mul(y_d, scale), divisor))


@kernel
def scan_memory(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, key size, value size; q, k, v, each with row and head strides; both gates, each with its row
    stride; memory, norms, largest, each with its slot stride; slots, query_start, has_history; scale,
    eps; out (dense)."""
    heads, size, dim, qs, q_row, q_head, ks, k_row, k_head, vs, v_row, v_head = words(args, 2, 14)
    enters, e_row, forgets, f_row, memory, memory_slot, norms, norm_slot, tops, top_slot = words(args, 14, 24)
    slots, starts, history, _, _, outs = words(args, 24, 30)
    scale, eps = get_f32(args + 8 * 27), get_f32(args + 8 * 28)
    while True:
        h, slot, past, first, tokens = take_sequence(frame, args, heads, (slots, starts, history))
        if h < 0:
            return
        C, n = memory + slot * memory_slot + 4 * h * size * dim, norms + slot * norm_slot + 4 * h * size
        top_at = tops + slot * top_slot + 4 * h
        if past == 0:
            _clear(C, size * dim)
            _clear(n, size)
            put_f32(top_at, np.float32(0.0))
        for t in range(first, first + tokens):
            q, k, v = qs + t * q_row + h * q_head, ks + t * k_row + h * k_head, vs + t * v_row + h * v_head
            enter = spread(get_f32(enters + t * e_row + 4 * h))
            forget = spread(get_f32(forgets + t * f_row + 4 * h))
            kept = sub(spread(get_f32(top_at)), softplus(sub(zero_f32(), forget)))  # ln sigmoid(forget) + m
            top = where_less(enter, kept, kept, enter)
            # exp makes a number of a NaN: what is none goes into both gates by a product with 0.
            f = fma(sub(kept, top), zero_f32(), exp(sub(kept, top)))
            i = fma(sub(enter, top), zero_f32(), exp(sub(enter, top)))
            put_f32(top_at, peak(top))
            dot = absolute(mul(_move_norms(q, k, size, f, i, n), spread(scale)))
            least = exp(sub(zero_f32(), top))
            divisor = add(where_less(dot, least, least, dot), spread(eps))
            over, wide = (i, f, spread(scale), divisor), dim // WIDTH * WIDTH
            for c in range(0, wide, WIDTH):
                _move_wide(
                    C + 4 * c, 4 * dim, size, q, k, v + 4 * c, over, outs + 4 * ((t * heads + h) * dim + c)
                )
            for c in range(wide, dim, 16):
                left, to = np.int32(dim - c), outs + 4 * ((t * heads + h) * dim + c)
                _move(C + 4 * c, 4 * dim, size, q, k, v + 4 * c, over, to, left)


@mlstm_scan.variant("native", on="cpu", when=float32_rows, native=True)
def _mlstm_scan(
    cpu: Executor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    enter: Tensor,
    forget: Tensor,
    memory: Tensor,
    norms: Tensor,
    largest: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    eps: float,
) -> Tensor:
    """`num_decodes` changes from step to step, and nothing here depends on it."""
    rows = [TensorRows.of(x) for x in (q, k, v)]
    count, heads, size, dim = rows[0].count, rows[0].heads, rows[0].width, rows[2].width
    gates = [TensorRows.of(x) for x in (enter, forget)]
    if k.shape != q.shape or v.shape[:2] != q.shape[:2] or {g.width for g in gates} != {heads}:
        raise ShapeMismatch(f"mLSTM: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit")
    dense("a slot's memory", memory[0], heads, size, dim)
    dense("a slot's norms", norms[0], heads, size)
    dense("a slot's exponents", largest[0], heads)
    where, out = Sequences.of(slots, query_start, has_history), cpu.empty(count, heads, dim)
    given = [word for x, r in zip((q, k, v), rows, strict=True) for word in (x, *r.strides)]
    given += [word for x, r in zip((enter, forget), gates, strict=True) for word in (x, r.row_bytes)]
    given += [word for x in (memory, norms, largest) for word in (x, 4 * x.stride(0))]
    scale = float(size) ** -0.5
    cpu.launch(
        *(scan_memory, heads, size, dim, *given, *where.words, scale, float(eps), out),
        rows=count,
        seqs=len(slots),
    )
    return out
