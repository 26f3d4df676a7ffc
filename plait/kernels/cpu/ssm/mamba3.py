"""oxidizr's Mamba3: what heads share; the scan, token by token, each head of a sequence by one thread."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from plait.errors import CannotRecord, ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int
from plait.kernels.cpu.codegen.maths import exp, load_left, store_left
from plait.kernels.cpu.codegen.vec import (
    add,
    fma,
    get_f32,
    load_bf16,
    load_f32,
    mul,
    put_f32,
    put_i64,
    spread,
    store_f32,
    total,
    word,
    words,
    zero_f32,
)
from plait.kernels.cpu.linear.packed import Groups, PackedWeight, multiply
from plait.kernels.cpu.pointwise.copy_rows import copy_row
from plait.kernels.cpu.runtime.address_table import keep_addresses
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of, take_sequence
from plait.kernels.cpu.runtime.frame_words import LINE
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense, float32_rows
from plait.kernels.cpu.ssm.rounding import (
    check_state,
    column_thresholds,
    is_rounded,
    rounds_columns,
    seed_at,
    store_rounded,
)
from plait.ops.linear import Linear
from plait.ops.mamba3 import mamba3_scan, map_each_head, norm_for_heads

TURN = 2 * math.pi


@inline
def _clear(a: Int, n: Int) -> None:
    for i in range(0, n, 16):
        store_left(a + 4 * i, zero_f32(), n - i)


@inline
def _rotate_pairs(b: Int, c: Int, n: Int, theta: Int, step: Float, angle: Int, to_b: Int, to_c: Int) -> None:
    """Copies of B and C, their pairs turned by the angle, which moves on first.

    The angle is rounded and kept below a full turn at every token: how a prompt is cut changes nothing.
    """
    if theta == 0:
        copy_row(b, to_b, n)
        copy_row(c, to_c, n)
        return
    for i in range(n // 2):
        at = np.float64(get_f32(angle + 4 * i)) + np.float64(get_f32(theta + 4 * i) * step)
        rounded = np.float32(at - TURN * math.floor(at / TURN))
        put_f32(angle + 4 * i, rounded)
        cos, sin = np.float32(math.cos(rounded)), np.float32(math.sin(rounded))
        p, q = get_f32(b + 8 * i), get_f32(b + 8 * i + 4)
        put_f32(to_b + 8 * i, p * cos - q * sin)
        put_f32(to_b + 8 * i + 4, p * sin + q * cos)
        p, q = get_f32(c + 8 * i), get_f32(c + 8 * i + 4)
        put_f32(to_c + 8 * i, p * cos - q * sin)
        put_f32(to_c + 8 * i + 4, p * sin + q * cos)


@inline
def _move(h: Int, n: Int, decay: Floats, v: Floats, b: Int, w: Floats, before: Int, c: Int) -> float:
    """One row of the state: h <- decay h + v b + w before; what it adds to y."""
    y = zero_f32()
    for i in range(0, n, 16):
        left = n - i
        s = fma(v, load_left(b + 4 * i, left), mul(w, load_left(before + 4 * i, left)))
        s = fma(load_left(h + 4 * i, left), decay, s)
        store_left(h + 4 * i, s, left)
        y = fma(s, load_left(c + 4 * i, left), y)
    return total(y)


@inline
def _move_rounded(
    h: Int, n: Int, decay: Floats, v: Floats, b: Int, w: Floats, before: Int, c: Int, seed: Int, row: Int
) -> float:
    """`_move` of a bfloat16 state. seed: of the token; row: the row's number in the slot's state."""
    y = zero_f32()
    for i in range(0, n, 16):
        s = fma(v, load_f32(b + 4 * i), mul(w, load_f32(before + 4 * i)))
        s = fma(load_bf16(h + 2 * i), decay, s)
        store_rounded(h + 2 * i, s, column_thresholds(seed, row, i))
        y = fma(s, load_f32(c + 4 * i), y)
    return total(y)


@kernel
def mamba3_heads(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, rows of one, n; x and B and C with two strides each, dt and blend with one; theta or 0 with two;
    A, D; state, angle or 0, prev_b, prev_x with a slot stride each; slots, query_start, has_history; out;
    positions where the state is bfloat16, else 0."""
    heads, dim, n, x, x_bytes, x_head, b, b_bytes, b_head, c, c_bytes, c_head = words(args, 2, 14)
    dt, dt_bytes, blend, blend_bytes, theta, theta_bytes, theta_head, rate, skip = words(args, 14, 23)
    state, state_slot, angle, angle_slot, prev_b, b_slot, prev_x, x_slot = words(args, 23, 31)
    slots, starts, history, out, positions = words(args, 31, 36)
    h_row, seed = n * (4 if positions == 0 else 2), np.int64(0)
    now_b, row = scratch_of(frame, thread), (4 * n + 63) // 64 * 64
    now_c, now = now_b + row, now_b + 2 * row
    while True:
        head, slot, past, first, tokens = take_sequence(frame, args, heads, (slots, starts, history))
        if head < 0:
            return
        h, turned = state + slot * state_slot + h_row * head * dim, angle + slot * angle_slot + 2 * head * n
        old_b, old_x = prev_b + slot * b_slot + 4 * head * n, prev_x + slot * x_slot + 4 * head * dim
        if not past:
            _clear(h, dim * h_row // 4)
            _clear(old_b, n)
            _clear(old_x, dim)
            if theta != 0:
                _clear(turned, n // 2)
        for t in range(first, first + tokens):
            step, share = get_f32(dt + t * dt_bytes + 4 * head), get_f32(blend + t * blend_bytes + 4 * head)
            decay = exp(spread(step * get_f32(rate + 4 * head)))
            store_f32(now, decay)
            gamma, beta = share * step, (np.float32(1.0) - share) * step * get_f32(now)
            turn = theta + t * theta_bytes + head * theta_head if theta != 0 else np.int64(0)
            ub, uc = b + t * b_bytes + head * b_head, c + t * c_bytes + head * c_head
            _rotate_pairs(ub, uc, n, turn, step, turned, now_b, now_c)
            if positions != 0:
                seed = np.int64(seed_at(positions, t))
            for p in range(dim):
                u = get_f32(x + t * x_bytes + head * x_head + 4 * p)
                v, w = spread(gamma * u), spread(beta * get_f32(old_x + 4 * p))
                own = h + h_row * p
                if positions == 0:
                    y = _move(own, n, decay, v, now_b, w, old_b, now_c)
                else:
                    y = _move_rounded(own, n, decay, v, now_b, w, old_b, now_c, seed, head * dim + p)
                put_f32(out + 4 * ((t * heads + head) * dim + p), y + get_f32(skip + 4 * head) * u)
                put_f32(old_x + 4 * p, u)
            copy_row(now_b, old_b, n)


@mamba3_scan.variant("native", on="cpu", when=rounds_columns("state"), native=True)
def _mamba3_scan(
    cpu: Executor,
    x: Tensor,
    dt: Tensor,
    blend: Tensor,
    theta: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    angle: Tensor | None,
    prev_b: Tensor,
    prev_x: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """`num_decodes` and `chunk_size` change from step to step, and nothing here depends on them."""
    (count, heads, dim), size = x.shape, B.shape[-1]
    rows, where = [TensorRows.of(m) for m in (x, B, C)], Sequences.of(slots, query_start, has_history)
    turns = theta is not None and angle is not None
    halves = (count, heads, size // 2)
    if (
        B.shape != (count, heads, size)
        or C.shape != B.shape
        or dt.shape != (count, heads)
        or blend.shape != dt.shape
        or (theta is not None and angle is not None and (theta.shape != halves or size % 2))
    ):
        raise ShapeMismatch(
            f"a scan of x {list(x.shape)} wants dt, blend [T, H], B, C [T, H, N] and theta [T, H, N/2]; got "
            f"{[list(m.shape) for m in (dt, blend, B, C)]} and {None if theta is None else list(theta.shape)}"
        )
    dense("A", A, heads)
    dense("D", D, heads)
    slot_bytes = check_state(state, positions, count, heads, dim, size)
    dense("a slot's prev_b", prev_b[0], heads, size)
    dense("a slot's prev_x", prev_x[0], heads, dim)
    turning: tuple[object, ...] = (None, 0, 0)
    if theta is not None and angle is not None:
        dense("a slot's angle", angle[0], heads, size // 2)
        turning = (theta, *TensorRows.of(theta).strides)
    out = cpu.empty(count, heads, dim)
    strided = [word for m, r in zip((x, B, C), rows, strict=True) for word in (m, *r.strides)]
    kept = (angle if turns else None, prev_b, prev_x)
    places = [state, slot_bytes]
    places += [word for m in kept for word in (m, 0 if m is None else 4 * m.stride(0))]
    cpu.launch(
        mamba3_heads,
        *(heads, dim, size, *strided, dt, TensorRows.of(dt).row_bytes, blend),
        *(TensorRows.of(blend).row_bytes, *turning, A, D, *places, *where.words, out),
        positions if is_rounded(state) else None,
        rows=count,
        seqs=len(slots),
        scratch=2 * (-(-4 * size // LINE) * LINE) + LINE,
    )
    return out


@kernel
def norm_heads(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and group strides, groups, heads of each, n, weight, bias (dense), eps, out (dense)."""
    x, row_bytes, group_bytes, groups, heads, n, weight, bias = words(args, 2, 10)
    eps, out = get_f32(args + 80), word(args, 11)
    items = rows_of(frame, args) * groups
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        group, squares = item % groups, zero_f32()
        own, to = x + item // groups * row_bytes + group * group_bytes, out + 4 * n * heads * item
        for i in range(0, n, 16):
            h = load_left(own + 4 * i, n - i)
            squares = fma(h, h, squares)
        factor = spread(np.float32(1.0 / math.sqrt(np.float64(total(squares)) / n + np.float64(eps))))
        for i in range(0, n, 16):
            h = mul(mul(load_left(own + 4 * i, n - i), factor), load_left(weight + 4 * i, n - i))
            for head in range(heads):
                shift = load_left(bias + 4 * (n * (heads * group + head) + i), n - i)
                store_left(to + 4 * (n * head + i), add(h, shift), n - i)


@norm_for_heads.variant("native", on="cpu", when=float32_rows, native=True)
def _norm_for_heads(cpu: Executor, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    rows, heads = TensorRows.of(x), len(bias)
    if x.dim() != 3 or heads % rows.heads:
        raise ShapeMismatch(f"{heads} heads cannot share the groups of x {list(x.shape)} evenly")
    dense("weight", weight, rows.width)
    dense("bias", bias, heads, rows.width)
    out = cpu.empty(rows.count, heads, rows.width)
    each = heads // rows.heads
    where = (x, *rows.strides, rows.heads, each, rows.width)
    cpu.launch(norm_heads, *where, weight, bias, float(eps), out, rows=rows.count)
    return out


@kernel
def heads_as_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """heads, starts (int64 [2]), x, its row and head strides, n, copy (dense) or 0: counts the rows."""
    heads, starts, x, row_bytes, head_bytes, n, out = words(args, 2, 9)
    items = rows_of(frame, args) * heads
    if thread == 0:
        put_i64(starts, 0)
        put_i64(starts + 8, items)
    if out == 0:
        return
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        copy_row(x + i // heads * row_bytes + i % heads * head_bytes, out + 4 * n * i, n)


@map_each_head.variant("native", on="cpu", when=float32_rows, native=True)
def _map_each_head(cpu: Executor, x: Tensor, linear: Linear) -> Tensor:
    """One group of rows, as experts have several: how many there are is read from memory, not the frame.

    Raises CannotRecord in a recording if the weight is not a packed one.
    """
    part, rows = linear.only_part, TensorRows.of(x)
    if part is None or not isinstance(part[0], PackedWeight):
        if cpu.is_recording:
            raise CannotRecord("a linear layer that heads share is not one packed weight")
        return map_each_head.reference(x, linear)  # type: ignore[no-any-return]
    weight, bias, rounding = part
    spaced = x.dim() != 3 or rows.row_bytes != rows.heads * rows.head_bytes
    starts = cpu.empty(2, dtype=torch.int64)
    flat = cpu.empty(rows.count * rows.heads, rows.width) if spaced else x.view(-1, rows.width)
    where = (rows.heads, starts, x, *rows.strides, rows.width)
    cpu.launch(heads_as_rows, *where, flat if spaced else None, rows=rows.count)
    address = keep_addresses(np.array([weight.data.data_ptr()], np.int64), [weight.data])
    y = multiply(cpu, flat, weight, bias, rounding, groups=Groups(1, starts, address), rows=rows.count)
    return y.view(*x.shape[:-1], weight.n_out)
