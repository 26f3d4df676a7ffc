"""What x86-64 without AVX2 and FMA has no instructions for: fused multiply-add, rounding, products of bytes.

LLVM would call a function of libm for each lane. Here all lanes go together, to the same bits; only
`write_fma` has its own.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from plait.kernels.cpu.codegen.target import DOT

HERE = DOT == "generic" and platform.machine().lower() in ("x86_64", "amd64")
LANES = 16
_i16, _i32 = ir.IntType(16), ir.IntType(32)
_vf32, _vf64 = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.DoubleType(), LANES)
_vi32, _v32i16, _v32i32 = (ir.VectorType(*kind) for kind in ((_i32, LANES), (_i16, 32), (_i32, 32)))
_v8i16, _v4i32, _v8i32 = (ir.VectorType(*kind) for kind in ((_i16, 8), (_i32, 4), (_i32, 8)))
SMALLEST = 2.0**-126  # of the float32 that have all their bits
WHOLE = 2.0**23  # from here on float32 are whole numbers


def call(b: ir.IRBuilder, name: str, result: ir.Type, *values: ir.Value) -> ir.Value:
    kind = ir.FunctionType(result, [v.type for v in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values)


def _all(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x · y + z, rounded once.

    In float64 the product is exact. Rounding the sum to float64 first does no harm, except in two cases that
    `_define_fma` treats: it falls in the middle between two float32, or has fewer bits than a float32.
    """
    wide = _sums(b, x, y, z)[2]
    narrow = b.fptrunc(wide, _vf32)
    halves = b.bitcast(wide, _v32i32)
    low = b.shuffle_vector(halves, halves, ir.Constant(_vi32, list(range(0, 32, 2))))
    middle = b.icmp_signed("==", b.shl(low, _all(_vi32, 3)), _all(_vi32, -(1 << 31)))
    small = b.fcmp_ordered("<=", call(b, "llvm.fabs.v16f32", _vf32, narrow), _all(_vf32, SMALLEST))
    before = b.block
    with b.if_then(_any(b, b.or_(middle, small)), likely=False):
        asked = b.call(_define_fma(b.module), [x, y, z])
        inside = b.block
    value = b.phi(_vf32)
    value.add_incoming(narrow, before)
    value.add_incoming(asked, inside)
    return value


def _sums(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> tuple[ir.Value, ir.Value, ir.Value]:
    """x · y, z, and their sum, in float64."""
    product, more = b.fmul(b.fpext(x, _vf64), b.fpext(y, _vf64)), b.fpext(z, _vf64)
    return product, more, b.fadd(product, more)


def _any(b: ir.IRBuilder, lanes: ir.Value) -> ir.Value:
    return b.icmp_unsigned("!=", b.bitcast(lanes, _i16), ir.Constant(_i16, 0))


def _define_fma(module: ir.Module) -> ir.Function:
    """fma, once more: sums that are exact in float64 are rounded once only, others are libm's.

    A function of its own, so that what runs seldom is there once.
    """
    name = "plait.fma"
    if name in module.globals:
        return module.globals[name]
    function = ir.Function(module, ir.FunctionType(_vf32, [_vf32] * 3), name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    b = ir.IRBuilder(function.append_basic_block())
    product, more, wide = _sums(b, *function.args)
    off = (
        b.fcmp_unordered("!=", b.fsub(wide, part), rest) for part, rest in ((product, more), (more, product))
    )
    with b.if_then(_any(b, b.or_(*off)), likely=False):
        b.ret(call(b, "llvm.fma.v16f32", _vf32, *function.args))
    b.ret(b.fptrunc(wide, _vf32))
    return function


def write_fma(w: Any, x: Any, y: Any, s: Any) -> Any:
    """Written by `llvm_writer.Writer` w: s + x · y, rounded once; twice where no instruction does that.

    For long sums of float32, which `fma` makes six times slower. They are as exact: their root mean square
    error over 576 to 8,192 inputs is 0.99 to 1.01 times the other's. But they have bits of their own there.
    """
    return w.add(w.mul(x, y), s) if HERE else w.fma(x, y, s)


def nearest(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The nearest whole number, half to even: 2**23 more has no bits for anything behind the point."""
    size = call(b, "llvm.fabs.v16f32", _vf32, x)
    whole = b.fsub(b.fadd(size, _all(_vf32, WHOLE)), _all(_vf32, WHOLE))
    signed = call(b, "llvm.copysign.v16f32", _vf32, whole, x)
    return b.select(b.fcmp_ordered("<", size, _all(_vf32, WHOLE)), signed, x)


def dot(b: ir.IRBuilder, s: ir.Value, u: ir.Value, v: ir.Value) -> ir.Value:
    """s + u · v by fours, of unsigned and signed bytes: even ones and odd ones, as 16-bit numbers by twos."""
    u, v, eight = b.bitcast(u, _v32i16), b.bitcast(v, _v32i16), _all(_v32i16, 8)
    even = _by_twos(b, b.and_(u, _all(_v32i16, 255)), b.ashr(b.shl(v, eight), eight))
    return b.add(b.add(s, even), _by_twos(b, b.lshr(u, eight), b.ashr(v, eight)))


def _by_twos(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    parts = []
    for start in range(0, 32, 8):
        order = ir.Constant(_v8i32, list(range(start, start + 8)))
        mine = (b.shuffle_vector(a, a, order) for a in (x, y))
        parts.append(call(b, "llvm.x86.sse2.pmadd.wd", _v4i32, *mine))
    order = ir.Constant(_v8i32, list(range(8)))
    low, high = (b.shuffle_vector(parts[n], parts[n + 1], order) for n in (0, 2))
    return b.shuffle_vector(low, high, ir.Constant(_vi32, list(range(LANES))))
