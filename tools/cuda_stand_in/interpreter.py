"""What Triton's interpreter lacks: arithmetic in bfloat16, products of halves, inline assembly.

The interpreter keeps bfloat16 as its bits, in uint16. It adds and multiplies those as integers, and cuts
float32 off where hardware rounds to nearest even. Here numbers are widened to float32, and results rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime import interpreter

from cuda_stand_in.ptx import run_assembly
from cuda_stand_in.rounding import round_to_bfloat16, widen_bfloat16

BITWISE = frozenset((np.bitwise_and, np.bitwise_or, np.bitwise_xor))
Handle = interpreter.TensorHandle


class Results(list[Any]):
    """Results of one instruction, as Triton's language takes them."""

    def get_result(self, number: int) -> Any:
        return self[number]


def _is_bfloat16(value: Any) -> bool:
    return bool(value.dtype.scalar == tl.bfloat16)


def _make_bfloat16(data: NDArray[Any]) -> Any:
    return Handle(round_to_bfloat16(data), tl.bfloat16)


def _widen(value: Any) -> Any:
    """In float32, if it is in bfloat16 or float16."""
    if _is_bfloat16(value):
        return Handle(widen_bfloat16(value.data), tl.float32)
    if value.dtype.scalar == tl.float16:
        return Handle(value.data.astype(np.float32), tl.float32)
    return value


def _change_cast(cast: Callable[..., Any]) -> Callable[..., Any]:
    def cast_impl(self: Any, source: Any, to: Any) -> Any:
        if _is_bfloat16(source) and to.scalar != tl.bfloat16:
            source = _widen(source)
            return source if to.scalar == tl.float32 else cast(self, source, to)
        if to.scalar == tl.bfloat16 and not _is_bfloat16(source):
            return _make_bfloat16(source.data.astype(np.float32))
        return cast(self, source, to)

    return cast_impl


def _change_binary(binary: Callable[..., Any]) -> Callable[..., Any]:
    def binary_op(self: Any, left: Any, right: Any, op: Any) -> Any:
        if not _is_bfloat16(left) or op in BITWISE:
            return binary(self, left, right, op)
        found = op(widen_bfloat16(left.data), widen_bfloat16(right.data))
        return Handle(found, tl.int1) if found.dtype == np.bool_ else _make_bfloat16(found)

    return binary_op


def _change_unary(unary: Callable[..., Any]) -> Callable[..., Any]:
    def unary_op(self: Any, value: Any, op: Any) -> Any:
        if not _is_bfloat16(value):
            return unary(self, value, op)
        return _make_bfloat16(op(widen_bfloat16(value.data)))

    return unary_op


def _change_dot(dot: Callable[..., Any]) -> Callable[..., Any]:
    def create_dot(self: Any, left: Any, right: Any, total: Any, *rest: Any) -> Any:
        return dot(self, _widen(left), _widen(right), total, *rest)

    return create_dot


def _get_bf16(self: Any, value: float) -> Any:
    return _make_bfloat16(np.array([value], np.float32))


def _create_inline_asm(
    self: Any, code: str, constraints: str, values: Any, types: Any, is_pure: bool, pack: int
) -> Results:
    """Run assembly on words of 32 bits, `pack` elements of each value at a time.

    Two elements of 16 bits share a register, as `inline_asm_elementwise` has it; one alone has its own. An
    element of 32 bits is a register. Each result has 32 bits for a group of elements.
    """
    shape = np.broadcast_shapes(*(np.shape(value.data) for value in values))
    registers: list[NDArray[np.uint32]] = []
    for value in values:
        data = np.ascontiguousarray(np.broadcast_to(value.data, shape)).reshape(-1)
        if data.dtype.itemsize == 2:
            words = data.view(np.uint32) if pack == 2 else data.view(np.uint16).astype(np.uint32)
            registers.append(words)
            continue
        words = data.view(np.uint32).reshape(-1, pack)
        registers += [np.ascontiguousarray(words[:, i]) for i in range(pack)]
    found = run_assembly(code, registers, len(types))
    return Results(
        Handle(word.view(interpreter._get_np_dtype(kind)).reshape(shape), kind.scalar)
        for kind, word in zip(types, found, strict=True)
    )


def make_changes() -> dict[str, Callable[..., Any]]:
    """Methods of Triton's `InterpreterBuilder` by name, made of those that it has now."""
    builder = interpreter.InterpreterBuilder
    return {
        "cast_impl": _change_cast(builder.cast_impl),
        "binary_op": _change_binary(builder.binary_op),
        "unary_op": _change_unary(builder.unary_op),
        "create_dot": _change_dot(builder.create_dot),
        "create_inline_asm": _create_inline_asm,
        "get_bf16": _get_bf16,
    }
