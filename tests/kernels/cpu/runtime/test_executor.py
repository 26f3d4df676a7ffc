"""The executor: launches, recordings, threads that come and go, and a step that shares its cores."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any, cast

import pytest
import torch

from plait.errors import CannotRecord, EngineError
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import atomic_get, get_f32, get_i64, pause, put_f32, put_i64
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import barrier, rows_of, word
from plait.kernels.cpu.runtime.frame_words import SLEEPERS
from plait.kernels.cpu.runtime.loops import HAS_FUTEX
from plait.kernels.load import turn_kernels, turn_tables
from tests.patience import PATIENCE_S


@kernel
def doubled(frame, args, thread, threads):  # type: ignore[no-untyped-def]
    """x, out, width: out = 2 x, by one thread after the other, so that a missed barrier shows."""
    x, out, width = word(args, 2), word(args, 3), word(args, 4)
    for turn in range(threads):
        if turn == thread:
            for i in range(thread, rows_of(frame, args) * width, threads):
                put_f32(out + 4 * i, get_f32(x + 4 * i) + get_f32(x + 4 * i))
        barrier(frame, threads)


@kernel
def held(frame, args, thread, threads):  # type: ignore[no-untyped-def]
    """The last thread stays until a word is no longer 0."""
    while thread == threads - 1 and atomic_get(word(args, 2)) == 0:
        pause()


@kernel
def ended(frame, args, thread, threads):  # type: ignore[no-untyped-def]
    """A count (int64), where the number of steps is: the last step is the one that counts down to 0."""
    if thread == 0:
        left = get_i64(word(args, 2)) - 1
        put_i64(word(args, 2), left)
        if left == 0:
            put_i64(word(args, 3), 0)


def chain(cpu: Any, x: torch.Tensor, length: int) -> torch.Tensor:
    for _ in range(length):
        out = cpu.empty(*x.shape)
        cpu.launch(doubled, x, out, x.shape[1], rows=x.shape[0])
        x = out
    return x


def test_a_launch_runs_at_once_on_all_threads(cpu: Any) -> None:
    x = torch.randn(5, 3)
    assert torch.equal(chain(cpu, x, 3), 8 * x)


def test_a_recording_runs_for_any_number_of_rows_and_uses_memory_again(cpu: Any) -> None:
    x = torch.zeros(64, 7)
    with cpu.record(tokens=64, logits=65) as program:
        out = chain(cpu, x, 20)
    buffers = {block.ctypes.data for block in program.blocks}
    assert len(buffers) <= 3
    for rows in (1, 5, 64):
        x[:rows] = torch.randn(rows, 7)
        cpu.run(program, tokens=rows, logits=0, seqs=1)
        assert torch.equal(out[:rows], 2.0**20 * x[:rows])


def test_several_steps_are_one_call_with_a_launch_between_two(cpu: Any) -> None:
    x, y, left = torch.zeros(64, 7), torch.zeros(64, 7), torch.zeros(64, 7)
    programs = []
    for source, out in ((x, y), (y, x)):
        with cpu.record(tokens=64, logits=65) as program:
            cpu.launch(doubled, source, out, 7, rows=64)
            if source is x:
                cpu.launch(doubled, left, left, 7, rows=64)
        programs.append(program)
    for steps in (1, 2, 5):
        first = torch.randn(5, 7)
        x[:5], left[:5] = first, first
        cpu.run(programs[0], tokens=5, logits=0, seqs=1, steps=steps, between=programs[1])
        assert torch.equal(y[:5], 2.0 ** (2 * steps - 1) * first)
        assert torch.equal(left[:5], 2.0**steps * first), "the table runs whole each time"
        assert not y[5:].any()


def test_steps_that_a_launch_puts_an_end_to_are_counted() -> None:
    """The number of threads is chosen by what a step took, so those that did not run must not count."""
    cpu, left, x = Executor(2), torch.zeros(1, dtype=torch.int64), torch.zeros(64, 7)
    with cpu.record(tokens=64, logits=65) as program:
        cpu.launch(doubled, x, x, 7, rows=64)
        cpu.launch(ended, left, cpu.steps, rows=64)
    given: Any = Given([2, 1])
    cpu._small, between = given, turn_tables(cpu, turn_kernels()).glue("nothing")
    for length, steps, played in ((3, 8, 3), (1, 8, 1), (9, 2, 2), (9, 1, 1)) * 2:
        left[0] = length
        assert cpu.run(program, tokens=1, logits=0, seqs=1, steps=steps, between=between) == played
        assert given.works[-1] == played
    cpu.close()


def test_a_number_of_rows_that_means_nothing_cannot_be_recorded(cpu: Any) -> None:
    with cpu.record(tokens=64, logits=65), pytest.raises(CannotRecord, match="doubled works on 9 rows"):
        chain(cpu, torch.zeros(9, 2), 1)
    assert not cpu.is_recording


def test_threads_end_with_close_and_with_the_object() -> None:
    before = set(threading.enumerate())
    closed = Executor(3)
    assert len(set(threading.enumerate()) - before) == 2
    closed.close()
    closed.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(EngineError, match="closed"):
        chain(closed, torch.zeros(1, 1), 1)
    forgotten = Executor(2)
    workers = set(threading.enumerate()) - before
    del forgotten
    gc.collect()
    for worker in workers:
        worker.join(PATIENCE_S)
    assert set(threading.enumerate()) == before


class Given:
    """A pace that is not measured: so many threads, in turn, and no patience with waits in some steps."""

    def __init__(self, counts: list[int]) -> None:
        self.counts, self.threads, self.patience = counts, counts[0], 60.0
        self.seen: list[float] = []
        self.works: list[int] = []

    def begin(self, kind: int, work: int, now: float) -> int:
        self.counts = [*self.counts[1:], self.counts[0]]
        self.threads = self.counts[0]
        self.patience = 60.0 if len(self.seen) % 3 else -0.001
        return self.threads

    def observe(self, kind: int, work: int, seconds: float, waited: float, now: float) -> None:
        self.seen.append(waited)
        self.works.append(work)


def test_any_number_of_threads_and_a_rest_that_is_played_alone_give_the_same() -> None:
    """Patience below zero: after the first launch the others leave, while the next command may be there."""
    cpu = Executor(4)
    x, y, z = torch.zeros(64, 7), torch.zeros(64, 7), torch.zeros(64, 7)
    with cpu.record(tokens=64, logits=65) as program:
        cpu.launch(doubled, x, y, 7, rows=64)
        cpu.launch(doubled, y, z, 7, rows=64)
        cpu.launch(doubled, z, z, 7, rows=64)
    with cpu.record(tokens=64, logits=65) as between:
        cpu.launch(doubled, z, x, 7, rows=64)
    given: Any = Given([4, 1, 3, 4, 2, 2, 1])
    cpu._small = given
    for turn in range(300):
        first, steps = torch.randn(5, 7), 1 + turn % 3
        x[:5] = first
        cpu.run(program, tokens=5, logits=0, seqs=1, steps=steps, between=between)
        assert torch.equal(z[:5], 2.0 ** (4 * steps - 1) * first)
        assert torch.equal(chain(cpu, first, 2), 4 * first)
    assert len(given.seen) == 300
    cpu.close()


def test_the_patience_of_very_many_threads_fits_its_word() -> None:
    x = torch.ones(65, 3)
    executor = Executor(2)
    try:
        executor._large.least = 0.25 * 96 * 95  # what 96 threads of a processor bear with, together
        with executor.record(tokens=65, logits=1) as program:
            out = chain(executor, x, 2)
        executor.run(program, tokens=65, logits=0, seqs=1)
        assert torch.equal(out, 4 * x)
    finally:
        executor.close()


def test_a_worker_that_sleeps_through_steps_of_fewer_threads_comes_back() -> None:
    cpu = Executor(3)
    x = torch.randn(5, 3)
    for count in (3, 1, 2, 3):
        cpu._small = cast(Any, Given([count]))
        time.sleep(0.02)  # longer than a worker stays awake
        for _ in range(20):
            assert torch.equal(chain(cpu, x, 3), 8 * x)
    cpu.close()


@pytest.mark.skipif(not HAS_FUTEX, reason="without futexes threads give way instead")
def test_a_thread_that_waits_long_at_a_barrier_sleeps_and_its_wait_is_counted() -> None:
    cpu, flag = Executor(2), torch.zeros(1, dtype=torch.int32)
    given: Any = Given([2])
    cpu._small = given
    with cpu.record(tokens=64, logits=65) as program:
        cpu.launch(held, flag, rows=64)
    runs = threading.Thread(target=lambda: cpu.run(program, tokens=1, logits=0, seqs=1))
    runs.start()
    deadline = time.monotonic() + 60
    while cpu._sync[SLEEPERS] == 0 and time.monotonic() < deadline:
        time.sleep(0.001)
    slept = int(cpu._sync[SLEEPERS])
    flag[0] = 1
    runs.join()
    assert slept == 1
    assert given.seen[0] > 0
    assert cpu._sync[SLEEPERS] == 0
    cpu.close()


def test_threads_of_many_executors_do_not_mix() -> None:
    several = [Executor(2) for _ in range(4)]
    x = torch.randn(33, 5)
    for _ in range(50):
        for cpu in several:
            assert torch.equal(chain(cpu, x, 2), 4 * x)
    for cpu in several:
        cpu.close()
