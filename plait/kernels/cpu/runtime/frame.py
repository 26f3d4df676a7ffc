"""The frame: numbers that change from step to step, barriers, waits and counters of threads, scratch memory.

A frame is a row of int64 words. A kernel reads the number of rows it works on from the frame, at the offset
that its first argument gives, so that a recorded step serves any batch.
"""

from __future__ import annotations

import time

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from plait.kernels.cpu.codegen import vec
from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    VOID,
    WINDOWS,
    A,
    N,
    _at,
    _call,
    _define,
    atomic_add,
    atomic_get,
    atomic_put,
    call_kernel,
    get_i64,
    get_u8,
    i8,
    i32,
    i64,
    pause,
)
from plait.kernels.cpu.runtime.frame_words import ARRIVED, FUTEX, SEQS, SLEEPERS, SPINS, TURN, WAIT, WAKE

word = vec.word

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


@inline
def barrier(frame: Int, threads: Int) -> None:
    """Wait for all threads. What they wrote before is seen by all afterwards.

    A thread that waits spins for a while, then sleeps (word WAIT): the one it waits for may have no core, and
    who spins loses its own right to one. The last to come counts the turn up and wakes sleepers (word WAKE).
    """
    if threads == 1:
        return
    sync = get_i64(frame)
    turn = atomic_get(sync + TURN)
    if atomic_add(sync + ARRIVED, 1) == threads - 1:
        atomic_put(sync + ARRIVED, 0)
        atomic_add(sync + TURN, 1)
        if atomic_get(sync + SLEEPERS) > 0:  # one that comes to sleep after this sees the new turn
            call_kernel(get_i64(frame + 8 * WAKE), sync, 0, 0, 0)
        return
    spins = 0
    while atomic_get(sync + TURN) == turn:
        spins += 1
        if spins < atomic_get(sync + SPINS):
            pause()
        else:
            call_kernel(get_i64(frame + 8 * WAIT), sync, turn, 0, 0)


@inline
def rows_of(frame: Int, args: Int) -> int:
    """How many rows this launch works on: its first argument says where in the frame that number is."""
    return get_i64(frame + get_i64(args))


@inline
def take_sequence(frame: Int, args: Int, parts: Int, where: tuple[Int, Int, Int]) -> tuple[Int, ...]:
    """Of the `parts` of every sequence with new tokens, one that no other thread takes.

    where: addresses of slots, query_start and has_history (`row_checks.Sequences`). Gives the part (below 0:
    all are taken), the slot, whether it has history, the first token and how many there are. The last
    sequences come first: prompts, the long work, are behind the decodes. Parts come in order: their states
    lie so in memory, which processors read ahead of where it is read.
    """
    slots, starts, history = where
    items = get_i64(frame + 8 * SEQS) * parts
    while True:
        i = items - 1 - np.int64(atomic_add(word(args, 1), np.int32(1)))
        if i < 0:
            return i, i, i, i, i
        s = i // parts
        first = get_i64(starts + 8 * s)
        tokens = get_i64(starts + 8 * s + 8) - first
        if tokens > 0:
            return parts - 1 - i % parts, get_i64(slots + 8 * s), np.int64(get_u8(history + s)), first, tokens


@inline
def scratch_of(frame: Int, thread: Int) -> int:
    """The address of this thread's own scratch memory."""
    return get_i64(frame + 32) + thread * get_i64(frame + 40)


@inline
def common_scratch(frame: Int) -> int:
    """The address of scratch memory that all threads share during one launch."""
    return get_i64(frame + 48)
