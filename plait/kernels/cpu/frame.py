"""What changes from step to step, and how threads meet: the memory behind a kernel's `frame` address.

A frame is a row of int64 words. A kernel reads the number of rows it works on from the frame, at the offset
that its first argument gives, so that a recorded step serves any batch.
"""

from __future__ import annotations

from plait.kernels.cpu.kernel import inline
from plait.kernels.cpu.vec import atomic_add, atomic_get, atomic_put, get_i64, give_way, pause

SYNC, TOKENS, LOGITS, SEQS, SCRATCH, SCRATCH_SIZE, SHARED, WORK, EXACT = range(9)  # words
WORDS = 64  # of a frame
SPINS = 4000  # before a waiting thread gives way: it may be waiting for one that has no core


@inline
def barrier(frame, threads):
    """Wait for all threads. What they wrote before is seen by all afterwards."""
    if threads == 1:
        return
    sync = get_i64(frame)
    turn = atomic_get(sync + 64)
    if atomic_add(sync, 1) == threads - 1:
        atomic_put(sync, 0)
        atomic_add(sync + 64, 1)
        return
    spins = 0
    while atomic_get(sync + 64) == turn:
        spins += 1
        if spins < SPINS:
            pause()
        else:
            if spins == SPINS:
                atomic_add(sync + 256, 1)  # a wait that long is told: see `executor.Pace`
            give_way()


@inline
def rows_of(frame, args):
    """How many rows this launch works on: its first argument says where in the frame that number is."""
    return get_i64(frame + get_i64(args))


@inline
def word(args, i):
    """Argument i of a launch (argument 0 being its rows), as int64."""
    return get_i64(args + 8 * i)


@inline
def scratch_of(frame, thread):
    """The address of this thread's own scratch memory."""
    return get_i64(frame + 32) + thread * get_i64(frame + 40)


@inline
def shared_of(frame):
    """The address of scratch memory that all threads share during one launch."""
    return get_i64(frame + 48)
