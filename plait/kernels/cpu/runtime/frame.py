"""The frame: numbers that change from step to step, barriers and counters of threads, and scratch memory.

A frame is a row of int64 words. A kernel reads the number of rows it works on from the frame, at the offset
that its first argument gives, so that a recorded step serves any batch.
"""

from __future__ import annotations

from plait.kernels.cpu.codegen.kernel import inline
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.codegen.vec import atomic_add, atomic_get, atomic_put, call_kernel, get_i64, pause

SYNC, TOKENS, LOGITS, SEQS, SCRATCH, SCRATCH_SIZE, SHARED, WORK, EXACT, WAIT, WAKE = range(11)  # words
WORDS = 64  # of a frame
# Of the memory at word SYNC, in bytes. What is read together is on one line of the cache.
ARRIVED = 0  # threads that are at the barrier
TURN, SLEEPERS, SPINS = 64, 68, 72  # barriers passed; threads that sleep until then; pauses before one does
LEAVE = 80  # after which launch all threads but the first go: see `executor._play`
COUNTERS = 128  # two lines of counters for sharing out work
WAITED, PATIENCE = 256, 264  # microseconds of long waits, of all threads; how many thread 0 bears


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
def word(args: Int, i: Int) -> int:
    """Argument i of a launch (argument 0 being its rows), as int64."""
    return get_i64(args + 8 * i)


@inline
def scratch_of(frame: Int, thread: Int) -> int:
    """The address of this thread's own scratch memory."""
    return get_i64(frame + 32) + thread * get_i64(frame + 40)


@inline
def common_scratch(frame: Int) -> int:
    """The address of scratch memory that all threads share during one launch."""
    return get_i64(frame + 48)
