"""The executor: threads that run kernels one after the other, all threads on each, now or recorded for later.

The calling thread is worker 0; the others are Python threads that stay inside native code, without the GIL.
Between steps they spin for a moment, then sleep. Recording is how a decoder becomes a *program*: the same
model code runs once, its launches are kept instead of run, and replay is one native call.

    mailbox, a cache line each           sync: what threads meet at (`frame`)
    +----------------------------+       +-------------------------------------------+
    | command << 16 | threads    |       | threads that arrived                      |
    | stop                       |       | turn, sleepers, spins, leave              |
    | table, count, frame, nap   |       | two counters that share out work          |
    | steps, between             |       | time waited, patience                     |
    | asleep: a line per thread  |       +-------------------------------------------+
    +----------------------------+
    table: (kernel, arguments) (kernel, arguments) ...   all threads run each, then meet at a barrier

Invariants of the lock-free part:
* Only the caller posts, under the executor's lock. It writes all words before the command, which it swaps in
  sequentially consistent order: a worker that sees a new command sees its table.
* A command's number only grows, so no worker plays one twice. `leave` holds the number of its command, too.
* A thread that sleeps says so first, then looks at the word that it waits for. One that wakes others writes
  that word first, then looks for sleepers. So one of both sees the other.
* Launch i uses counter i & 1. Thread 0 clears it behind the barrier, when no thread is left in launch i; the
  launch that uses it next begins behind one more barrier.
"""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CannotRecord, EngineError
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
    COUNTERS,
    FUTEX,
    LEAVE,
    LOGITS,
    PATIENCE,
    SCRATCH,
    SCRATCH_SIZE,
    SEQS,
    SHARED,
    SLEEPERS,
    SPINS,
    SYNC,
    TOKENS,
    TURN,
    WAIT,
    WAITED,
    WAKE,
    WORDS,
    WORK,
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
from plait.kernels.cpu.runtime.thread_count import ThreadTuner

LINE = 64  # bytes of a cache line: words that different threads write stay on lines of their own
# Of the mailbox, in bytes. A command is counted in its upper bits; the lower 16 say how many threads play it.
COMMAND, STOP, TABLE, COUNT, FRAME, NAP, STEPS = (LINE * i for i in range(7))
BETWEEN = STEPS + 8  # the table of what runs between two steps
ASLEEP = LINE * 7  # a line for each thread: whether it sleeps
AWAKE_SPINS = 20_000  # about half a millisecond: the next step of a running engine comes sooner
BARRIER_SPINS = 4_000  # about a tenth of that: longer than threads wait that all have cores
SPUN_US = 100  # what these are taken for
HAS_FUTEX = FUTEX is not None
HUGE = 2 << 20
SMALL = 64  # tokens: longer steps have work enough between barriers


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
    for step in range(get_i64(mailbox + STEPS)):
        if step > 0:  # it shares no work out: no thread touches a counter that the table's first launch needs
            call_kernel(get_i64(between), frame, get_i64(between + 8), thread, threads)
            barrier(frame, threads)
        threads = _play(frame, table, count, thread, threads, number + step * count)
        if threads == 0:
            return


@entry("void(int64,int64)")
def _work(mailbox: int, thread: int) -> None:
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


@entry("void(int64,int64)")
def _run(mailbox: int, threads: int) -> None:
    """Give the workers a command, play as worker 0; all that play have finished when this returns."""
    if threads > 1:
        _command(mailbox, threads)
    _play_steps(mailbox, 0, threads, get_i64(mailbox) >> 16)


@entry("void(int64,int64)")
def _ring(mailbox: int, threads: int) -> None:
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


def _worker(memory: tuple[Any, Any], thread: int) -> None:
    """A thread's life. It holds the memory that it looks at: native code has addresses only."""
    _work.call(memory[0].ctypes.data, thread)


def _stop(mailbox: Any, threads: int) -> None:
    mailbox[STOP : STOP + 4].view(np.int32)[0] = 1
    _ring.call(mailbox.ctypes.data, threads)


