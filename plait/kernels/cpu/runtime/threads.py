"""Threads that run tables of kernels one after the other, all threads on each kernel.

The calling thread is worker 0; the others are Python threads that stay inside native code, without the GIL.
Between steps they spin for a moment, then sleep. `frame_words` shows what they share, `loops` has their code.
Nothing here needs Numba or torch: the machine code is given by its addresses.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from plait.errors import EngineError
from plait.kernels.cpu.runtime.frame_words import (
    ASLEEP,
    BETWEEN,
    COUNT,
    COUNTERS,
    FRAME,
    LINE,
    LOGITS,
    NAP,
    SCRATCH,
    SCRATCH_SIZE,
    SEQS,
    SHARED,
    SPINS,
    STEPS,
    STOP,
    SYNC,
    TABLE,
    TOKENS,
    WAIT,
    WAITED,
    WAKE,
    WORDS,
    WORK,
)
from plait.kernels.cpu.runtime.thread_count import ThreadTuner

BARRIER_SPINS = 4_000  # about 50 microseconds: longer than threads wait that all have cores
SMALL = 64  # tokens: longer steps have work enough between barriers
Bytes = npt.NDArray[np.uint8]
Longs = npt.NDArray[np.int64]
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_int64, ctypes.c_int64)  # the GIL is released meanwhile


class NativeLoops(Struct, frozen=True):
    """Addresses of machine code: a step, a worker's life, the bell that wakes workers, a barrier's waits,
    what runs between two steps of one call, and what ends them behind a stop token."""

    run: int
    work: int
    ring: int
    wait: int
    wake: int
    follow: int
    end: int


class Launchable(Protocol):
    """A kernel with machine code at `address`."""

    @property
    def name(self) -> str: ...
    @property
    def address(self) -> int: ...


@dataclass(slots=True)
class LaunchTable:
    """Launches in order: (kernel address, arguments address) of each, and the memory that all of them need.

    scratch, shared: bytes for each thread, and for all threads together; kept: what addresses point into.
    """

    entries: list[int] = field(default_factory=list)
    scratch: int = 0
    shared: int = 0
    kept: list[object] = field(default_factory=list)
    words: Longs = field(
        default_factory=lambda: np.zeros(2, np.int64)
    )  # the entries, where threads read them
    address: int = 0  # of `words`

    @property
    def count(self) -> int:
        return len(self.entries) // 2

    def seal(self) -> None:
        """Nothing is added any more."""
        self.words = np.array(self.entries or [0, 0], np.int64)
        self.address = self.words.ctypes.data


def allocate_aligned(nbytes: int, boundary: int = LINE) -> Bytes:
    """Bytes that start at a multiple of `boundary`, not initialised."""
    raw = np.empty(nbytes + boundary, np.uint8)
    start = -raw.ctypes.data % boundary
    return raw[start : start + nbytes]


def call_entry(address: int) -> Callable[[int, int], None]:
    """The native code at an address as a function of two numbers."""
    found: Callable[[int, int], None] = _CALL(address)
    return found


class Address(int):
    """A number that says where memory is. A startup image moves it with that memory."""


def is_address(value: object) -> bool:
    """Whether the word of an argument is an address."""
    return isinstance(value, Address | np.ndarray) or hasattr(value, "data_ptr")


def argument(value: Any) -> int:
    """A word of a launch: see `Threads.launch`."""
    if value is None:
        return 0
    if isinstance(value, float):
        return int(struct.unpack("<i", struct.pack("<f", value))[0])
    if isinstance(value, np.ndarray):
        return int(value.ctypes.data)
    if hasattr(value, "data_ptr"):
        return int(value.data_ptr())
    return int(value)


def _live(work: Callable[[int, int], None], memory: tuple[Bytes, Bytes], thread: int) -> None:
    """A thread's life. It holds the memory that it looks at: native code has addresses only."""
    work(memory[0].ctypes.data, thread)


def _stop(ring: Callable[[int, int], None], mailbox: Bytes, threads: int) -> None:
    mailbox[STOP : STOP + 4].view(np.int32)[0] = 1
    ring(mailbox.ctypes.data, threads)


