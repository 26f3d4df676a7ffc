"""Decodes small codes: tables of sixteen and eight-bit floats, as more operations of `llvm_writer.Writer`.

`look_NAME` takes lanes of four bytes, each 0..15, and gives what a table has there, less its smallest number:
results are unsigned, and `OFFSETS` has what they are too large by.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

from llvmlite import ir

from plait.kernels.cpu.codegen import vec
from plait.kernels.cpu.codegen.target import DOT
from plait.kernels.cpu.codegen.vec import DEFINED, LANES, SOFT_HALF, VF, VI, _ints, i32, vf32, vi32
from plait.quant.gguf_iq import IQ1_VALUES, IQ2_VALUES, IQ3_S_VALUES, IQ3_XXS_VALUES
from plait.quant.gguf_k import IQ4_VALUES
from plait.quant.gguf_parts import E2M1_TWICE

TABLES: Mapping[str, tuple[int, ...]] = {
    "iq1": IQ1_VALUES,
    "iq2": IQ2_VALUES,
    "iq3_xxs": IQ3_XXS_VALUES,
    "iq3_s": IQ3_S_VALUES,
    "iq4": IQ4_VALUES,
    "e2m1": E2M1_TWICE,
}
OFFSETS: Mapping[str, int] = {name: -min(values) for name, values in TABLES.items()}
_v64i8, _v32i8, _v16i8 = (ir.VectorType(vec.i8, n) for n in (64, 32, 16))
_v32i16 = ir.VectorType(vec.i16, 32)


def _constant(kind: ir.VectorType, values: list[int]) -> ir.Constant:
    """Bytes 128..255 as LLVM writes them."""
    return ir.Constant(kind, [v - 256 if v > 127 else v for v in values])


def _shuffle_bytes(b: ir.IRBuilder, table: ir.Value, x: ir.Value) -> ir.Value:
    """One byte shuffle of AVX-512, or two of AVX2: table[x], of sixteen bytes that are there four times."""
    if DOT == "vnni":
        return vec._call(b, "llvm.x86.avx512.pshuf.b.512", _v64i8, table, x)
    parts = []
    for start in (0, 32):
        order = ir.Constant(ir.VectorType(i32, 32), list(range(start, start + 32)))
        half = (b.shuffle_vector(v, v, order) for v in (table, x))
        parts.append(vec._call(b, "llvm.x86.avx2.pshuf.b", _v32i8, *half))
    return b.shuffle_vector(*parts, ir.Constant(ir.VectorType(i32, 64), list(range(64))))


def _look_up(b: ir.IRBuilder, table: list[int], x: ir.Value) -> ir.Value:
    return _shuffle_bytes(b, _constant(_v64i8, table * 4), x)


def _look_bytes(b: ir.IRBuilder, table: ir.Value, x: ir.Value) -> ir.Value:
    """table[x] of bytes 0..15."""
    return b.bitcast(_shuffle_bytes(b, b.bitcast(table, _v64i8), b.bitcast(x, _v64i8)), vi32)


def _interleave(start: int, b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Of every sixteen bytes eight of x, each before the one of y."""
    order = [
        64 * from_y + lane + start + i for lane in range(0, 64, 16) for i in range(8) for from_y in (0, 1)
    ]
    both = (b.bitcast(v, _v64i8) for v in (x, y))
    return b.bitcast(b.shuffle_vector(*both, ir.Constant(ir.VectorType(i32, 64), order)), vi32)


def _compare_each(b: ir.IRBuilder, table: list[int], x: ir.Value) -> ir.Value:
    """The same where no shuffle is known: codes are compared with each place in turn."""
    found = ir.Constant(_v64i8, [0] * 64)
    for place, value in enumerate(table):
        if value:
            hit = b.icmp_unsigned("==", x, ir.Constant(_v64i8, [place] * 64))
            found = b.select(hit, _constant(_v64i8, [value] * 64), found)
    return found


def _parts(b: ir.IRBuilder, x: ir.Value) -> list[ir.Value]:
    """64 bytes as four registers of NEON."""
    orders = [list(range(n, n + 16)) for n in range(0, 64, 16)]
    return [b.shuffle_vector(x, x, ir.Constant(vi32, order)) for order in orders]


