"""Vectors of sixteen lanes, dot products of bytes, atomics and calls by address, for use inside Numba.

Every function here is a Numba intrinsic that becomes a few LLVM instructions. Addresses are plain int64
(`Tensor.data_ptr()`). LLVM splits sixteen lanes as AVX-512, AVX2, NEON and others need; `dot`, `dot8` and
waits know instructions (`target.DOT`). Nothing reorders additions: a kernel has one order on every machine.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from functools import partial
from inspect import Parameter, Signature
from typing import Any, TypeVar, TypeVarTuple, overload

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, models, register_model

from plait.kernels.cpu.codegen import byte_dot, plain_x86
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int, Ints
from plait.kernels.cpu.codegen.target import AARCH64, DOT

LANES = 16
i8, i16, i32, i64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
f16, f32 = ir.HalfType(), ir.FloatType()
vi8, vi16, vi32 = (ir.VectorType(t, LANES) for t in (i8, i16, i32))
vf16, vf32 = ir.VectorType(f16, LANES), ir.VectorType(f32, LANES)
VOID = ir.VoidType()
_call = plain_x86.call
WINDOWS = platform.system() == "Windows"


class Vector(types.Type):
    """Numba's name for an LLVM vector."""

    def __init__(self, name: str, llvm: ir.Type) -> None:
        self.llvm = llvm
        super().__init__(name=name)


@register_model(Vector)
class VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: Vector) -> None:
        super().__init__(manager, kind, kind.llvm)  # type: ignore[no-untyped-call]


def _forget_type(value: Any) -> Any:
    return value


# To Numba a kind is one of its types; to type checkers it is what may be given for it.
VI: Ints = _forget_type(Vector("v16i32", vi32))
VF: Floats = _forget_type(Vector("v16f32", vf32))
A: Int = _forget_type(types.int64)  # an address or size
N: Int = _forget_type(types.int32)
F: Float = _forget_type(types.float32)
Emit = Callable[..., ir.Value]
DEFINED: dict[str, tuple[Any, tuple[Any, ...], Emit]] = {}  # what `straight` writes by itself
Args = TypeVarTuple("Args")
Result = TypeVar("Result")


def name_arguments(function: Any, count: int) -> None:
    """Numba asks how many arguments the function of an intrinsic has."""
    names = ("context", *(f"argument{i}" for i in range(count)))
    function.__signature__ = Signature([Parameter(n, Parameter.POSITIONAL_OR_KEYWORD) for n in names])


@overload
def _define(name: str, result: Int, arguments: tuple[*Args], emit: Emit) -> Callable[[*Args], int]: ...
@overload
def _define(name: str, result: Float, arguments: tuple[*Args], emit: Emit) -> Callable[[*Args], float]: ...
@overload
def _define(name: str, result: Result, arguments: tuple[*Args], emit: Emit) -> Callable[[*Args], Result]: ...
def _define(name: str, result: Any, arguments: tuple[Any, ...], emit: Emit) -> Any:
    """An intrinsic of that signature; `emit(builder, *values)` writes its instructions."""
    DEFINED[name] = (result, arguments, emit)

    def typed(*_: Any) -> tuple[Any, Any]:
        return result(*arguments), lambda context, builder, signature, values: emit(builder, *values)

    name_arguments(typed, len(arguments))
    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)


def _splat(b: ir.IRBuilder, value: ir.Value) -> ir.Value:
    kind = ir.VectorType(value.type, LANES)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(i32, 0))
    return b.shuffle_vector(one, ir.Constant(kind, ir.Undefined), ir.Constant(vi32, [0] * LANES))


def _ints(value: int) -> ir.Constant:
    return ir.Constant(vi32, [value] * LANES)


