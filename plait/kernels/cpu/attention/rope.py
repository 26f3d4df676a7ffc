"""Rotary positions, in float32: cosines and sines are computed once per token, for all its heads."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int, Ints
from plait.kernels.cpu.codegen.maths import polynomial
from plait.kernels.cpu.codegen.vec import (
    add,
    and_i32,
    bits_f32,
    bits_i32,
    fma,
    get_f32,
    get_i64,
    interleave_high,
    interleave_low,
    left,
    load_some,
    mul,
    nearest,
    or_i32,
    right,
    spread,
    spread_int,
    store_f32,
    store_some,
    sub,
    sub_i32,
    to_i32,
    words,
    zero_i32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.rope import rotate

_sine_terms = polynomial(
    "sine_terms", 2.718311493989822e-6, -1.983931190834e-4, 8.33332938589e-3, -1.66666666416e-1
)
_cosine_terms = polynomial(
    "cosine_terms", 2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2, -0.5, 1.0
)


@inline
def _select(mask: Ints, x: Floats, y: Floats) -> Floats:
    """x where the bits of mask are all ones, y where they are all zeros."""
    other = sub_i32(sub_i32(zero_i32(), spread_int(np.int32(1))), mask)
    return bits_f32(or_i32(and_i32(mask, bits_i32(x)), and_i32(other, bits_i32(y))))


@inline
def _turn_quarters(sine: Floats, cosine: Floats, quarters: Ints) -> Floats:
    """The sine of r + quarters * pi/2, of the sine and cosine of r."""
    one = spread_int(np.int32(1))
    odd = sub_i32(zero_i32(), and_i32(quarters, one))
    sign = left(and_i32(right(quarters, np.int32(1)), one), np.int32(31))
    size = bits_i32(_select(odd, cosine, sine))
    flipped = sub_i32(or_i32(size, sign), and_i32(size, sign))  # exclusive or
    return bits_f32(flipped)


@inline
def _angles(position: Int, inv_freq: Int, pairs: Int, mscale: Float, cosines: Int, sines: Int) -> None:
    """Cosine and sine of position * inv_freq, times mscale. The angle is rounded to float32, as models do.

    Angle = n pi/2 + r with pi/2 in three parts (Cody & Waite 1980), then polynomials of r: 1e-7 absolute for
    positions up to some millions.
    """
    at, scale = spread(np.float32(position)), spread(mscale)
    for i in range(0, pairs, 16):
        angle = mul(at, load_some(inv_freq + 4 * i, np.int32(pairs - i)))
        n = nearest(mul(angle, spread(np.float32(0.63661977236))))
        r = fma(n, spread(np.float32(-1.57079637050628662109375)), angle)
        r = fma(n, spread(np.float32(4.37113900018624283e-8)), r)
        r = fma(n, spread(np.float32(-1.71512494405e-15)), r)
        q = mul(r, r)
        s, c = fma(mul(r, q), _sine_terms(q), r), _cosine_terms(q)
        k = to_i32(n)
        after = sub_i32(k, spread_int(np.int32(-1)))
        store_f32(sines + 4 * i, mul(_turn_quarters(s, c, k), scale))
        store_f32(cosines + 4 * i, mul(_turn_quarters(s, c, after), scale))


@inline
def _halves(x: Int, pairs: Int, cosines: Int, sines: Int, out: Int) -> None:
    """Pair i is (x[i], x[i + pairs])."""
    for i in range(0, pairs, 16):
        n = np.int32(pairs - i)
        a, b = load_some(x + 4 * i, n), load_some(x + 4 * (pairs + i), n)
        c, s = load_some(cosines + 4 * i, n), load_some(sines + 4 * i, n)
        store_some(out + 4 * i, sub(mul(a, c), mul(b, s)), n)
        store_some(out + 4 * (pairs + i), add(mul(b, c), mul(a, s)), n)


@inline
def _neighbours(x: Int, pairs: Int, cosines: Int, sines: Int, out: Int) -> None:
    """Pair i is (x[2i], x[2i + 1])."""
    for i in range(0, pairs, 16):
        n, n1 = np.int32(2 * (pairs - i)), np.int32(2 * (pairs - i) - 16)
        a, b = load_some(x + 8 * i, n), load_some(x + 8 * i + 64, n1)
        for _ in range(4):  # dealing 32 cards into two, four times: all even ones, then all odd ones
            a, b = interleave_low(a, b), interleave_high(a, b)
        m = np.int32(pairs - i)
        c, s = load_some(cosines + 4 * i, m), load_some(sines + 4 * i, m)
        p, q = sub(mul(a, c), mul(b, s)), add(mul(b, c), mul(a, s))
        store_some(out + 8 * i, interleave_low(p, q), n)
        store_some(out + 8 * i + 64, interleave_high(p, q), n1)


@kernel
def rotate_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its strides, heads, d, positions, inv_freq, pairs, mscale, interleaved, out (dense)."""
    x, row_bytes, head_bytes, heads, d, positions, inv_freq, pairs = words(args, 2, 10)
    mscale, (interleaved, out) = get_f32(args + 80), words(args, 11, 13)
    cosines = scratch_of(frame, thread)
    sines = cosines + (pairs + 15) // 16 * 64
    items, ready = rows_of(frame, args) * heads, -1
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        token = item // heads
        if token != ready:
            _angles(get_i64(positions + 8 * token), inv_freq, pairs, mscale, cosines, sines)
            ready = token
        source, to = x + token * row_bytes + item % heads * head_bytes, out + 4 * d * item
        if interleaved:
            _neighbours(source, pairs, cosines, sines, to)
        else:
            _halves(source, pairs, cosines, sines, to)
        for i in range(2 * pairs, d, 16):
            n = np.int32(d - i)
            store_some(to + 4 * i, load_some(source + 4 * i, n), n)


@rotate.variant("native", on="cpu", when=float32_rows, native=True)
def _rotate(
    cpu: Executor, x: Tensor, positions: Tensor, inv_freq: Tensor, mscale: float, interleaved: bool
) -> Tensor:
    rows, pairs = TensorRows.of(x), inv_freq.shape[0]
    if 2 * pairs > rows.width or positions.shape[0] != rows.count or x.dim() != 3:
        raise ShapeMismatch(
            f"rotate got {positions.shape[0]} positions and {pairs} frequencies for x {list(x.shape)}: it "
            "wants one position per row, and at most half as many frequencies as columns"
        )
    dense("positions", positions, rows.count, dtype=torch.int64)
    dense("inv_freq", inv_freq, pairs)
    out = cpu.empty(*x.shape)
    cpu.launch(
        rotate_rows, x, *rows.strides, rows.heads, rows.width, positions, inv_freq, pairs, float(mscale),
        int(interleaved), out, rows=rows.count, scratch=128 * (-(-pairs // 16) + 1),
    )  # fmt: skip
    return out
