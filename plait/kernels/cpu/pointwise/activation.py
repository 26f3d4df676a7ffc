"""Activations, gated or not, and gates of whole rows. A NaN stays one.

Every number depends on its own inputs alone, so rows are cut into pieces that threads share in any way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Floats, Int
from plait.kernels.cpu.codegen.maths import exp, sigmoid
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
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, word
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.ops.activation import activate, gate_rows
from plait.ops.registry import OpFacts

KINDS = ("silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2", "sigmoid", "swiglu_oai")
SILU, GELU, GELU_TANH, RELU, RELU2, SIGMOID, SWIGLU_OAI = range(len(KINDS))
PIECE = 256  # floats that a thread takes at a time, so that one long row is enough for all threads


@inline
def _times_sigmoid(x: Floats, z: Floats) -> Floats:
    """x · sigmoid(z), 0 where z is so low that the sigmoid is."""
    return where_less(z, spread(np.float32(-88.0)), zero_f32(), mul(x, sigmoid(z)))


@inline
def silu(x: Floats) -> Floats:
    return _times_sigmoid(x, x)


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
    p = spread(np.float32(-1.5710755441e-4))
    p = fma(p, t, spread(np.float32(-3.1170242964e-4)))
    p = fma(p, t, spread(np.float32(6.8299947977e-4)))
    p = fma(p, t, spread(np.float32(2.5240112325e-3)))
    p = fma(p, t, spread(np.float32(-1.5997551761e-3)))
    p = fma(p, t, spread(np.float32(-1.6386200693e-2)))
    p = fma(p, t, spread(np.float32(9.2355865722e-3)))
    p = fma(p, t, spread(np.float32(1.3198698017e-1)))
    p = fma(p, t, spread(np.float32(-4.3369199187e-1)))
    p = fma(p, t, spread(np.float32(7.066566598e-1)))
    square = mul(a, a)
    lost = fma(a, a, sub(zero_f32(), square))  # what rounding a² took away counts where the tail is thin
    e = exp(mul(square, spread(np.float32(-0.5))))
    e = fma(mul(e, lost), spread(np.float32(-0.5)), e)
    tail = mul(mul(e, p), inverse)
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
def _put(out: Int, up: Int, at: Int, y: Floats) -> None:
    """Store y · up, or y if there is no up."""
    if up != 0:
        y = mul(y, load_f32(up + at))
    store_f32(out + at, y)


@inline
def _put_some(out: Int, up: Int, at: Int, y: Floats, count: Int) -> None:
    if up != 0:
        y = mul(y, load_some(up + at, count))
    store_some(out + at, y, count)


def _piece_of(function: Callable[[Floats], Floats]) -> Callable[[Int, Int, Int, Int], None]:
    """What writes the activation of n floats at x, times those at `up` if that is not 0, to `out`."""

    def piece(x: Int, up: Int, out: Int, n: Int) -> None:
        full, left = n // 16 * 64, np.int32(n % 16)
        for at in range(0, full, 64):
            _put(out, up, at, function(load_f32(x + at)))
        if left > 0:
            _put_some(out, up, full, function(load_some(x + full, left)), left)

    # Machine code goes by this name, and no two functions may share one.
    piece.__name__ = piece.__qualname__ = f"{function.__name__}_piece"
    return inline(piece)


_silu_piece, _gelu_piece, _gelu_tanh_piece = map(_piece_of, (silu, gelu, gelu_tanh))
_relu_piece, _relu2_piece, _sigmoid_piece = map(_piece_of, (relu, relu2, _sigmoid))


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
def _swiglu_oai_piece(x: Int, up: Int, out: Int, n: Int) -> None:
    full = n // 16 * 64
    for at in range(0, full, 64):
        store_f32(out + at, swiglu_oai(load_f32(x + at), load_f32(up + at)))
    left = np.int32(n % 16)
    if left > 0:
        y = swiglu_oai(load_some(x + full, left), load_some(up + full, left))
        store_some(out + full, y, left)


@inline
def _piece(item: Int, n: Int) -> tuple[Int, Int, Int]:
    """Piece `item` of rows of n floats: its row, its first float and how many there are."""
    pieces = (n + PIECE - 1) // PIECE
    start = item % pieces * PIECE
    return item // pieces, start, min(PIECE, n - start)


@inline
def _share(items: Int, n: Int, thread: Int, threads: Int) -> tuple[Int, Int]:
    """The pieces of this thread, of `items` rows of n floats."""
    pieces = items * ((n + PIECE - 1) // PIECE)
    return pieces * thread // threads, pieces * (thread + 1) // threads


@kernel
def activate_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and head strides, heads, n of the result, bytes from gate to up or 0, kind, out (dense)."""
    x, row_bytes, head_bytes = word(args, 2), word(args, 3), word(args, 4)
    heads, n = word(args, 5), word(args, 6)
    to_up, kind, out = word(args, 7), word(args, 8), word(args, 9)
    first, last = _share(rows_of(frame, args) * heads, n, thread, threads)
    for item in range(first, last):
        row, start, count = _piece(item, n)
        gate = x + row // heads * row_bytes + row % heads * head_bytes + 4 * start
        up = gate + to_up if to_up != 0 else 0
        to = out + 4 * (n * row + start)
        if kind == SILU:
            _silu_piece(gate, up, to, count)
        elif kind == GELU:
            _gelu_piece(gate, up, to, count)
        elif kind == GELU_TANH:
            _gelu_tanh_piece(gate, up, to, count)
        elif kind == RELU:
            _relu_piece(gate, up, to, count)
        elif kind == RELU2:
            _relu2_piece(gate, up, to, count)
        elif kind == SWIGLU_OAI:
            _swiglu_oai_piece(gate, up, to, count)
        else:
            _sigmoid_piece(gate, up, to, count)


