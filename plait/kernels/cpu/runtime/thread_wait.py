"""How threads wait for each other: clocks, sleeps and words of eight bytes, for use inside Numba."""

from __future__ import annotations

import platform
import time

from llvmlite import ir
from numba.core import cgutils

from plait.kernels.cpu.codegen.vec import VOID, WINDOWS, A, N, _at, _call, _define, i8, i32, i64

# The number of Linux's call that sleeps until a word changes; None elsewhere: a thread that waits takes naps.
FUTEX = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if platform.system() == "Linux" else None

# Words of eight bytes, at multiples of eight.
atomic_get_i64 = _define("atomic_get_i64", A, (A,), lambda b, a: b.load_atomic(_at(b, a, i64), "seq_cst", 8))
atomic_swap_i64 = _define(
    "atomic_swap_i64", A, (A, A), lambda b, a, v: b.atomic_rmw("xchg", _at(b, a, i64), v, "seq_cst")
)
atomic_add_i64 = _define(
    "atomic_add_i64", A, (A, A), lambda b, a, v: b.atomic_rmw("add", _at(b, a, i64), v, "seq_cst")
)
give_way = _define("give_way", N, (), lambda b: _call(b, "SwitchToThread" if WINDOWS else "sched_yield", i32))


def _nanosleep(b: ir.IRBuilder, spec: ir.Value) -> ir.Value:
    """libc's nanosleep; `spec`: the address of two int64, seconds and nanoseconds. On Windows 1 ms."""
    if WINDOWS:
        _call(b, "Sleep", VOID, ir.Constant(i32, 1))
        return ir.Constant(i32, 0)
    kind = ir.FunctionType(i32, [i8.as_pointer(), i8.as_pointer()])
    fn = cgutils.get_or_insert_function(b.module, kind, "nanosleep")
    return b.call(fn, [_at(b, spec, i8), ir.Constant(i8.as_pointer(), None)])


def _futex(b: ir.IRBuilder, address: ir.Value, operation: ir.Value, value: ir.Value) -> ir.Value:
    """A call of Linux. Operation 128: wait while *address == value; 129: wake that many."""
    if FUTEX is None:
        return ir.Constant(i32, -1)
    kind = ir.FunctionType(i64, [i64], var_arg=True)
    fn = cgutils.get_or_insert_function(b.module, kind, "syscall")
    null = ir.Constant(i64, 0)
    number = ir.Constant(i64, FUTEX)
    words = (number, address, b.sext(operation, i64), b.sext(value, i64), null, null, null)
    return b.trunc(b.call(fn, words), i32)


def _clock(b: ir.IRBuilder) -> ir.Value:
    """Nanoseconds of a clock that never goes back. On Windows in steps of 16 ms, right in the mean."""
    if WINDOWS:
        return b.mul(_call(b, "GetTickCount64", i64), ir.Constant(i64, 1_000_000))
    place = cgutils.alloca_once(b, ir.ArrayType(i64, 2))
    kind = ir.FunctionType(i32, [i32, i8.as_pointer()])
    fn = cgutils.get_or_insert_function(b.module, kind, "clock_gettime")
    b.call(fn, [ir.Constant(i32, time.CLOCK_MONOTONIC), b.bitcast(place, i8.as_pointer())])
    seconds, rest = (b.load(cgutils.gep_inbounds(b, place, 0, k)) for k in (0, 1))
    return b.add(b.mul(seconds, ir.Constant(i64, 1_000_000_000)), rest)


nanosleep = _define("nanosleep", N, (A,), _nanosleep)
clock = _define("clock", A, (), _clock)
futex = _define("futex", N, (A, N, N), _futex)
