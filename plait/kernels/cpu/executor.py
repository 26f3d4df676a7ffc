"""Our own threads: they run kernels one after the other, all threads on each, now or recorded for later.

The thread that asks is worker 0; the others are Python threads that stay inside native code, without the GIL.
Between steps they spin for a moment, then sleep. Recording is how a decoder becomes a *program*: the same
model code runs once, its launches are kept instead of run, and replay is one native call.
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
from plait.kernels.cpu import frame as layout
from plait.kernels.cpu.following import follow_rows
from plait.kernels.cpu.frame import barrier
from plait.kernels.cpu.kernel import Kernel, entry, inline
from plait.kernels.cpu.vec import (
    FUTEX,
    atomic_add,
    atomic_get,
    atomic_put,
    call_kernel,
    futex,
    get_i64,
    nanosleep,
    pause,
)

LINE = 64  # bytes of a cache line: words that different threads write stay on lines of their own
COMMAND, STOP, ASLEEP, TABLE, COUNT, FRAME, NAP, STEPS = (LINE * i for i in range(8))  # of the mailbox
BETWEEN = STEPS + 8  # the table of what runs between two steps
AWAKE_SPINS = 20_000  # about half a millisecond: the next step of a running engine comes sooner
HAS_FUTEX = FUTEX is not None
HUGE = 2 << 20
SMALL = 64  # tokens: longer steps have work enough between barriers


@inline
def _play(frame, table, count, thread, threads):
    """Run a table of (kernel address, arguments address), all threads on each."""
    for i in range(count):
        call_kernel(get_i64(table + 16 * i), frame, get_i64(table + 16 * i + 8), thread, threads)
        barrier(frame, threads)
        if thread == 0:
            atomic_put(
                get_i64(frame + 56) + 64 * (i & 1), np.int32(0)
            )  # its share counter, for the one after


@inline
def _wake(mailbox):
    atomic_add(mailbox, np.int32(1))
    if HAS_FUTEX and atomic_get(mailbox + ASLEEP) > 0:
        futex(mailbox, np.int32(129), np.int32(1 << 20))


@inline
def _play_steps(mailbox, thread, threads):
    """The posted table, as many times as was posted, and the one launch of the other table in between."""
    frame, table, count = get_i64(mailbox + FRAME), get_i64(mailbox + TABLE), get_i64(mailbox + COUNT)
    between = get_i64(mailbox + BETWEEN)
    for step in range(get_i64(mailbox + STEPS)):
        if step > 0:  # it shares no work out: nobody touches a counter that the table's first launch needs
            call_kernel(get_i64(between), frame, get_i64(between + 8), thread, threads)
            barrier(frame, threads)
        _play(frame, table, count, thread, threads)


@entry("void(int64,int64,int64)")
def _work(mailbox, thread, threads):
    """A worker's life: wait for the command counter to move, play, until the stop flag is up."""
    seen = np.int32(0)
    while True:
        spins = 0
        while atomic_get(mailbox) == seen:
            spins += 1
            if spins < AWAKE_SPINS:
                pause()
            elif HAS_FUTEX:
                atomic_add(mailbox + ASLEEP, np.int32(1))
                futex(mailbox, np.int32(128), seen)
                atomic_add(mailbox + ASLEEP, np.int32(-1))
            else:
                nanosleep(mailbox + NAP)
        seen += np.int32(1)
        if atomic_get(mailbox + STOP) != 0:
            return
        _play_steps(mailbox, thread, threads)


@entry("void(int64,int64)")
def _run(mailbox, threads):
    """Wake the workers, play as worker 0; everybody has finished when this returns."""
    if threads > 1:
        _wake(mailbox)
    _play_steps(mailbox, 0, threads)


@entry("void(int64)")
def _ring(mailbox):
    _wake(mailbox)


def _worker(memory: tuple[Any, Any], thread: int, threads: int) -> None:
    """A thread's life. It holds the memory that it looks at: native code has addresses only."""
    _work.call(memory[0].ctypes.data, thread, threads)


def _stop(mailbox: Any) -> None:
    mailbox[STOP : STOP + 4].view(np.int32)[0] = 1
    _ring.call(mailbox.ctypes.data)