def allocate_aligned(nbytes: int, boundary: int = LINE) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that start at a multiple of `boundary`, not initialised."""
    raw = np.empty(nbytes + boundary, np.uint8)
    start = -raw.ctypes.data % boundary
    return raw[start : start + nbytes]


@dataclass(slots=True)
class RecordedProgram:
    """A recorded step. `table`: (kernel address, arguments address) of each launch, in order."""

    tokens: int  # capacities: the sizes that stand for "as many as the step has"
    logits: int
    kernels: list[Kernel] = field(default_factory=list)
    entries: list[int] = field(default_factory=list)
    kept: list[Any] = field(default_factory=list)  # what addresses point into
    scratch: int = 0
    shared: int = 0
    table: Any = None
    address: int = 0  # of the table

    def sealed(self) -> RecordedProgram:
        self.table = np.array(self.entries or [0, 0], np.int64)
        self.address = self.table.ctypes.data
        return self


class Arena:
    """Memory of a recording: what the model lets go of is used again by what it computes later."""

    def __init__(self, kept: list[Any]) -> None:
        self._kept = kept
        self._free: dict[int, list[Any]] = {}
        self._spans: list[tuple[int, int]] = []  # addresses of all blocks

    def take(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        free = self._free.setdefault(nbytes, [])
        block = free.pop() if free else self._made(nbytes)
        view = block[:]
        weakref.finalize(view, free.append, block)
        return view

    def _made(self, nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
        block = allocate_aligned(nbytes)
        start = int(block.ctypes.data)
        self._kept.append(block)
        self._spans.append((start, start + max(nbytes, 1)))
        return block

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is memory of this recording."""
        at = tensor.data_ptr()
        return any(start <= at < end for start, end in self._spans)


