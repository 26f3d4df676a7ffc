"""Runs the assembly of Plait's kernels: a line of PTX at a time, on arrays of 32-bit registers."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuda_stand_in.rounding import round_to_bfloat16, widen_bfloat16

Words = NDArray[np.uint32]
# The lanes below this one: a register that the compiler takes for unknown. Here it is that of a warp's last
# lane; code may depend only on its top bit, which is 0 in every lane.
LANES_BELOW = 0x7FFFFFFF


def _halves(words: Words, is_bfloat16: bool) -> list[NDArray[np.float64]]:
    """The two halves of each word as numbers, the lower one first."""
    parts = (words & 0xFFFF).astype(np.uint16), (words >> 16).astype(np.uint16)
    if is_bfloat16:
        return [widen_bfloat16(part).astype(np.float64) for part in parts]
    return [part.view(np.float16).astype(np.float64) for part in parts]


def _multiply_add(a: Words, b: Words, c: Words, is_bfloat16: bool) -> Words:
    """a · b + c in each half, rounded once. The product is exact in float64."""
    found = []
    for x, y, z in zip(*(_halves(words, is_bfloat16) for words in (a, b, c)), strict=True):
        total = x * y + z
        bits = round_to_bfloat16(total) if is_bfloat16 else total.astype(np.float16).view(np.uint16)
        found.append(bits.astype(np.uint32))
    return found[0] | found[1] << np.uint32(16)


def _permute_bytes(low: Words, high: Words, selectors: Words) -> Words:
    """`prmt`: each byte is one of eight, or its sign in all bits if the selector has its fourth bit."""
    table = np.stack([word >> np.uint32(8 * i) & 255 for word in (low, high) for i in range(4)])
    found = np.zeros_like(low)
    for i in range(4):
        selector = selectors >> np.uint32(4 * i) & 15
        byte = np.take_along_axis(table, (selector & 7)[None].astype(np.int64), 0)[0]
        sign = np.where(byte >> 7 > 0, np.uint32(255), np.uint32(0))
        found |= np.where(selector > 7, sign, byte).astype(np.uint32) << np.uint32(8 * i)
    return found


def _look_up_bits(a: Words, b: Words, c: Words, table: Words) -> Words:
    """`lop3`: bit i of the table is the result of the three bits with the number i, `a` the highest one."""
    found = np.zeros_like(a)
    for i in range(8):
        if int(table.flat[0]) >> i & 1:
            found |= (a if i & 4 else ~a) & (b if i & 2 else ~b) & (c if i & 1 else ~c)
    return found


INSTRUCTIONS: dict[str, Callable[..., Words]] = {
    "mov.b32": lambda a: a,
    "mov.u32": lambda a: a,
    "and.b32": lambda a, b: a & b,
    "xor.b32": lambda a, b: a ^ b,
    "shr.u32": lambda a, b: a >> b,
    "shl.b32": lambda a, b: a << b,
    "prmt.b32": _permute_bytes,
    "lop3.b32": _look_up_bits,
    "fma.rn.bf16x2": lambda a, b, c: _multiply_add(a, b, c, is_bfloat16=True),
    "fma.rn.f16x2": lambda a, b, c: _multiply_add(a, b, c, is_bfloat16=False),
}


def run_assembly(code: str, inputs: Sequence[Words], num_outputs: int) -> list[Words]:
    """The output registers ($0 and on) of assembly over the input registers behind them.

    Raises NotImplementedError for an instruction that is not in INSTRUCTIONS.
    """
    registers: dict[str, Any] = {f"${num_outputs + i}": words for i, words in enumerate(inputs)}

    def read(operand: str) -> Words:
        if re.fullmatch(r"\$\d+|[a-z]\w*", operand):
            return registers[operand]
        number = LANES_BELOW if operand == "%lanemask_lt" else int(operand, 0)
        return np.full(inputs[0].shape, number, np.uint32)

    for line in re.split(r"[;\n]", code.strip().strip("{}")):
        if not line.strip():
            continue
        name, operands = line.split(maxsplit=1)
        if name == ".reg":
            continue
        if name not in INSTRUCTIONS:
            raise NotImplementedError(f"the stand-in for CUDA does not run {name} of PTX; add it to ptx.py")
        target, *sources = (operand.strip() for operand in operands.split(","))
        registers[target] = INSTRUCTIONS[name](*map(read, sources)).astype(np.uint32)
    return [registers[f"${i}"] for i in range(num_outputs)]