def aligned(nbytes: int, boundary: int = LINE) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Bytes that start at a multiple of `boundary`, not initialised."""
    raw = np.empty(nbytes + boundary, np.uint8)
    start = -raw.ctypes.data % boundary
    return raw[start : start + nbytes]


@dataclass(slots=True)
class Program:
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

    def sealed(self) -> Program:
        self.table = np.array(self.entries or [0, 0], np.int64)
        self.address = self.table.ctypes.data
        return self


class Pace:
    """How many threads a small step gets: all, unless somebody else uses the cores.

    A thread that has lost its core keeps the others waiting at every barrier, for a scheduler's slice each
    time. If many barriers of several steps in a row had long waits, the next ones run on the calling thread
    alone, twice as many each time; if that is slower, the waits had another reason and are ignored for a
    while. One such step is no sign: whoever told sixteen readers of their first tokens is done after it. The
    number of threads never changes a result.
    """

    FIRST, MOST, TRUST = 16, 1024, 512  # steps alone at first and at most; steps in which waits are ignored
    SIGNS = 4  # steps in a row that waited, before the first that run alone

    def __init__(self) -> None:
        self.alone = 0  # steps still to run alone
        self._span, self._ignored, self._waiting_s, self._signs = self.FIRST, 0, 0.0, 0

    def observe(self, seconds: float, waits: int, launches: int, steps: int = 1) -> None:
        """What a small step took, or the mean of several; `waits`: barriers of one with a long wait."""
        if self.alone:
            self.alone = max(self.alone - steps, 0)
            if seconds > self._waiting_s:
                self.alone, self._ignored, self._span, self._signs = 0, self.TRUST, self.FIRST, 0
        elif self._ignored:
            self._ignored = max(self._ignored - steps, 0)
        elif waits * 4 > launches:
            self._signs += 1
            if self._signs >= self.SIGNS or self._span > self.FIRST:
                self.alone, self._waiting_s = self._span, seconds
                self._span = min(2 * self._span, self.MOST)
        else:
            self._signs = 0
            if waits * 16 < launches:
                self._span = self.FIRST


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
        block = aligned(nbytes)
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
        self.prefill = prefill  # what variants of linear maps may ask: "bf16" allows other sums in long steps
        self._lock = threading.RLock()
        self._pace = Pace()
        self._program: Program | None = None
        self._arena: Arena | None = None
        self._frame = np.zeros(layout.WORDS, np.int64)
        self._sync, self._mailbox = aligned(LINE * 8), aligned(LINE * 8)
        self._sync[:] = self._mailbox[:] = 0
        self._waits = self._sync[4 * LINE : 4 * LINE + 4].view(np.int32)
        self._mailbox[NAP : NAP + 16].view(np.int64)[:] = (0, 200_000)
        self._frame[layout.SYNC] = self._sync.ctypes.data
        self._counters = int(self._sync.ctypes.data) + 2 * LINE
        self._frame[layout.WORK] = self._counters
        self._scratch, self._shared = aligned(0), aligned(0)
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
            threading.Thread(target=_worker, args=(memory, i, threads), name=f"plait-cpu-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()
        self._closed = False
        weakref.finalize(self, _stop, self._mailbox)  # nobody closed it: its threads must not stay

    def close(self) -> None:
        """Stop the workers. Nothing can run afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _stop(self._mailbox)
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
        words[0], words[1] = 8 * layout.TOKENS, self._counters
        array = np.array(words, np.int64)
        with self._lock:
            self._grow(scratch, shared)
            self._frame[layout.TOKENS], self._frame[layout.SEQS] = rows, seqs
            self._one[:] = kernel.address, array.ctypes.data
            self._play(self._one_address, 1)

    def run(
        self,
        program: Program,
        *,
        tokens: int,
        logits: int,
        seqs: int,
        steps: int = 1,
        between: Program | None = None,
    ) -> None:
        """Replay a recorded step for this many tokens, rows of logits and sequences.

        `steps`: so many times, and `between` two of them its one launch.
        """
        with self._lock:
            self._grow(program.scratch, program.shared)
            self._frame[layout.TOKENS : layout.SEQS + 1] = tokens, logits, seqs
            launches, pace, posts = (
                len(program.kernels),
                self._pace,
                (steps, between.address if between else 0),
            )
            if self.threads == 1 or tokens > SMALL:
                self._play(program.address, launches, posts)
                return
            started = time.perf_counter()
            self._waits[0] = 0
            self._play(program.address, launches, posts, 1 if pace.alone else self.threads)
            seconds = (time.perf_counter() - started) / steps
            pace.observe(seconds, int(self._waits[0]) // steps, launches, steps)

    def following(self, tokens: int, logits: int, *args: Any) -> Program:
        """What `run` takes as `between`; its arguments are those of `follow_rows`."""
        with self.recording(tokens, logits) as program:
            self.launch(follow_rows, *args, rows=logits)
        return program

    @contextmanager
    def recording(self, tokens: int, logits: int) -> Iterator[Program]:
        """Keep launches instead of running them. First dimensions `tokens`, `logits` mean the step's own."""
        with self._lock:
            program = Program(tokens, logits)
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
        self, program: Program, kernel: Kernel, words: list[int], args: Any, rows: int, need: tuple[int, int]
    ) -> None:
        places: Mapping[int, int] = {program.tokens: layout.TOKENS, program.logits: layout.LOGITS}
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
        if frame[layout.SCRATCH_SIZE] < each:
            self._scratch = aligned(each * self.threads)
            frame[layout.SCRATCH], frame[layout.SCRATCH_SIZE] = self._scratch.ctypes.data, each
        if self._shared.nbytes < shared:
            self._shared = aligned(shared)
            frame[layout.SHARED] = self._shared.ctypes.data

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