class Threads:
    """Runs kernels on `threads` threads. One caller at a time; others wait."""

    def __init__(self, threads: int, loops: NativeLoops) -> None:
        self.threads, self._follow, self._end = threads, loops.follow, loops.end
        self._lock = threading.RLock()
        self._small, self._large = ThreadTuner(threads, 0.002 * threads), ThreadTuner(threads, 0.25 * threads)
        self._frame = np.zeros(WORDS, np.int64)
        self._sync, self._mailbox = allocate_aligned(LINE * 8), allocate_aligned(ASLEEP + LINE * threads)
        self._sync[:], self._mailbox[:] = 0, 0
        self._waited = self._sync[WAITED : WAITED + 16].view(np.int64)  # and the patience
        self._sync[SPINS : SPINS + 4].view(np.int32)[0] = BARRIER_SPINS
        self._mailbox[NAP : NAP + 16].view(np.int64)[:] = (0, 200_000)
        self._frame[SYNC] = self._sync.ctypes.data
        self._frame[WAIT], self._frame[WAKE] = loops.wait, loops.wake
        self.steps = int(self._mailbox.ctypes.data) + STEPS  # where a launch can put an end to the steps
        self.counters = int(self._sync.ctypes.data) + COUNTERS  # two, a line each
        self._frame[WORK] = self.counters
        self._scratch, self._shared = allocate_aligned(0), allocate_aligned(0)
        self._one = np.zeros(2, np.int64)
        self._one_address = self._one.ctypes.data
        self._words = {
            at: self._mailbox[at : at + 8].view(np.int64) for at in (TABLE, COUNT, FRAME, STEPS, BETWEEN)
        }
        self._post(FRAME, self._frame.ctypes.data)
        self._address = self._mailbox.ctypes.data
        self._run, self._ring = call_entry(loops.run), call_entry(loops.ring)
        memory, work = (self._mailbox, self._sync), call_entry(loops.work)
        self._workers = [
            threading.Thread(target=_live, args=(work, memory, i), name=f"plait-cpu-{i}", daemon=True)
            for i in range(1, threads)
        ]
        for worker in self._workers:
            worker.start()
        self._closed = False
        # Threads must not outlive it, if it is not closed.
        weakref.finalize(self, _stop, self._ring, self._mailbox, threads)

    def close(self) -> None:
        """Stop the workers. Nothing can run afterwards."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            _stop(self._ring, self._mailbox, self.threads)
        for worker in self._workers:
            worker.join()

    def launch(
        self, kernel: Launchable, *args: object, rows: int, seqs: int = 0, scratch: int = 0, shared: int = 0
    ) -> None:
        """Run a kernel. Words 2, 3, … of its arguments are `args`, in order.

        args: int, float (as float32 bits), None (0), a tensor or an array (its address), an `Address` inside
        of one. rows: how many rows it works on (word 0 says where the frame has it; word 1 is the address of
        a counter, 0 at the start, for sharing out work); seqs: how many sequences (frame word SEQS). scratch,
        shared: bytes it needs per thread, and for all threads together.
        """
        array = np.array([8 * TOKENS, self.counters, *map(argument, args)], np.int64)
        with self._lock:
            self._grow(scratch, shared)
            self._frame[TOKENS], self._frame[SEQS] = rows, seqs
            self._one[:] = kernel.address, array.ctypes.data
            self._waited[:] = 0, 0  # one launch: no rest of it could be played alone
            self._play(self._one_address, 1, threads=self._small.threads if rows <= SMALL else None)

    def run(
        self,
        program: LaunchTable,
        *,
        tokens: int,
        logits: int,
        seqs: int,
        steps: int = 1,
        between: LaunchTable | None = None,
        kind: int | None = None,
    ) -> int:
        """Replay a recorded step for this many tokens, rows of logits and sequences.

        `steps`: so many times, and `between` two of them its one launch. kind: what its time is compared
        with, to choose the number of threads; None: with steps of about as many tokens. Returns how many
        steps there were: a launch may have put an end to them.
        """
        with self._lock:
            self._grow(program.scratch, program.shared)
            self._frame[TOKENS : SEQS + 1] = tokens, logits, seqs
            posts = steps, between.address if between else 0
            # Long steps differ in length: they are compared by token, with others of about as many.
            is_small = tokens <= SMALL
            pace = self._small if is_small else self._large
            kind = kind or tokens.bit_length()
            started = time.perf_counter()
            threads = pace.begin(kind, steps if is_small else tokens, started)
            self._waited[:] = 0, int(pace.patience * 1e6) * max(threads - 1, 1)
            self._play(program.address, program.count, posts, threads)
            now = time.perf_counter()
            waited = int(self._waited[0]) / 1e6 / max(threads - 1, 1)
            played = int(self._words[STEPS][0])
            pace.observe(kind, played if is_small else tokens, now - started, waited, now)
            return played

    def make_between(self, *args: object) -> LaunchTable:
        """What `run` takes as `between`; the arguments are those of `loops.follow_rows`."""
        array = np.array([8 * LOGITS, self.counters, *map(argument, args)], np.int64)
        table = LaunchTable(entries=[self._follow, array.ctypes.data], kept=[array, args])
        table.seal()
        return table

    def make_ending(self, program: LaunchTable, *args: object) -> LaunchTable:
        """A recorded step of decodes behind which the steps of a call may end.

        args: those of `loops.end_behind_stops` but the last. That launch takes no counter.
        """
        array = np.array([8 * LOGITS, self.counters, *map(argument, args), self.steps], np.int64)
        entries = [*program.entries, self._end, int(array.ctypes.data)]
        table = LaunchTable(entries, program.scratch, program.shared, [program, array, args])
        table.seal()
        return table

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
