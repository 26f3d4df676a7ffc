"""Native kernels of elementwise ops, made from what an op does to sixteen numbers.

Every number depends on its own inputs alone, so rows are cut into pieces that threads share in any way.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, inline, load_generated
from plait.kernels.cpu.codegen.kinds import Float, Floats
from plait.kernels.cpu.codegen.maths import sigmoid, tanh
from plait.kernels.cpu.codegen.vec import add, div, mul, spread, sub, where_less, zero_f32
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.ops.activation import clip, combine, gate, multiply, rescale
from plait.ops.elementwise import Numbers, elementwise_op
from plait.ops.registry import TOLERANCE, Op

PIECE = 256  # floats that a thread takes at a time, so that one long row is enough for all threads
SOURCE = """# {owner}
import numpy as np
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import get_f32, load_f32, load_some, store_f32, store_some
from plait.kernels.cpu.runtime.frame import rows_of, word

@kernel
def {name}_rows(frame, args, thread, threads):
    n, heads, out = word(args, 2), word(args, 3), word(args, 4)
    {read}
    pieces = (n + {piece} - 1) // {piece}
    items = rows_of(frame, args) * heads * pieces
    for item in range(items * thread // threads, items * (thread + 1) // threads):
        i, start = item // pieces, item % pieces * {piece}
        row, head, count, to = i // heads, i % heads, min({piece}, n - start), out + 4 * (n * i + start)
        {places}
        full, left = count // 16 * 64, np.int32(count % 16)
        for at in range(0, full, 64):
            store_f32(to + at, lanes({whole}))
        if left > 0:
            store_some(to + full, lanes({some}), left)
"""


def kernel_of(name: str, lanes: Callable[..., object], tensors: int, numbers: int) -> Kernel:
    """What computes `lanes` over rows of so many tensors.

    Its arguments are n, heads, out, then of each tensor its address, row and head strides, then the numbers.
    """
    at, first = [f"x{i}" for i in range(tensors)], 5 + 3 * tensors
    values = [f"number{i}" for i in range(numbers)]
    read = [f"{x}, {x}_row, {x}_head = " + ", ".join(f"word(args, {5 + 3 * i + k})" for k in range(3))
            for i, x in enumerate(at)]  # fmt: skip
    read += [f"{value} = get_f32(args + {8 * (first + i)})" for i, value in enumerate(values)]
    source = SOURCE.format(
        owner=lanes.__module__,
        name=name,
        piece=PIECE,
        read="\n    ".join(read),
        places="\n        ".join(f"{x}_at = {x} + row * {x}_row + head * {x}_head + 4 * start" for x in at),
        whole=", ".join([*(f"load_f32({x}_at + at)" for x in at), *values]),
        some=", ".join([*(f"load_some({x}_at + full, left)" for x in at), *values]),
    )
    module = load_generated(f"elementwise_{name}", source)
    # Machine code goes by this name, and no two functions may share one.
    lanes.__name__ = lanes.__qualname__ = f"{name}_lanes"
    module.__dict__["lanes"] = inline(lanes)
    made: Kernel = getattr(module, f"{name}_rows")
    return made


def native(op: Op) -> Callable[[Callable[..., Any]], Callable[..., Tensor]]:
    """Register the native variant of an op of tensors of one shape, then of numbers (None is given as 0).

    The function that is decorated is compiled: it gets sixteen floats of each tensor, and each number as a
    float32, and returns sixteen floats. `vec` and `maths` have what it may call, and `@inline` functions.
    """

    def register(lanes: Callable[..., Any]) -> Callable[..., Tensor]:
        names = list(signature(op.reference).parameters)
        tensors = sum(name not in op.cases[0] for name in names)
        made = kernel_of(op.name, lanes, tensors, len(names) - tensors)

        @op.variant("native", on="cpu", when=float32_rows, native=True)
        def run(cpu: Executor, *args: Any) -> Tensor:
            given, numbers = args[:tensors], [float(value or 0.0) for value in args[tensors:]]
            x, rows = given[0], [TensorRows.of(tensor) for tensor in given]
            if any(tensor.shape != x.shape for tensor in given):
                raise ShapeMismatch(f"{op.name} wants one shape, got {[list(t.shape) for t in given]}")
            out = cpu.empty(*x.shape)
            where = [word for t, r in zip(given, rows, strict=True) for word in (t, *r.strides)]
            cpu.launch(made, rows[0].width, rows[0].heads, out, *where, *numbers, rows=rows[0].count)
            return out

        return run

    return register


def elementwise(
    lanes: Callable[..., object], tolerance: Mapping[torch.dtype, float] = TOLERANCE, **numbers: Numbers
) -> Callable[[Callable[..., object]], Op]:
    """An op and its kernel in one: the decorated torch function is the reference, see `elementwise_op`.

    `lanes`: the same for sixteen numbers, see `native`.
    """

    def register(fn: Callable[..., object]) -> Op:
        made = elementwise_op(tolerance, **numbers)(fn)
        native(made)(lanes)
        return made

    return register


@native(multiply)
def _multiply(x: Floats, y: Floats) -> Floats:
    return mul(x, y)


@native(combine)
def _combine(x: Floats, y: Floats, scale: Float) -> Floats:
    return add(x, mul(y, spread(scale)))


@native(gate)
def _gate(x: Floats, z: Floats) -> Floats:
    """x · sigmoid(z). exp makes a number of a NaN: only what is below 0 or above -1 is one."""
    s = sigmoid(z)
    return mul(x, where_less(z, zero_f32(), s, where_less(spread(np.float32(-1.0)), z, s, z)))


@native(clip)
def _clip(x: Floats, limit: Float) -> Floats:
    """Of what is no number it stays so: no comparison holds."""
    top = spread(limit)
    low = sub(zero_f32(), top)
    x = where_less(top, x, top, x)
    return where_less(x, low, low, x)


@native(rescale)
def _rescale(x: Floats, scale: Float, cap: Float) -> Floats:
    x = mul(x, spread(scale))
    if cap == np.float32(0.0):
        return x
    t = tanh(div(x, spread(cap)))
    # maths.tanh makes 1 of a NaN: only what is below 0 or above -1 is a number.
    t = where_less(x, zero_f32(), t, where_less(spread(np.float32(-1.0)), x, t, x))
    return mul(spread(cap), t)
