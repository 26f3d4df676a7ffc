"""Products of pairs of bfloat16, two to a lane: the instructions of AVX512_BF16, and what replaces them.

A lane of a vector of pairs is an int32: the number that comes first in its low half. `dot_bf16` adds the
product of the second numbers, then that of the first, each by a fused multiply-add that rounds once. So does
`vdpbf16ps`, but it takes zeros for subnormal numbers and leaves zeros for such sums. So sums of normal
numbers have the same bits with and without the instruction (`HARDWARE`); tests compare with the processor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from llvmlite import ir

from plait.kernels.cpu.codegen import plain_x86
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer
from plait.kernels.cpu.codegen.target import adds_bf16
from plait.kernels.cpu.codegen.vec import (
    DEFINED,
    VF,
    VI,
    _call,
    _define,
    _ints,
    _round_bf16,
    vf32,
    vi16,
    vi32,
)

Pairs: TypeAlias = Value | Sequence[Value]
"""A vector of pairs; without the instruction two of float32: the first numbers, the second."""
TINY = 0x00800000  # bits of the smallest normal float32


HARDWARE = adds_bf16()


class _Bfloat(ir.Type):  # type: ignore[misc]
    """LLVM's bfloat, which llvmlite has no name for."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Bfloat)

    def __hash__(self) -> int:
        return hash(_Bfloat)


v32i16, v32bf = ir.VectorType(ir.IntType(16), 32), ir.VectorType(_Bfloat(), 32)


def _dot(b: ir.IRBuilder, s: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    if HARDWARE:
        pairs = (b.bitcast(v, v32bf) for v in (x, y))
        return _call(b, "llvm.x86.avx512bf16.dpbf16ps.512", vf32, s, *pairs)
    for half in (DEFINED["high_bf16"][2], DEFINED["low_bf16"][2]):
        s = _call(b, "llvm.fma.v16f32", vf32, half(b, x), half(b, y), s)
    return s


def _round_to_bf16(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """x rounded to bfloat16, to nearest even, as float32; zeros for what is not normal then."""
    bits = b.shl(_round_bf16(b, x, vi32, _ints), _ints(16))
    size = b.and_(bits, _ints(0x7FFFFFFF))
    return b.bitcast(b.select(b.icmp_unsigned("<", size, _ints(TINY)), _ints(0), bits), vf32)


def _both(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Thirty-two numbers rounded to bfloat16, those of x first."""
    if HARDWARE:
        made = _call(b, "llvm.x86.avx512bf16.cvtne2ps2bf16.512", v32bf, y, x)
        return b.bitcast(made, vi32)
    x, y = (b.trunc(b.lshr(b.bitcast(_round_to_bf16(b, v), vi32), _ints(16)), vi16) for v in (x, y))
    return b.bitcast(_shuffle(b, x, y, list(range(32))), vi32)


def _shuffle(b: ir.IRBuilder, x: ir.Value, y: ir.Value, order: list[int]) -> ir.Value:
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(ir.IntType(32), len(order)), order))


def _words(b: ir.IRBuilder, x: ir.Value, y: ir.Value, start: int) -> ir.Value:
    """Pairs of x's and y's 16-bit numbers start..start+4 of every eight: no instruction set crosses those."""
    order = [n for at in range(start, 32, 8) for i in range(at, at + 4) for n in (i, 32 + i)]
    return b.bitcast(_shuffle(b, b.bitcast(x, v32i16), b.bitcast(y, v32i16), order), vi32)


def _columns(b: ir.IRBuilder, x: ir.Value, y: ir.Value, start: int) -> ir.Value:
    """Sixteen of what `words_low` (x) and `words_high` (y) took apart, in order again."""
    order = [lane for at in (start, start + 4) for of in (0, 16) for lane in range(of + at, of + at + 4)]
    return _shuffle(b, x, y, order)


def write_dot(w: Writer, x: Pairs, y: Pairs, s: Value) -> Value:
    """Written by `llvm_writer.Writer` w: s + x · y by pairs, the product of the second numbers first.

    Pairs are vectors or, without the instruction, two of float32: all first numbers, all second ones.
    """
    if HARDWARE:
        return w.dot_bf16(s, x, y)
    if plain_x86.HERE:  # a product of two bfloat16 has 16 bits: it is exact, so that adding it rounds once
        return w.add(w.mul(x[0], y[0]), w.add(w.mul(x[1], y[1]), s))
    return w.fma(x[0], y[0], w.fma(x[1], y[1], s))


def spread_pair(w: Writer, at: Word) -> Pairs:
    """The pair at an address in every lane; without the instruction it is two float32."""
    return w.spread_i32(at) if HARDWARE else (w.spread_f32(at), w.spread_f32(at + 4))


dot_bf16 = _define("dot_bf16", VF, (VF, VI, VI), _dot)  # sum + x·y by pairs
both_bf16 = _define("both_bf16", VI, (VF, VF), _both)
rounded_bf16 = _define("rounded_bf16", VF, (VF,), _round_to_bf16)
words_low = _define("words_low", VI, (VI, VI), lambda b, x, y: _words(b, x, y, 0))
words_high = _define("words_high", VI, (VI, VI), lambda b, x, y: _words(b, x, y, 4))
columns_low = _define("columns_low", VF, (VF, VF), lambda b, x, y: _columns(b, x, y, 0))
columns_high = _define("columns_high", VF, (VF, VF), lambda b, x, y: _columns(b, x, y, 8))
first_of_pairs = _define(  # of thirty-two numbers, x's first: every other one
    "first_of_pairs", VF, (VF, VF), lambda b, x, y: _shuffle(b, x, y, list(range(0, 32, 2)))
)
second_of_pairs = _define(
    "second_of_pairs", VF, (VF, VF), lambda b, x, y: _shuffle(b, x, y, list(range(1, 32, 2)))
)
upward = _define("upward", VF, (VF,), lambda b, x: _call(b, "llvm.ceil.v16f32", vf32, x))
