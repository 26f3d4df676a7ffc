"""Activations, gated or not, and gates of whole rows. A NaN stays one.

Every number depends on its own inputs alone, so rows are cut into pieces that threads share in any way.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats
from plait.kernels.cpu.codegen.maths import exp, polynomial, sigmoid, softplus, tanh
from plait.kernels.cpu.codegen.vec import (
    absolute,
    add,
    div,
    fma,
    get_f32,
    load_f32,
    load_some,
    mul,
    smallest,
    spread,
    store_f32,
    store_some,
    sub,
    where_less,
    words,
    zero_f32,
)
from plait.kernels.cpu.pointwise.elementwise import PIECE, kernel_of
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.kernels.cpu.runtime.threads import Address
from plait.ops.activation import PAIRS, activate, gate_rows, scale_rows, xielu
from plait.ops.registry import OpFacts


@inline
def _times_sigmoid(x: Floats, z: Floats) -> Floats:
    """x · sigmoid(z), 0 where z is so low that the sigmoid is."""
    return where_less(z, spread(np.float32(-88.0)), zero_f32(), mul(x, sigmoid(z)))


@inline
def silu(x: Floats) -> Floats:
    return _times_sigmoid(x, x)


_gelu_terms = polynomial(
    "gelu_terms", -1.5710755441e-4, -3.1170242964e-4, 6.8299947977e-4, 2.5240112325e-3, -1.5997551761e-3,
    -1.6386200693e-2, 9.2355865722e-3, 1.3198698017e-1, -4.3369199187e-1, 7.066566598e-1,
)  # fmt: skip


@inline
def gelu(x: Floats) -> Floats:
    """x · Φ(x), within some ulp also far below 0.

    The tail Φ(-a) is exp(-a²/2) · P(t) / (a + k) with t = (a - k) / (a + k), after Shepherd & Laframboise
    1981; P is our own Chebyshev fit for k = 2.5, a <= 14, off by 2e-8.
    """
    one, k = spread(np.float32(1.0)), spread(np.float32(2.5))
    a = smallest(absolute(x), spread(np.float32(14.0)))
    inverse = div(one, add(a, k))
    t = mul(sub(a, k), inverse)
    square = mul(a, a)
    lost = fma(a, a, sub(zero_f32(), square))  # what rounding a² took away counts where the tail is thin
    e = exp(mul(square, spread(np.float32(-0.5))))
    e = fma(mul(e, lost), spread(np.float32(-0.5)), e)
    tail = mul(mul(e, _gelu_terms(t)), inverse)
    below = sub(zero_f32(), mul(a, tail))
    return where_less(x, zero_f32(), below, sub(x, mul(a, tail)))


@inline
def gelu_tanh(x: Floats) -> Floats:
    """0.5 x (1 + tanh(u)) = x · sigmoid(2u), u = √(2/π) (x + 0.044715 x³)."""
    cubic = fma(
        mul(x, x), spread(np.float32(2 * 0.7978845608 * 0.044715)), spread(np.float32(2 * 0.7978845608))
    )
    return _times_sigmoid(x, mul(x, cubic))


@inline
def relu(x: Floats) -> Floats:
    return where_less(x, zero_f32(), zero_f32(), x)


@inline
def relu2(x: Floats) -> Floats:
    positive = relu(x)
    return mul(positive, positive)


@inline
def _sigmoid(x: Floats) -> Floats:
    # exp makes a number of a NaN: only what is below 0 or above -1 is one.
    return where_less(x, zero_f32(), sigmoid(x), where_less(spread(np.float32(-1.0)), x, sigmoid(x), x))


@inline
def _least(x: Floats, limit: Floats) -> Floats:
    """The smaller of both; a NaN stays one."""
    return where_less(limit, x, limit, x)


@inline
def swiglu_oai(x: Floats, y: Floats) -> Floats:
    """(up + 1) · gate · sigmoid(1.702 gate), gate at most 7 and up within ±7."""
    seven = spread(np.float32(7.0))
    x, y = _least(x, seven), _least(y, seven)
    y = where_less(y, spread(np.float32(-7.0)), spread(np.float32(-7.0)), y)
    z = mul(x, spread(np.float32(1.702)))
    return mul(add(y, spread(np.float32(1.0))), _times_sigmoid(x, z))


@inline
def _swiglu_within(x: Floats, y: Floats, limit: Floats) -> Floats:
    """silu(gate), at most the limit, times up, which is within ± it."""
    low = sub(zero_f32(), limit)
    y = _least(y, limit)
    return mul(_least(silu(x), limit), where_less(y, low, low, y))


@inline
def swiglu_7(x: Floats, y: Floats) -> Floats:
    return _swiglu_within(x, y, spread(np.float32(7.0)))


@inline
def swiglu_16(x: Floats, y: Floats) -> Floats:
    return _swiglu_within(x, y, spread(np.float32(16.0)))


@inline
def _swiglu_cut(x: Floats, y: Floats, limit: Floats) -> Floats:
    """silu of the gate, which is at most the limit, times up, which is within ± it."""
    low = sub(zero_f32(), limit)
    y = _least(y, limit)
    return mul(silu(_least(x, limit)), where_less(y, low, low, y))


@inline
def swiglu_cut_7(x: Floats, y: Floats) -> Floats:
    return _swiglu_cut(x, y, spread(np.float32(7.0)))


@inline
def swiglu_cut_10(x: Floats, y: Floats) -> Floats:
    return _swiglu_cut(x, y, spread(np.float32(10.0)))


@inline
def situ(x: Floats, y: Floats) -> Floats:
    """4 tanh(gate / 4) · sigmoid(gate) · 25 tanh(up / 25)."""
    four, wide = spread(np.float32(4.0)), spread(np.float32(25.0))
    return mul(mul(mul(four, tanh(div(x, four))), _sigmoid(x)), mul(wide, tanh(div(y, wide))))


KINDS: dict[str, Callable[..., Floats]] = {
    "silu": silu, "gelu": gelu, "gelu_pytorch_tanh": gelu_tanh, "relu": relu, "relu2": relu2,
    "sigmoid": _sigmoid, "swiglu_oai": swiglu_oai, "swiglu_7": swiglu_7, "swiglu_16": swiglu_16,
    "swiglu_cut_7": swiglu_cut_7, "swiglu_cut_10": swiglu_cut_10, "situ": situ, "softplus": softplus,
}  # fmt: skip


@cache
def kernel_for(kind: str, gated: bool) -> Kernel:
    """What computes one activation, times what it gates if it does."""
    function = KINDS[kind]

    def alone(x: Floats) -> Floats:
        return function(x)

    def times(x: Floats, up: Floats) -> Floats:
        return mul(function(x), up)

    def of_both(x: Floats, up: Floats) -> Floats:
        return function(x, up)

    lanes = of_both if kind in PAIRS else times if gated else alone
    return kernel_of(f"{kind}_gated" if gated else kind, lanes, 1 + gated, 0)


@kernel
def apply_row_factors(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, its head stride, heads, factors, their row and head strides, n, out (dense), 1 where
    a row is multiplied by the sigmoid of its factor."""
    x, x_bytes, head_bytes, heads, by, by_bytes, each_bytes, n, out, is_gate = words(args, 2, 12)
    pieces = (n + PIECE - 1) // PIECE
    items = rows_of(frame, args) * heads * pieces
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        i, start = item // pieces, item % pieces * PIECE
        row, head, count = i // heads, i % heads, min(PIECE, n - start)
        z = get_f32(by + row * by_bytes + head * each_bytes)
        factor = sigmoid(spread(z)) if is_gate != 0 and z == z else spread(z)
        a, to = x + row * x_bytes + head * head_bytes + 4 * start, out + 4 * (n * i + start)
        full, left = count // 16 * 64, np.int32(count % 16)
        for at in range(0, full, 64):
            store_f32(to + at, mul(load_f32(a + at), factor))
        if left > 0:
            store_some(to + full, mul(load_some(a + full, left), factor), left)


