"""Four products of unsigned by signed bytes, added to each lane, in the instructions of each processor.

All give the same integers. `DOTS` has two for each `target.DOT`: of u in 0..127, and of u in 0..255.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llvmlite import ir

from plait.kernels.cpu.codegen import plain_x86
from plait.kernels.cpu.codegen.plain_x86 import LANES, call

_i8, _i16, _i32 = (ir.IntType(bits) for bits in (8, 16, 32))
_vi32 = ir.VectorType(_i32, LANES)
_v8i32, _v16i16, _v32i8 = ir.VectorType(_i32, 8), ir.VectorType(_i16, 16), ir.VectorType(_i8, 32)
_v4i32, _v8i16 = ir.VectorType(_i32, 4), ir.VectorType(_i16, 8)  # registers of NEON
Emit = Callable[..., ir.Value]


def _ints(value: int) -> ir.Constant:
    return ir.Constant(_vi32, [value] * LANES)


def by_halves(one: Emit, b: ir.IRBuilder, *given: ir.Value) -> ir.Value:
    """`one` of each of the two registers of 256 bits that vectors are in."""
    parts = []
    for k in (0, 8):
        order = ir.Constant(_v8i32, list(range(k, k + 8)))
        parts.append(b.bitcast(one(b, *(b.shuffle_vector(x, x, order) for x in given)), _v8i32))
    return b.shuffle_vector(*parts, ir.Constant(_vi32, list(range(LANES))))


def multiply_unsigned(b: ir.IRBuilder, u: ir.Value, v: ir.Value) -> ir.Value:
    """Sums of two products, in 16 bits."""
    return call(b, "llvm.x86.avx2.pmadd.ub.sw", _v16i16, b.bitcast(u, _v32i8), b.bitcast(v, _v32i8))


def join_pairs(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Sums of two sums, in 32 bits."""
    ones = ir.Constant(_v16i16, [1] * 16)
    return call(b, "llvm.x86.avx2.pmadd.wd", _v8i32, b.bitcast(x, _v16i16), ones)


def _add_fours(size: int, b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    """The instruction of VNNI, for registers of so many bits. LLVM before 21 has bytes as int32, too."""
    return call(b, f"llvm.x86.avx512.vpdpbusd.{size}", s.type, s, u, v)


def _products_avx2(b: ir.IRBuilder, u: ir.Value, v: ir.Value) -> ir.Value:
    return by_halves(lambda b, u, v: join_pairs(b, multiply_unsigned(b, u, v)), b, u, v)


def _dot_avx2(b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    return b.add(s, _products_avx2(b, u, v))


def _dot8_avx2(b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    """Seven bits and the top one apart: the sum of two full products would not fit into 16 bits."""
    low = _products_avx2(b, b.and_(u, _ints(0x7F7F7F7F)), v)
    top = _products_avx2(b, b.and_(b.lshr(u, _ints(7)), _ints(0x01010101)), v)
    return b.add(b.add(s, low), b.shl(top, _ints(7)))


def _dot_generic(b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    if plain_x86.HERE:
        return plain_x86.dot(b, s, u, v)
    for j in range(4):
        byte = b.and_(b.lshr(u, _ints(8 * j)), _ints(255))
        signed = b.ashr(b.shl(v, _ints(24 - 8 * j)), _ints(24))
        s = b.add(s, b.mul(byte, signed))
    return s


def _quarters(b: ir.IRBuilder, x: ir.Value, lanes: int) -> list[ir.Value]:
    """Sixteen ints as registers of NEON, each `lanes` bytes: sixteen (a whole one) or eight."""
    x, kind = b.bitcast(x, ir.VectorType(_i8, 64)), ir.VectorType(_i32, lanes)
    starts = range(0, 64, lanes)
    return [b.shuffle_vector(x, x, ir.Constant(kind, list(range(n, n + lanes)))) for n in starts]


def _join_registers(b: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """Four registers of four ints as one vector."""
    kind = ir.VectorType(_i32, 8)
    low, high = (b.shuffle_vector(p, q, ir.Constant(kind, list(range(8)))) for p, q in (parts[:2], parts[2:]))
    return b.shuffle_vector(low, high, ir.Constant(_vi32, list(range(LANES))))


def _by_fours(name: str, b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    """An instruction of aarch64 that multiplies bytes by fours: sdot (signed) or usdot (u is unsigned)."""
    sums = [b.shuffle_vector(s, s, ir.Constant(_v4i32, list(range(n, n + 4)))) for n in range(0, LANES, 4)]
    given = zip(sums, _quarters(b, u, 16), _quarters(b, v, 16), strict=True)
    return _join_registers(
        b, [call(b, f"llvm.aarch64.neon.{name}.v4i32.v16i8", _v4i32, *part) for part in given]
    )


def _dot8_sdot(b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    """u as a signed byte is 128 less: so 128 times the sum of v is added."""
    ones, top = _ints(0x01010101), _ints(-0x7F7F7F80)
    beside = _by_fours("sdot", b, _ints(0), ones, v)
    return _by_fours("sdot", b, b.add(s, b.shl(beside, _ints(7))), b.xor(u, top), v)


def _pairs(b: ir.IRBuilder, name: str, x: ir.Value, y: ir.Value | None = None) -> ir.Value:
    """Sums of neighbours: "addp" of two registers, "saddlp" of one, in numbers twice as wide."""
    kind = ir.VectorType(_i32, 4) if name == "saddlp" else x.type
    of = "v4i32.v8i16" if name == "saddlp" else f"v{kind.count}i{kind.element.width}"
    return call(b, f"llvm.aarch64.neon.{name}.{of}", kind, *([x] if y is None else [x, y]))


def _dot_neon(b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    """Two products, each 127 · 128 at most, fit into 16 bits."""
    products = [
        call(b, "llvm.aarch64.neon.smull.v8i16", _v8i16, *part)
        for part in zip(_quarters(b, u, 8), _quarters(b, v, 8), strict=True)
    ]
    twos = [_pairs(b, "addp", *products[n : n + 2]) for n in range(0, 8, 2)]
    return b.add(s, _join_registers(b, [_pairs(b, "saddlp", x) for x in twos]))


def _dot8_neon(b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    """A product, -255 · 128 at least, fits into 16 bits; a sum of two does not."""
    products = [
        b.mul(b.zext(x, _v8i16), b.sext(y, _v8i16))
        for x, y in zip(_quarters(b, u, 8), _quarters(b, v, 8), strict=True)
    ]
    twos = [_pairs(b, "saddlp", x) for x in products]
    return b.add(s, _join_registers(b, [_pairs(b, "addp", *twos[n : n + 2]) for n in range(0, 8, 2)]))


_VNNI, _AVX_VNNI = partial(_add_fours, 512), partial(by_halves, partial(_add_fours, 256))
DOTS: dict[str, tuple[Emit, Emit]] = {
    "vnni": (_VNNI, _VNNI),
    "avx-vnni": (_AVX_VNNI, _AVX_VNNI),
    "avx2": (_dot_avx2, _dot8_avx2),
    "neon-i8mm": (partial(_by_fours, "sdot"), partial(_by_fours, "usdot")),
    "neon-dotprod": (partial(_by_fours, "sdot"), _dot8_sdot),
    "neon": (_dot_neon, _dot8_neon),
    "generic": (_dot_generic, _dot_generic),
}
