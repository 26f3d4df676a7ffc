"""Functions of sixteen floats at a time, that kernels share. Those of mathematics are within 2 ulp or so."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from llvmlite import ir

from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.vec import (
    DEFINED,
    LANES,
    VF,
    _define,
    absolute,
    add,
    add_i32,
    bits_f32,
    bits_i32,
    div,
    fma,
    left,
    load_f32,
    load_some,
    mul,
    spread,
    spread_int,
    store_f32,
    store_some,
    sub,
    vf32,
    where_less,
    zero_f32,
)


def polynomial(name: str, *coefficients: float) -> Callable[[Floats], Floats]:
    """A polynomial of sixteen numbers, the coefficient of the highest power first, by fma (Horner)."""

    def emit(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
        p, *rest = (ir.Constant(vf32, [c] * LANES) for c in coefficients)
        for c in rest:
            p = DEFINED["fma"][2](b, p, x, c)
        return p

    return _define(name, VF, (VF,), emit)


_exp_terms = polynomial(
    "exp_terms", 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
    5.0000001201e-1,
)  # fmt: skip
_tanh_terms = polynomial(
    "tanh_terms", -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1
)
_loss_terms = polynomial(
    "loss_terms", 1.9841269841e-4, 1.3888888889e-3, 8.3333333333e-3, 4.1666666667e-2, 1.6666666667e-1,
    0.5, 1.0,
)  # fmt: skip
_softplus_terms = polynomial("softplus_terms", *(2.0 / n for n in range(17, 0, -2)))
WHOLE = np.float32(12582912.0)  # 1.5 * 2**23: added to a small number it leaves the nearest whole one


@inline
def load_left(a: Int, left: Int) -> Floats:
    """Sixteen floats, or the `left` that there are; without a mask where all are there."""
    if left >= 16:
        return load_f32(a)
    return load_some(a, np.int32(left))


@inline
def store_left(a: Int, x: Floats, left: Int) -> None:
    """Store sixteen floats, or the first `left` of them."""
    if left >= 16:
        store_f32(a, x)
    else:
        store_some(a, x, np.int32(left))


@inline
def above(x: Floats, y: Floats) -> Floats:
    """The larger one; y, if one is no number. One instruction, where `largest` takes three."""
    return where_less(y, x, x, y)


@inline
def exp(x: Floats) -> Floats:
    """e**x; 0 below -87, and 2.4e38 at most. x = n ln 2 + r, then a polynomial of r (Cody & Waite 1980)."""
    low, high = spread(np.float32(-87.0)), spread(np.float32(88.3))
    given = x
    x = above(x, low)
    x = where_less(x, high, x, high)
    at = add(mul(x, spread(np.float32(1.44269504))), spread(WHOLE))
    n = sub(at, spread(WHOLE))
    r = fma(n, spread(np.float32(-0.693359375)), x)  # ln 2 in two parts: the first is exact times n
    r = fma(n, spread(np.float32(2.12194440e-4)), r)
    p = add(fma(mul(r, r), _exp_terms(r), r), spread(np.float32(1.0)))
    power = bits_f32(left(add_i32(bits_i32(at), spread_int(np.int32(127))), np.int32(23)))  # 2**n
    return where_less(given, low, zero_f32(), mul(p, power))


@inline
def one_minus_exp(x: Floats) -> Floats:
    """1 - e**x of x <= 0; the series of exp up to x^7 above -0.35, where that cancels."""
    near = mul(sub(zero_f32(), x), _loss_terms(x))
    return where_less(spread(np.float32(-0.35)), x, near, sub(spread(np.float32(1.0)), exp(x)))


@inline
def sigmoid(x: Floats) -> Floats:
    one = spread(np.float32(1.0))
    return div(one, add(one, exp(sub(zero_f32(), x))))


@inline
def silu(x: Floats) -> Floats:
    return mul(x, sigmoid(x))


@inline
def tanh(x: Floats) -> Floats:
    """(1 - e) / (1 + e) with e = exp(-2|x|), its sign put back; a polynomial near 0, where that cancels."""
    one, size = spread(np.float32(1.0)), absolute(x)
    e = exp(mul(size, spread(np.float32(-2.0))))
    far = div(sub(one, e), add(one, e))
    far = where_less(x, zero_f32(), sub(zero_f32(), far), far)
    q = mul(x, x)
    near = fma(mul(x, q), _tanh_terms(q), x)
    return where_less(size, spread(np.float32(0.625)), near, far)


@inline
def softplus(x: Floats) -> Floats:
    """ln(1 + e**x) = max(x, 0) + ln(1 + z), z = e**-|x|, which is 2 atanh(z / (2 + z)) by its series.

    No digits are lost where the result is small: it is e**x there, and 0 below -87.
    """
    z = exp(sub(zero_f32(), absolute(x)))
    s = div(z, add(z, spread(np.float32(2.0))))  # 1/3 at most
    q = mul(s, s)
    return fma(_softplus_terms(q), s, where_less(x, zero_f32(), zero_f32(), x))
