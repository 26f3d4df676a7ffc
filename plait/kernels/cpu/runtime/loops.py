"""The native loops of threads: a worker's life, a table of launches, and what waits at a barrier.

Invariants of the lock-free part:
* Only the caller posts, under the executor's lock. It writes all words before the command, which it swaps in
  sequentially consistent order: a worker that sees a new command sees its table.
* A command's number only grows, so no worker plays one twice. `leave` holds the number of its command, too.
* A thread that sleeps says so first, then looks at the word that it waits for. One that wakes others writes
  that word first, then looks for sleepers. So one of both sees the other.
* A launch that ends the steps is not the first of its table: all threads have read their number by then.
* Launch i uses counter i & 1. Thread 0 clears it behind the barrier, when no thread is left in launch i; the
  launch that uses it next begins behind one more barrier.
"""

from __future__ import annotations

import numpy as np

from plait.kernels.cpu.codegen.kernel import Kernel, entry, inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import (
    atomic_add,
    atomic_get,
    atomic_put,
    call_kernel,
    get_f32,
    get_i64,
    pause,
    put_f32,
    put_i64,
    words,
)
from plait.kernels.cpu.runtime.frame import (
    atomic_add_i64,
    atomic_get_i64,
    atomic_swap_i64,
    barrier,
    clock,
    futex,
    give_way,
    nanosleep,
    rows_of,
)
from plait.kernels.cpu.runtime.frame_words import (
    ASLEEP,
    BETWEEN,
    COUNT,
    FRAME,
    FUTEX,
    LEAVE,
    LINE,
    NAP,
    PATIENCE,
    SLEEPERS,
    STEPS,
    STOP,
    TABLE,
    TURN,
    WAITED,
)
from plait.kernels.cpu.runtime.threads import NativeLoops

AWAKE_SPINS = 20_000  # about half a millisecond: the next step of a running engine comes sooner
SPUN_US = 100  # what the spins of a barrier are taken for
HAS_FUTEX = FUTEX is not None


@inline
def _play(frame: Int, table: Int, count: Int, thread: Int, threads: Int, number: Int) -> Int:
    """Run a table of (kernel address, arguments address), all threads on each.

    Thread 0 loses patience when barriers have taken too long: it writes down after which launch the others
    leave (`number` counts them, and commands in the upper bits), before it meets them there. So all see the
    same, and it plays the rest alone. Returns how many play on, 0 for a thread that has left.
    """
    sync = get_i64(frame)
    for i in range(count):
        call_kernel(get_i64(table + 16 * i), frame, get_i64(table + 16 * i + 8), thread, threads)
        if threads > 1:
            over = thread == 0 and atomic_get_i64(sync + WAITED) > atomic_get_i64(sync + PATIENCE)
            if over:
                atomic_swap_i64(sync + LEAVE, number + i)
            barrier(frame, threads)
            if thread > 0:
                # A later command's word says that this one is over; that one was played without this thread.
                leave = atomic_get_i64(sync + LEAVE)
                if leave >> 24 > number >> 24 or (leave >> 24 == number >> 24 and leave <= number + i):
                    return 0
            elif over:
                threads = 1
        if thread == 0:
            atomic_put(
                get_i64(frame + 56) + 64 * (i & 1), np.int32(0)
            )  # its share counter, for the one after
    return threads