@kernel
def apply_gate_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, gate, its row stride, n, out (dense)."""
    x, x_bytes, gate = word(args, 2), word(args, 3), word(args, 4)
    gate_bytes, n = word(args, 5), word(args, 6)
    out = word(args, 7)
    first, last = _share(rows_of(frame, args), n, thread, threads)
    for item in range(first, last):
        row, start, count = _piece(item, n)
        z = get_f32(gate + row * gate_bytes)
        factor = sigmoid(spread(z)) if z == z else spread(z)
        a, to, full = x + row * x_bytes + 4 * start, out + 4 * (n * row + start), count // 16 * 64
        for at in range(0, full, 64):
            store_f32(to + at, mul(load_f32(a + at), factor))
        left = np.int32(count % 16)
        if left > 0:
            store_some(to + full, mul(load_some(a + full, left), factor), left)


def why_unknown_kind(facts: OpFacts) -> str | None:
    kind = facts.sizes.get("kind", KINDS[0])
    return float32_rows(facts) if kind in KINDS else f"it does not know the activation {kind!r}"


@activate.variant("native", on="cpu", when=why_unknown_kind, native=True)
def _activate(cpu: Executor, x: Tensor, kind: str, gated: bool) -> Tensor:
    rows = TensorRows.of(x)
    if kind not in KINDS or (gated and rows.width % 2) or (kind == "swiglu_oai" and not gated):
        raise ShapeMismatch(f"{kind} of rows of {rows.width} numbers{', gate and up' if gated else ''}")
    n = rows.width // 2 if gated else rows.width
    out = cpu.empty(*x.shape[:-1], n)
    where = (*rows.strides, rows.heads, n, 4 * n if gated else 0)
    cpu.launch(activate_rows, x, *where, KINDS.index(kind), out, rows=rows.count)
    return out


@gate_rows.variant("native", on="cpu", when=float32_rows, native=True)
def _gate_rows(cpu: Executor, x: Tensor, gate: Tensor) -> Tensor:
    a = TensorRows.of(x)
    if gate.dtype != torch.float32 or x.dim() != 2 or gate.shape != (a.count, 1):
        raise ShapeMismatch(
            f"{a.count} rows want as many float32 gates [T, 1], got {gate.dtype} {list(gate.shape)}"
        )
    out = cpu.empty(*x.shape)
    cpu.launch(apply_gate_rows, x, a.row_bytes, gate, 4 * gate.stride(0), a.width, out, rows=a.count)
    return out