def _whole(b: ir.IRBuilder, parts: list[ir.Value]) -> ir.Value:
    """And back."""
    halves = ir.Constant(ir.VectorType(i32, 32), list(range(32)))
    low, high = b.shuffle_vector(*parts[:2], halves), b.shuffle_vector(*parts[2:], halves)
    return b.shuffle_vector(low, high, ir.Constant(ir.VectorType(i32, 64), list(range(64))))


def _look_up_neon(b: ir.IRBuilder, table: list[int], x: ir.Value) -> ir.Value:
    """Four table lookups of NEON."""
    every = _constant(_v16i8, table)
    return _whole(b, [vec._call(b, "llvm.aarch64.neon.tbl1.v16i8", _v16i8, every, p) for p in _parts(b, x)])


def _look(name: str, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    values = [v + OFFSETS[name] for v in TABLES[name]]
    table = values + [0] * (16 - len(values))
    how = _look_up_neon if DOT.startswith("neon") else _compare_each if DOT == "generic" else _look_up
    return b.bitcast(how(b, table, b.bitcast(x, _v64i8)), vi32)


def _pick(b: ir.IRBuilder, table: ir.Value, index: ir.Value) -> ir.Value:
    """table[index & 15], of sixteen floats."""
    if DOT == "vnni":
        return vec._call(b, "llvm.x86.avx512.permvar.sf.512", vf32, table, index)
    index = b.and_(index, _ints(15))
    if DOT.startswith("neon"):  # by bytes: four of each float
        places = b.add(b.mul(index, _ints(0x04040404)), _ints(0x03020100))
        all_of_it = _parts(b, b.bitcast(table, _v64i8))
        found = [
            vec._call(b, "llvm.aarch64.neon.tbl4.v16i8", _v16i8, *all_of_it, p)
            for p in _parts(b, b.bitcast(places, _v64i8))
        ]
        return b.bitcast(_whole(b, found), vf32)
    picked: ir.Value = ir.Constant(vf32, [0.0] * LANES)
    for place in range(16):
        every = b.shuffle_vector(table, table, _ints(place))
        hit = b.icmp_unsigned("==", index, _ints(place))
        picked = b.select(hit, every, picked)
    return picked


def _widen(start: int, b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Sixteen of the 32 float16 in a vector, none of them infinite."""
    order = ir.Constant(vi32, list(range(start, start + LANES)))
    bits = b.shuffle_vector(b.bitcast(x, _v32i16), b.bitcast(x, _v32i16), order)
    if not SOFT_HALF:
        return b.fpext(b.bitcast(bits, ir.VectorType(vec.f16, LANES)), vf32)
    size = b.shl(b.zext(b.and_(bits, ir.Constant(bits.type, [0x7FFF] * LANES)), vi32), _ints(13))
    value = b.fmul(b.bitcast(size, vf32), ir.Constant(vf32, [2.0**112] * LANES))
    sign = b.shl(b.zext(b.lshr(bits, ir.Constant(bits.type, [15] * LANES)), vi32), _ints(31))
    return b.bitcast(b.or_(b.bitcast(value, vi32), sign), vf32)


def _halves(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The upper byte of every two, an E4M3 number, as a float16 that is 256 times too small."""
    sign = b.and_(x, _ints(-0x7FFF8000))
    return b.or_(sign, b.and_(b.lshr(x, _ints(1)), _ints(0x3F803F80)))


def _small(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """Sixteen E4M3 numbers without a sign, one in each lane, as float32."""
    return b.fmul(b.bitcast(b.shl(x, _ints(20)), vf32), ir.Constant(vf32, [2.0**120] * LANES))


DEFINED.update({f"look_{name}": (VI, (VI,), partial(_look, name)) for name in TABLES})
DEFINED["low_words"] = (VI, (VI, VI), partial(_interleave, 0))
DEFINED["high_words"] = (VI, (VI, VI), partial(_interleave, 8))
DEFINED["pick_f32"] = (VF, (VF, VI), _pick)
DEFINED["upper_e4m3"] = (VI, (VI,), _halves)
DEFINED["low_halves"] = (VF, (VI,), partial(_widen, 0))
DEFINED["high_halves"] = (VF, (VI,), partial(_widen, LANES))
DEFINED["from_e4m3"] = (VF, (VI,), _small)
if DOT in ("vnni", "avx-vnni", "avx2"):
    DEFINED["look_bytes"] = (VI, (VI, VI), _look_bytes)