@inline
def _bend(x: Floats, above: Floats, below: Floats, slope: Floats, edge: Floats) -> Floats:
    """xIELU of sixteen numbers. exp makes a number of a NaN, but the term of the slope keeps it."""
    low = sub(sub(exp(smallest(x, edge)), spread(np.float32(1.0))), x)
    bent = where_less(zero_f32(), x, mul(mul(x, x), above), mul(low, below))
    return fma(slope, x, bent)


@kernel
def apply_xielu(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, curve, n, out (dense)."""
    x, x_bytes, curve, n, out = words(args, 2, 7)
    above, below = spread(get_f32(curve)), spread(get_f32(curve + 4))
    slope, edge = spread(get_f32(curve + 8)), spread(get_f32(curve + 12))
    pieces = (n + PIECE - 1) // PIECE
    items = rows_of(frame, args) * pieces
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        row, start = item // pieces, item % pieces * PIECE
        count = min(PIECE, n - start)
        a, to, full = x + row * x_bytes + 4 * start, out + 4 * (n * row + start), count // 16 * 64
        for at in range(0, full, 64):
            store_f32(to + at, _bend(load_f32(a + at), above, below, slope, edge))
        left = np.int32(count % 16)
        if left > 0:
            store_some(to + full, _bend(load_some(a + full, left), above, below, slope, edge), left)


def why_unknown_kind(facts: OpFacts) -> str | None:
    kind = facts.sizes.get("kind", "silu")
    return float32_rows(facts) if kind in KINDS else f"it does not know the activation {kind!r}"


@activate.variant("native", on="cpu", when=why_unknown_kind, native=True)
def _activate(cpu: Executor, x: Tensor, kind: str, gated: bool) -> Tensor:
    rows = TensorRows.of(x)
    if kind not in KINDS or (gated and rows.width % 2) or (kind in PAIRS and not gated):
        raise ShapeMismatch(f"{kind} of rows of {rows.width} numbers{', gate and up' if gated else ''}")
    n = rows.width // 2 if gated else rows.width
    out = cpu.empty(*x.shape[:-1], n)
    up = (Address(x.data_ptr() + 4 * n), *rows.strides) if gated else ()
    cpu.launch(kernel_for(kind, gated), n, rows.heads, out, x, *rows.strides, *up, rows=rows.count)
    return out


@gate_rows.variant("native", on="cpu", when=float32_rows, native=True)
def _gate_rows(cpu: Executor, x: Tensor, gate: Tensor) -> Tensor:
    a = TensorRows.of(x)
    if gate.dtype != torch.float32 or x.dim() != 2 or gate.shape != (a.count, 1):
        raise ShapeMismatch(
            f"{a.count} rows want as many float32 gates [T, 1], got {gate.dtype} {list(gate.shape)}"
        )
    out = cpu.empty(*x.shape)
    where = (x, *a.strides, 1, gate, 4 * gate.stride(0), 0, a.width, out, True)
    cpu.launch(apply_row_factors, *where, rows=a.count)
    return out


@scale_rows.variant("native", on="cpu", when=float32_rows, native=True)
def _scale_rows(cpu: Executor, x: Tensor, by: Tensor) -> Tensor:
    a = TensorRows.of(x)
    if by.dtype != torch.float32 or by.shape not in ((a.count, 1), (a.count, a.heads)):
        raise ShapeMismatch(
            f"{a.count} rows want as many float32 factors [T, 1], or [T, {a.heads}], got {by.dtype} "
            f"{list(by.shape)}"
        )
    out = cpu.empty(*x.shape)
    each = 4 * by.stride(1) if by.shape[1] > 1 else 0
    where = (x, *a.strides, a.heads, by, 4 * by.stride(0), each, a.width, out, False)
    cpu.launch(apply_row_factors, *where, rows=a.count)
    return out


@xielu.variant("native", on="cpu", when=float32_rows, native=True)
def _xielu(cpu: Executor, x: Tensor, curve: Tensor) -> Tensor:
    a = TensorRows.of(x)
    out = cpu.empty(*x.shape)
    if x.dim() != 2:
        raise ShapeMismatch(f"xIELU's kernel wants [T, n], got {list(x.shape)}")
    cpu.launch(apply_xielu, x, a.row_bytes, dense("curve", curve, 4), a.width, out, rows=a.count)
    return out