@kernel
def wait_for_turn(sync: int, turn: int, _: int, __: int) -> None:
    """Sleep at a barrier until its turn is over; for how long, with the spins before, is added up."""
    began = clock()
    while atomic_get(sync + TURN) == turn:
        if HAS_FUTEX:
            atomic_add(sync + SLEEPERS, np.int32(1))
            futex(sync + TURN, np.int32(128), np.int32(turn))
            atomic_add(sync + SLEEPERS, np.int32(-1))
        else:
            give_way()
    atomic_add_i64(sync + WAITED, (clock() - began) // 1000 + SPUN_US)


@kernel
def wake_sleepers(sync: int, _: int, __: int, ___: int) -> None:
    """Wake who sleeps at a barrier; its turn has been counted up."""
    if HAS_FUTEX:
        futex(sync + TURN, np.int32(129), np.int32(1 << 20))


@inline
def _command(mailbox: Int, threads: Int) -> None:
    """Give what was posted to `threads` threads, and wake those of them that sleep; the others sleep on."""
    count = (get_i64(mailbox) >> 16) + 1
    atomic_swap_i64(mailbox, count << 16 | threads)
    if HAS_FUTEX:
        for thread in range(1, threads):
            asleep = mailbox + ASLEEP + LINE * thread
            if atomic_get(asleep) > 0:  # one that goes to sleep after this sees the command first
                atomic_put(asleep, np.int32(0))
                futex(asleep, np.int32(129), np.int32(1))


@inline
def _play_steps(mailbox: Int, thread: Int, threads: Int, command: Int) -> None:
    """The posted table, as many times as was posted, and the one launch of the other table in between."""
    frame, table, count = get_i64(mailbox + FRAME), get_i64(mailbox + TABLE), get_i64(mailbox + COUNT)
    between, number = get_i64(mailbox + BETWEEN), command << 24
    step: Int = np.int64(0)
    steps = get_i64(mailbox + STEPS)
    while step < steps:
        if step > 0:  # it shares no work out: no thread touches a counter that the table's first launch needs
            call_kernel(get_i64(between), frame, get_i64(between + 8), thread, threads)
            barrier(frame, threads)
        threads = _play(frame, table, count, thread, threads, number + step * count)
        if threads == 0:
            return
        step += 1
        if step < steps:  # a launch may put an end to it; all have seen that before anything else is posted
            steps = get_i64(mailbox + STEPS)
            barrier(frame, threads)
    if thread == 0:  # no thread reads this word again before the next command
        put_i64(mailbox + STEPS, step)


@entry
def work(mailbox: int, thread: int) -> None:
    """A worker's life: wait for a command, play if it is meant, until the stop flag is up."""
    seen: Int = np.int64(0)
    asleep = mailbox + ASLEEP + LINE * thread
    spins = 0
    while True:
        command = atomic_get_i64(mailbox)
        if command != seen:
            seen, spins = command, 0
            if atomic_get(mailbox + STOP) != 0:
                return
            if command & 0xFFFF > thread:
                _play_steps(mailbox, thread, command & 0xFFFF, command >> 16)
                continue
            spins = AWAKE_SPINS  # the others go on without this one: it does not wait for its turn awake
        spins += 1
        if spins < AWAKE_SPINS:
            pause()
        elif HAS_FUTEX:
            atomic_add(asleep, np.int32(1))
            if atomic_get_i64(mailbox) == seen:
                futex(asleep, np.int32(128), np.int32(1))
            atomic_put(asleep, np.int32(0))
        else:
            nanosleep(mailbox + NAP)


@entry
def run_steps(mailbox: int, threads: int) -> None:
    """Give the workers a command, play as worker 0; all that play have finished when this returns."""
    if threads > 1:
        _command(mailbox, threads)
    _play_steps(mailbox, 0, threads, get_i64(mailbox) >> 16)


@entry
def ring(mailbox: int, threads: int) -> None:
    _command(mailbox, threads)


@kernel
def follow_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """Between two decode steps of one call: what the last one sampled is what the next one computes.

    As `StaticBatch.follow`, of as many rows as there are sequences; one thread does it all.

    ids (int64) and values (float32) of the largest logits, token_ids (int64), moving (int64 rows: positions,
    lengths, and of each group where entries go), its row stride, groups, their tables (int64: the address and
    the row stride of each), tokens in a block, what is kept of ids and values for each step, the row strides
    of these, the number of the step (int64), which is counted here.
    """
    if thread > 0:
        return
    ids, values, token_ids, moving, stride, groups, tables, size = words(args, 2, 10)
    all_ids, all_values, ids_bytes, values_bytes, number = words(args, 10, 15)
    step = get_i64(number)
    kept_ids, kept_values = all_ids + step * ids_bytes, all_values + step * values_bytes
    put_i64(number, step + 1)
    for s in range(rows_of(frame, args)):
        token_id = get_i64(ids + 8 * s)
        put_i64(kept_ids + 8 * s, token_id)
        put_f32(kept_values + 4 * s, get_f32(values + 4 * s))
        put_i64(token_ids + 8 * s, token_id)
        at = get_i64(moving + 8 * s) + 1
        put_i64(moving + 8 * s, at)
        put_i64(moving + stride + 8 * s, get_i64(moving + stride + 8 * s) + 1)
        for g in range(groups):
            table = get_i64(tables + 16 * g) + s * get_i64(tables + 16 * g + 8)
            block = get_i64(table + 8 * (at // size))
            put_i64(moving + (2 + g) * stride + 8 * s, block * size + at % size)


@kernel
def end_behind_stops(frame: int, args: int, thread: int, threads: int) -> None:
    """Behind a decode step: no further one begins if one of its tokens is a stop token.

    ids (int64) of as many rows as there are sequences, stop tokens (int64), how many there are (int64), and
    where the number of steps is.
    """
    if thread > 0:
        return
    ids, stops, count, steps = words(args, 2, 6)
    for s in range(rows_of(frame, args)):
        for i in range(get_i64(count)):
            if get_i64(ids + 8 * s) == get_i64(stops + 8 * i):
                put_i64(steps, np.int64(0))


def list_loops() -> dict[str, Kernel]:
    """Each of them by its field in `NativeLoops`."""
    return {
        "run": run_steps,
        "work": work,
        "ring": ring,
        "wait": wait_for_turn,
        "wake": wake_sleepers,
        "follow": follow_rows,
        "end": end_behind_stops,
    }


def native_loops() -> NativeLoops:
    """The addresses of all that threads run; made, or loaded, now."""
    return NativeLoops(**{name: kernel.address for name, kernel in list_loops().items()})