def _at(b: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    return b.inttoptr(address, kind.as_pointer())


def _load(b: ir.IRBuilder, address: ir.Value, kind: ir.Type, align: int = 1) -> ir.Value:
    value = b.load(_at(b, address, kind))
    value.align = align
    return value


def _store(b: ir.IRBuilder, address: ir.Value, value: ir.Value, align: int = 1) -> ir.Value:
    b.store(value, _at(b, address, value.type)).align = align
    return ir.Constant(i32, 0)


def _loader(name: str, result: Result, kind: ir.Type, convert: Emit | None = None) -> Callable[[Int], Result]:
    def emit(b: ir.IRBuilder, a: ir.Value) -> ir.Value:
        value = _load(b, a, kind)
        return convert(b, value) if convert else value

    return _define(name, result, (A,), emit)


# ---- float16 where no instruction converts it: LLVM would call a function that is in no library of ours ----
SOFT_HALF = DOT == "generic"


def _whole(kind: ir.Type, value: float) -> ir.Constant:
    """A number, or a vector full of it."""
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def _kinds(x: ir.Value) -> tuple[ir.Type, ir.Type, ir.Type, ir.Type]:
    """Types of 16-bit ints, halves, 32-bit ints and floats, as many as x is of."""
    return (vi16, vf16, vi32, vf32) if isinstance(x.type, ir.VectorType) else (i16, f16, i32, f32)


def _from_half(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The bits of float16 as float32, exactly."""
    _, halves, ints, floats = _kinds(x)
    if not SOFT_HALF:
        return b.fpext(b.bitcast(x, halves), floats)
    u = b.zext(x, ints)
    size = b.and_(u, _whole(ints, 0x7FFF))
    moved = b.shl(size, _whole(ints, 13))
    normal = b.add(moved, _whole(ints, 112 << 23))
    tiny = b.bitcast(b.fmul(b.uitofp(size, floats), _whole(floats, 2.0**-24)), ints)
    nan = b.icmp_unsigned(">", size, _whole(ints, 0x7C00))
    quiet = b.select(nan, _whole(ints, 0x7FC00000), _whole(ints, 0x7F800000))
    value = b.select(b.icmp_unsigned("<", size, _whole(ints, 0x400)), tiny, normal)
    value = b.select(b.icmp_unsigned(">=", size, _whole(ints, 0x7C00)), b.or_(moved, quiet), value)
    return b.bitcast(b.or_(value, b.shl(b.and_(u, _whole(ints, 0x8000)), _whole(ints, 16))), floats)


def _to_half(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The bits of float32 rounded to float16, to nearest even."""
    shorts, halves, ints, floats = _kinds(x)
    if not SOFT_HALF:
        return b.bitcast(b.fptrunc(x, halves), shorts)
    u = b.bitcast(x, ints)
    size = b.and_(u, _whole(ints, 0x7FFFFFFF))
    odd = b.and_(b.lshr(size, _whole(ints, 13)), _whole(ints, 1))
    value = b.add(b.sub(size, _whole(ints, 112 << 23)), b.add(odd, _whole(ints, 0xFFF)))
    value = b.lshr(value, _whole(ints, 13))
    # Once 0.5 is added, a float32 keeps multiples of 2**-24 only, as float16 does below 2**-14.
    beside = b.bitcast(b.fadd(b.bitcast(size, floats), _whole(floats, 0.5)), ints)
    tiny = b.sub(beside, _whole(ints, 0x3F000000))
    value = b.select(b.icmp_unsigned("<", size, _whole(ints, 113 << 23)), tiny, value)
    value = b.select(b.icmp_unsigned(">=", size, _whole(ints, 0x47800000)), _whole(ints, 0x7C00), value)
    kept = b.or_(b.and_(b.lshr(size, _whole(ints, 13)), _whole(ints, 0x3FF)), _whole(ints, 0x7E00))
    value = b.select(b.icmp_unsigned(">", size, _whole(ints, 0x7F800000)), kept, value)
    return b.trunc(b.or_(value, b.and_(b.lshr(u, _whole(ints, 16)), _whole(ints, 0x8000))), shorts)


def _half_bytes(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The lower halves of eight bytes, then the upper ones, times four."""
    wide = b.zext(b.shuffle_vector(x, x, ir.Constant(vi32, [*range(8), *range(8)])), vi32)
    turns = ir.Constant(vi32, [2] * 8 + [30] * 8)
    return b.and_(_call(b, "llvm.fshl.v16i32", vi32, wide, wide, turns), _ints(60))  # one in AVX-512


# ---- vectors from memory and back ----
load_i32 = _loader("load_i32", VI, vi32)  # 64 bytes as they are
load_f32 = _loader("load_f32", VF, vf32)
load_f16 = _loader("load_f16", VF, vi16, _from_half)
load_bf16 = _loader("load_bf16", VF, vi16, lambda b, x: b.bitcast(b.shl(b.zext(x, vi32), _ints(16)), vf32))
load_u8 = _loader("load_u8", VI, vi8, lambda b, x: b.zext(x, vi32))  # sixteen bytes, widened
load_i8 = _loader("load_i8", VI, vi8, lambda b, x: b.sext(x, vi32))
load_u4_fourfold = _loader("load_u4_fourfold", VI, ir.VectorType(i8, 8), _half_bytes)
spread_i32 = _loader("spread_i32", VI, i32, _splat)  # four bytes in every lane
spread_f32 = _loader("spread_f32", VF, f32, _splat)
store_f32 = _define("store_f32", N, (A, VF), _store)
store_i32 = _define("store_i32", N, (A, VI), _store)
store_i8 = _define("store_i8", N, (A, VI), lambda b, a, x: _store(b, a, b.trunc(x, vi8)))


def _round_bf16(b: ir.IRBuilder, x: ir.Value, ints: ir.Type, const: Callable[[int], ir.Value]) -> ir.Value:
    """The bits of float32 rounded to bfloat16, to nearest even, in the low half of each int. NaN stays."""
    u = b.bitcast(x, ints)
    odd = b.and_(b.lshr(u, const(16)), const(1))
    even = b.lshr(b.add(u, b.add(const(0x7FFF), odd)), const(16))
    return b.select(b.fcmp_unordered("uno", x, x), const(0x7FC0), even)


store_bf16 = _define(
    "store_bf16", N, (A, VF), lambda b, a, x: _store(b, a, b.trunc(_round_bf16(b, x, vi32, _ints), vi16))
)
store_f16 = _define("store_f16", N, (A, VF), lambda b, a, x: _store(b, a, _to_half(b, x)))


def _load_masked(b: ir.IRBuilder, a: ir.Value, count: ir.Value) -> ir.Value:
    """The first `count` floats; the rest is 0 and is not read."""
    if not AARCH64:
        return _mask_some(b, a, count)
    with b.if_else(_all_lanes(b, count)) as (whole, some):
        with whole:
            every, from_whole = _load(b, a, vf32), b.block
        with some:
            part, from_some = _mask_some(b, a, count), b.block
    value = b.phi(vf32)
    value.add_incoming(every, from_whole)
    value.add_incoming(part, from_some)
    return value


def _all_lanes(b: ir.IRBuilder, count: ir.Value) -> ir.Value:
    """Whether no mask is needed: NEON has none, so that each lane would be a branch."""
    return b.icmp_signed(">=", count, ir.Constant(i32, LANES))


def _mask_some(b: ir.IRBuilder, a: ir.Value, count: ir.Value) -> ir.Value:
    mask = b.icmp_signed("<", ir.Constant(vi32, list(range(LANES))), _splat(b, count))
    pointer = _at(b, a, vf32)
    kind = ir.FunctionType(vf32, [pointer.type, i32, mask.type, vf32])
    fn = cgutils.get_or_insert_function(b.module, kind, "llvm.masked.load.v16f32.p0")
    return b.call(fn, [pointer, ir.Constant(i32, 1), mask, ir.Constant(vf32, [0.0] * LANES)])


def _store_masked(b: ir.IRBuilder, a: ir.Value, x: ir.Value, count: ir.Value) -> ir.Value:
    """Only the first `count` floats are written."""
    if not AARCH64:
        return _mask_stored(b, a, x, count)
    with b.if_else(_all_lanes(b, count)) as (whole, some):
        with whole:
            _store(b, a, x)
        with some:
            _mask_stored(b, a, x, count)
    return ir.Constant(i32, 0)


def _mask_stored(b: ir.IRBuilder, a: ir.Value, x: ir.Value, count: ir.Value) -> ir.Value:
    mask = b.icmp_signed("<", ir.Constant(vi32, list(range(LANES))), _splat(b, count))
    pointer = _at(b, a, vf32)
    kind = ir.FunctionType(VOID, [vf32, pointer.type, i32, mask.type])
    fn = cgutils.get_or_insert_function(b.module, kind, "llvm.masked.store.v16f32.p0")
    b.call(fn, [x, pointer, ir.Constant(i32, 1), mask])
    return ir.Constant(i32, 0)


load_some = _define("load_some", VF, (A, N), _load_masked)
store_some = _define("store_some", N, (A, VF, N), _store_masked)

# ---- integers ----
zero_i32 = _define("zero_i32", VI, (), lambda b: _ints(0))
spread_int = _define("spread_int", VI, (N,), _splat)
add_i32 = _define("add_i32", VI, (VI, VI), lambda b, x, y: b.add(x, y))
sub_i32 = _define("sub_i32", VI, (VI, VI), lambda b, x, y: b.sub(x, y))
mul_i32 = _define("mul_i32", VI, (VI, VI), lambda b, x, y: b.mul(x, y))
and_i32 = _define("and_i32", VI, (VI, VI), lambda b, x, y: b.and_(x, y))
or_i32 = _define("or_i32", VI, (VI, VI), lambda b, x, y: b.or_(x, y))
left = _define("left", VI, (VI, N), lambda b, x, n: b.shl(x, _splat(b, n)))
right = _define("right", VI, (VI, N), lambda b, x, n: b.lshr(x, _splat(b, n)))  # zeros come in
low4 = _define("low4", VI, (VI,), lambda b, x: b.and_(x, _ints(0x0F0F0F0F)))
high4 = _define("high4", VI, (VI,), lambda b, x: b.and_(b.lshr(x, _ints(4)), _ints(0x0F0F0F0F)))
sum_i32 = _define("sum_i32", N, (VI,), lambda b, x: _call(b, "llvm.vector.reduce.add.v16i32", i32, x))


# ---- floats ----
def _fma(b: ir.IRBuilder, x: ir.Value, y: ir.Value, z: ir.Value) -> ir.Value:
    """x · y + z, rounded once."""
    return plain_x86.fma(b, x, y, z) if plain_x86.HERE else _call(b, "llvm.fma.v16f32", vf32, x, y, z)


def _nearest(b: ir.IRBuilder, x: ir.Value) -> ir.Value:
    """The nearest whole number, half to even."""
    return plain_x86.nearest(b, x) if plain_x86.HERE else _call(b, "llvm.rint.v16f32", vf32, x)


zero_f32 = _define("zero_f32", VF, (), lambda b: ir.Constant(vf32, [0.0] * LANES))
spread = _define("spread", VF, (F,), _splat)
to_f32 = _define("to_f32", VF, (VI,), lambda b, x: b.sitofp(x, vf32))
add = _define("add", VF, (VF, VF), lambda b, x, y: b.fadd(x, y))
sub = _define("sub", VF, (VF, VF), lambda b, x, y: b.fsub(x, y))
mul = _define("mul", VF, (VF, VF), lambda b, x, y: b.fmul(x, y))
div = _define("div", VF, (VF, VF), lambda b, x, y: b.fdiv(x, y))
fma = _define("fma", VF, (VF, VF, VF), _fma)
absolute = _define("absolute", VF, (VF,), lambda b, x: _call(b, "llvm.fabs.v16f32", vf32, x))
root = _define("root", VF, (VF,), lambda b, x: _call(b, "llvm.sqrt.v16f32", vf32, x))
largest = _define("largest", VF, (VF, VF), lambda b, x, y: _call(b, "llvm.maxnum.v16f32", vf32, x, y))
smallest = _define("smallest", VF, (VF, VF), lambda b, x, y: _call(b, "llvm.minnum.v16f32", vf32, x, y))
nearest = _define("nearest", VF, (VF,), _nearest)
to_i32 = _define("to_i32", VI, (VF,), lambda b, x: b.fptosi(x, vi32))  # of whole numbers
low_bf16 = _define("low_bf16", VF, (VI,), lambda b, x: b.bitcast(b.shl(x, _ints(16)), vf32))
high_bf16 = _define("high_bf16", VF, (VI,), lambda b, x: b.bitcast(b.and_(x, _ints(-65536)), vf32))
bits_f32 = _define("bits_f32", VF, (VI,), lambda b, x: b.bitcast(x, vf32))
bits_i32 = _define("bits_i32", VI, (VF,), lambda b, x: b.bitcast(x, vi32))


def _halves(b: ir.IRBuilder, x: ir.Value, combine: Emit) -> ir.Value:
    """Reduce sixteen lanes to one, always in the same tree, so that every machine gets the same bits."""
    width = LANES
    while width > 1:
        width //= 2
        kind = ir.VectorType(i32, width)
        lower = b.shuffle_vector(x, x, ir.Constant(kind, list(range(width))))
        upper = b.shuffle_vector(x, x, ir.Constant(kind, list(range(width, 2 * width))))
        x = combine(b, lower, upper)
    return b.extract_element(x, ir.Constant(i32, 0))


def _max(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.fcmp_ordered(">", x, y), x, y)


total = _define("total", F, (VF,), lambda b, x: _halves(b, x, lambda b, x, y: b.fadd(x, y)))
peak = _define("peak", F, (VF,), lambda b, x: _halves(b, x, _max))


def _furthest(b: ir.IRBuilder, x: ir.Value, y: ir.Value) -> ir.Value:
    """Sizes are in order of their bits, and infinity and what is no number come last."""
    x, y = (b.and_(b.bitcast(v, vi32), _ints(0x7FFFFFFF)) for v in (x, y))
    most = b.select(b.icmp_signed(">", x, y), x, y)
    return b.bitcast(_call(b, "llvm.vector.reduce.smax.v16i32", i32, most), f32)


later_bits = _define(  # lane by lane, of numbers that are not negative: a NaN comes after infinity
    "later_bits",
    VF,
    (VF, VF),
    lambda b, x, y: b.select(b.icmp_signed(">", b.bitcast(x, vi32), b.bitcast(y, vi32)), x, y),
)
furthest = _define("furthest", F, (VF, VF), _furthest)  # from 0: the largest size; NaN if one number is


def _power_of_two(b: ir.IRBuilder, n: ir.Value) -> ir.Value:
    """2**n of whole n in -126..127."""
    return b.bitcast(b.shl(b.add(b.fptosi(n, vi32), _ints(127)), _ints(23)), vf32)


def _select_below(b: ir.IRBuilder, count: ir.Value, x: ir.Value, y: ir.Value) -> ir.Value:
    return b.select(b.icmp_signed("<", ir.Constant(vi32, list(range(LANES))), _splat(b, count)), x, y)


power_of_two = _define("power_of_two", VF, (VF,), _power_of_two)
where_below = _define("where_below", VF, (N, VF, VF), _select_below)  # lane < n ? x : y
lanes = _define("lanes", VI, (), lambda b: ir.Constant(vi32, list(range(LANES))))
where_less = _define(
    "where_less", VF, (VF, VF, VF, VF), lambda b, p, q, x, y: b.select(b.fcmp_ordered("<", p, q), x, y)
)


def _interleave(b: ir.IRBuilder, x: ir.Value, y: ir.Value, start: int) -> ir.Value:
    order = [lane for j in range(8) for lane in (start + j, LANES + start + j)]
    return b.shuffle_vector(x, y, ir.Constant(vi32, order))


interleave_low = _define("interleave_low", VF, (VF, VF), lambda b, x, y: _interleave(b, x, y, 0))
interleave_high = _define("interleave_high", VF, (VF, VF), lambda b, x, y: _interleave(b, x, y, 8))


# ---- four products of unsigned by signed bytes, added to each lane: the heart of every quantized linear ----
dot = _define("dot", VI, (VI, VI, VI), byte_dot.DOTS[DOT][0])  # sum + u·v by fours; u in 0..127
dot8 = _define("dot8", VI, (VI, VI, VI), byte_dot.DOTS[DOT][1])  # u in 0..255

# ---- single numbers ----
get_i64 = _define("get_i64", A, (A,), lambda b, a: _load(b, a, i64, 8))
get_i32 = _define("get_i32", N, (A,), lambda b, a: _load(b, a, i32, 4))
get_u8 = _define("get_u8", N, (A,), lambda b, a: b.zext(_load(b, a, i8), i32))
get_i8 = _define("get_i8", N, (A,), lambda b, a: b.sext(_load(b, a, i8), i32))
get_f32 = _define("get_f32", F, (A,), lambda b, a: _load(b, a, f32, 4))
get_f16 = _define("get_f16", F, (A,), lambda b, a: _from_half(b, _load(b, a, i16)))
get_bf16 = _define(
    "get_bf16",
    F,
    (A,),
    lambda b, a: b.bitcast(b.shl(b.zext(_load(b, a, i16), i32), ir.Constant(i32, 16)), f32),
)
put_i64 = _define("put_i64", N, (A, A), lambda b, a, v: _store(b, a, v, 8))
put_i32 = _define("put_i32", N, (A, N), lambda b, a, v: _store(b, a, v, 4))
put_u8 = _define("put_u8", N, (A, N), lambda b, a, v: _store(b, a, b.trunc(v, i8)))
put_f32 = _define("put_f32", N, (A, F), lambda b, a, v: _store(b, a, v, 4))


def _put_bf16(b: ir.IRBuilder, a: ir.Value, v: ir.Value) -> ir.Value:
    return _store(b, a, b.trunc(_round_bf16(b, v, i32, lambda n: ir.Constant(i32, n)), i16))


put_bf16 = _define("put_bf16", N, (A, F), _put_bf16)


def _prefetch(near: int, writes: int, b: ir.IRBuilder, a: ir.Value) -> ir.Value:
    """near: 3 for the first cache, 2 for the second; writes: 1 if the line will be written."""
    kind = ir.FunctionType(VOID, [i8.as_pointer(), i32, i32, i32])
    fn = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0")
    b.call(fn, [_at(b, a, i8), *(ir.Constant(i32, n) for n in (writes, near, 1))])  # 1: data
    return ir.Constant(i32, 0)


prefetch = _define("prefetch", N, (A,), partial(_prefetch, 3, 0))
prefetch_l2 = _define("prefetch_l2", N, (A,), partial(_prefetch, 2, 0))
prefetch_to_write = _define("prefetch_to_write", N, (A,), partial(_prefetch, 3, 1))
# ---- threads ----
# In one order for all: who says that work is there and then looks for sleepers, and who says that it sleeps
# and then looks for work, must not both miss the other. On x86-64 weaker words give the same instructions.
atomic_add = _define(
    "atomic_add", N, (A, N), lambda b, a, v: b.atomic_rmw("add", _at(b, a, i32), v, "seq_cst")
)
atomic_get = _define("atomic_get", N, (A,), lambda b, a: b.load_atomic(_at(b, a, i32), "seq_cst", 4))


def _atomic_put(b: ir.IRBuilder, a: ir.Value, v: ir.Value) -> ir.Value:
    b.store_atomic(v, _at(b, a, i32), "release", 4)
    return ir.Constant(i32, 0)


def _pause(b: ir.IRBuilder) -> ir.Value:
    """A hint that this is a spinning wait; nothing where the instruction set is not known."""
    if DOT in ("vnni", "avx-vnni", "avx2"):
        _call(b, "llvm.x86.sse2.pause", VOID)
    elif AARCH64:  # isb waits about as long as x86's pause; yield is mostly nothing
        _call(b, "llvm.aarch64.isb", VOID, ir.Constant(i32, 15))
    return ir.Constant(i32, 0)


def _call_kernel(b: ir.IRBuilder, fn: ir.Value, *values: ir.Value) -> ir.Value:
    kind = ir.FunctionType(VOID, [i64] * len(values))
    b.call(b.inttoptr(fn, kind.as_pointer()), values)
    return ir.Constant(i32, 0)


atomic_put = _define("atomic_put", N, (A, N), _atomic_put)
pause = _define("pause", N, (), _pause)
call_kernel = _define("call_kernel", N, (A, A, A, A, A), _call_kernel)  # address, then four arguments


# ---- doubles, one at a time ----
f64 = ir.DoubleType()
D: Float = _forget_type(types.float64)
get_f64 = _define("get_f64", D, (A,), lambda b, a: _load(b, a, f64, 8))
put_f64 = _define("put_f64", N, (A, D), lambda b, a, v: _store(b, a, v, 8))
bits_f64 = _define("bits_f64", D, (A,), lambda b, n: b.bitcast(n, f64))


# ---- the words of a launch ----
def _word(b: ir.IRBuilder, args: ir.Value, i: ir.Value) -> ir.Value:
    """Argument i, at args + 8 * i."""
    return _load(b, b.add(args, b.shl(i, ir.Constant(i64, 3))), i64, 8)


word = _define("word", A, (A, A), _word)


def _words(context: Any, args: Any, first: Any, end: Any) -> tuple[Any, Any]:
    places = range(first.literal_value, end.literal_value)

    def emit(context: Any, b: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
        return cgutils.pack_array(b, [_word(b, values[0], ir.Constant(i64, i)) for i in places])

    return types.UniTuple(types.int64, len(places))(types.int64, first, end), emit


# Arguments first..end of a launch: words(args, first, end), with constants for both.
words: Callable[[Int, int, int], Sequence[int]] = _forget_type(intrinsic(prefer_literal=True)(_words))

# ---- floats, one at a time, where `straight` calculates with them ----
quotient = _define("quotient", F, (F, F), lambda b, x, y: b.fdiv(x, y))
plus = _define("plus", F, (F, F), lambda b, x, y: b.fadd(x, y))
minus = _define("minus", F, (F, F), lambda b, x, y: b.fsub(x, y))
product = _define("product", F, (F, F), lambda b, x, y: b.fmul(x, y))
shorter = _define(  # without the last two bits
    "shorter", F, (F,), lambda b, x: b.bitcast(b.and_(b.bitcast(x, i32), ir.Constant(i32, -4)), f32)
)
to_float = _define("to_float", F, (N,), lambda b, n: b.sitofp(n, f32))
from_on = _define(  # x if value >= limit else 0
    "from_on",
    F,
    (F, F, F),
    lambda b, value, limit, x: b.select(b.fcmp_ordered(">=", value, limit), x, ir.Constant(f32, 0.0)),
)