class Executor:
    """Runs kernels on `threads` threads. One caller at a time; others wait."""

    def __init__(self, threads: int, prefill: str = "same") -> None:
        self.threads = threads
        self.prefill = prefill  # read by variants of linear layers: "bf16" allows other sums in long steps
        self._lock = threading.RLock()
        self._small, self._large = ThreadTuner(threads, 0.002 * threads), ThreadTuner(threads, 0.25 * threads)
        self._program: RecordedProgram | None = None
        self._arena: Arena | None = None
        self._frame = np.zeros(WORDS, np.int64)
        self._sync, self._mailbox = allocate_aligned(LINE * 8), allocate_aligned(ASLEEP + LINE * threads)
        self._sync[:], self._mailbox[:] = 0, 0
        self._waited = self._sync[WAITED : WAITED + 16].view(np.int64)  # and the patience
        self._sync[SPINS : SPINS + 4].view(np.int32)[0] = BARRIER_SPINS
        self._mailbox[NAP : NAP + 16].view(np.int64)[:] = (0, 200_000)
        self._frame[SYNC] = self._sync.ctypes.data
        self._frame[WAIT], self._frame[WAKE] = wait_for_turn.address, wake_sleepers.address
        self._counters = int(self._sync.ctypes.data) + COUNTERS
        self._frame[WORK] = self._counters
        self._scratch, self._shared = allocate_aligned(0), allocate_aligned(0)
        self._one = np.zeros(2, np.int64)
        self._one_address = self._one.ctypes.data
        self._words = {
            at: self._mailbox[at : at + 8].view(np.int64) for at in (TABLE, COUNT, FRAME, STEPS, BETWEEN)
        }
        self._post(FRAME, self._frame.ctypes.data)
        self._address = self._mailbox.ctypes.data
        self._run, _, _ = (one.call for one in (_run, _work, _ring))  # made before a thread needs them
        memory = (self._mailbox, self._sync)
        self._workers = [
            threading.Thread(target=_worker, args=(memory, i), name=f"plait-cpu-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()
        self._closed = False
        weakref.finalize(self, _stop, self._mailbox, threads)  # threads must not outlive it, if not closed

    def close(self) -> None:
        """Stop the workers. Nothing can run afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _stop(self._mailbox, self.threads)
        for worker in self._workers:
            worker.join()

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for a result, not initialised."""
        if self._arena is None:
            return torch.empty(shape, dtype=dtype)
        count = int(np.prod(shape))
        block = self._arena.take(max(count, 1) * dtype.itemsize)
        return torch.frombuffer(block, dtype=dtype, count=count).view(shape)

    def launch(
        self, kernel: Kernel, *args: Any, rows: int, seqs: int = 0, scratch: int = 0, shared: int = 0
    ) -> None:
        """Run a kernel, or record it. Words 2, 3, … of its arguments are `args`, in order.

        args: int, float (as float32 bits), None (0), Tensor (its address; it is kept alive in a recording).
        rows: how many rows it works on (word 0 says where the frame has it; word 1 is the address of a
        counter, 0 at the start, for sharing out work); seqs: how many sequences (frame word SEQS).
        scratch, shared: bytes it needs per thread, and for all threads together.
        """
        words = [0, 0, *(argument(a) for a in args)]
        if self._program is not None:
            self._record(self._program, kernel, words, args, rows, (scratch, shared))
            return
        words[0], words[1] = 8 * TOKENS, self._counters
        array = np.array(words, np.int64)
        with self._lock:
            self._grow(scratch, shared)
            self._frame[TOKENS], self._frame[SEQS] = rows, seqs
            self._one[:] = kernel.address, array.ctypes.data
            self._waited[:] = 0, 0  # one launch: no rest of it could be played alone
            self._play(self._one_address, 1, threads=self._small.threads if rows <= SMALL else None)

    def run(
        self,
        program: RecordedProgram,
        *,
        tokens: int,
        logits: int,
        seqs: int,
        steps: int = 1,
        between: RecordedProgram | None = None,
    ) -> None:
        """Replay a recorded step for this many tokens, rows of logits and sequences.

        `steps`: so many times, and `between` two of them its one launch.
        """
        with self._lock:
            self._grow(program.scratch, program.shared)
            self._frame[TOKENS : SEQS + 1] = tokens, logits, seqs
            posts = steps, between.address if between else 0
            # Long steps differ in length: they are compared by token, with others of about as many.
            is_small = tokens <= SMALL
            pace, kind = (self._small if is_small else self._large), tokens.bit_length()
            started = time.perf_counter()
            threads = pace.begin(started)
            self._waited[:] = 0, int(pace.patience * 1e6) * max(threads - 1, 1)
            self._play(program.address, len(program.kernels), posts, threads)
            now = time.perf_counter()
            waited = int(self._waited[0]) / 1e6 / max(threads - 1, 1)
            pace.observe(kind, steps if is_small else tokens, now - started, waited, now)

    def following(self, tokens: int, logits: int, *args: Any) -> RecordedProgram:
        """What `run` takes as `between`; its arguments are those of `follow_rows`."""
        with self.recording(tokens, logits) as program:
            self.launch(follow_rows, *args, rows=logits)
        return program

    @contextmanager
    def recording(self, tokens: int, logits: int) -> Iterator[RecordedProgram]:
        """Keep launches instead of running them. First dimensions `tokens`, `logits` mean the step's own."""
        with self._lock:
            program = RecordedProgram(tokens, logits)
            self._program, self._arena = program, Arena(program.kept)
            try:
                yield program
            finally:
                self._program = self._arena = None
            program.sealed()

    @property
    def is_recording(self) -> bool:
        return self._program is not None

    def _record(
        self,
        program: RecordedProgram,
        kernel: Kernel,
        words: list[int],
        args: Any,
        rows: int,
        need: tuple[int, int],
    ) -> None:
        places: Mapping[int, int] = {program.tokens: TOKENS, program.logits: LOGITS}
        if rows not in places:
            raise CannotRecord(
                f"{kernel.name} works on {rows} rows, which is neither tokens nor rows of logits"
            )
        words[0] = 8 * places[rows]
        words[1] = self._counters + LINE * (len(program.kernels) & 1)
        array = np.array(words, np.int64)
        # Tensors of the arena are kept by it, and come back to it: only what was there before is held here.
        held = [a for a in args if isinstance(a, Tensor) and not (self._arena and self._arena.holds(a))]
        program.kept.append((array, held))
        program.entries += (kernel.address, array.ctypes.data)
        program.kernels.append(kernel)
        program.scratch = max(program.scratch, need[0])
        program.shared = max(program.shared, need[1])

    def _grow(self, scratch: int, shared: int) -> None:
        frame, each = self._frame, -(-scratch // LINE) * LINE
        if frame[SCRATCH_SIZE] < each:
            self._scratch = allocate_aligned(each * self.threads)
            frame[SCRATCH], frame[SCRATCH_SIZE] = self._scratch.ctypes.data, each
        if self._shared.nbytes < shared:
            self._shared = allocate_aligned(shared)
            frame[SHARED] = self._shared.ctypes.data

    def _play(
        self, table: int, count: int, steps: tuple[int, int] = (1, 0), threads: int | None = None
    ) -> None:
        """`steps`: how many, and the address of what runs between two."""
        if self._closed:
            raise EngineError("the CPU executor is closed")
        self._post(TABLE, table)
        self._post(COUNT, count)
        self._post(STEPS, steps[0])
        self._post(BETWEEN, steps[1])
        self._run(self._address, threads or self.threads)

    def _post(self, place: int, value: int) -> None:
        self._words[place][0] = value


def argument(value: Any) -> int:
    """A word of a launch: see `Executor.launch`."""
    if value is None:
        return 0
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    return int(value)
