"""The executor: launches, recordings, threads that come and go, and a step that shares its cores."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch

from plait.errors import CannotRecord, EngineError
from plait.kernels.cpu.executor import Executor, Pace
from plait.kernels.cpu.frame import barrier, rows_of, word
from plait.kernels.cpu.kernel import kernel
from plait.kernels.cpu.vec import get_f32, put_f32


@kernel
def doubled(frame, args, thread, threads):  # type: ignore[no-untyped-def]
    """x, out, width: out = 2 x, by one thread after the other, so that a missed barrier shows."""
    x, out, width = word(args, 2), word(args, 3), word(args, 4)
    for turn in range(threads):
        if turn == thread:
            for i in range(thread, rows_of(frame, args) * width, threads):
                put_f32(out + 4 * i, get_f32(x + 4 * i) + get_f32(x + 4 * i))
        barrier(frame, threads)


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
    with cpu.recording(tokens=64, logits=65) as program:
        out = chain(cpu, x, 20)
    buffers = {entry.ctypes.data for entry in program.kept if not isinstance(entry, tuple)}
    assert len(buffers) <= 3
    for rows in (1, 5, 64):
        x[:rows] = torch.randn(rows, 7)
        cpu.run(program, tokens=rows, logits=0, seqs=1)
        assert torch.equal(out[:rows], 2.0**20 * x[:rows])


def test_several_steps_are_one_call_with_a_launch_between_two(cpu: Any) -> None:
    x, y, left = torch.zeros(64, 7), torch.zeros(64, 7), torch.zeros(64, 7)
    programs = []
    for source, out in ((x, y), (y, x)):
        with cpu.recording(tokens=64, logits=65) as program:
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


def test_a_number_of_rows_that_means_nothing_cannot_be_recorded(cpu: Any) -> None:
    with cpu.recording(tokens=64, logits=65), pytest.raises(CannotRecord, match="doubled works on 9 rows"):
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
        worker.join(10)
    assert set(threading.enumerate()) == before


def test_a_step_that_keeps_waiting_runs_alone_for_a_while_and_comes_back() -> None:
    pace = Pace()
    pace.observe(1.0, waits=2, launches=100)
    assert not pace.alone
    for _ in range(Pace.SIGNS):
        assert not pace.alone  # a few such steps may be anything
        pace.observe(1.0, waits=60, launches=100)
    assert pace.alone == Pace.FIRST
    for _ in range(Pace.FIRST):
        pace.observe(0.1, waits=0, launches=100)
    assert not pace.alone
    pace.observe(1.0, waits=60, launches=100)
    assert pace.alone == 2 * Pace.FIRST  # still waiting: longer
    pace.observe(2.0, waits=0, launches=100)
    assert not pace.alone  # alone it is slower: the waits had another reason
    for _ in range(Pace.TRUST + Pace.SIGNS - 1):
        pace.observe(1.0, waits=60, launches=100)
        assert not pace.alone
    pace.observe(1.0, waits=60, launches=100)
    assert pace.alone == Pace.FIRST


def test_steps_of_one_call_count_as_one_sign_and_come_back_as_many() -> None:
    pace = Pace()
    for _ in range(Pace.SIGNS):
        assert pace.alone == 0
        pace.observe(0.1, waits=90, launches=100, steps=8)
    assert pace.alone == Pace.FIRST
    pace.observe(0.05, waits=0, launches=100, steps=8)
    assert pace.alone == Pace.FIRST - 8
    pace.observe(0.05, waits=0, launches=100, steps=12)
    assert pace.alone == 0
    pace.observe(0.1, waits=90, launches=100, steps=8)
    assert pace.alone == 2 * Pace.FIRST, "the waits go on: twice as long"


def test_steps_that_wait_now_and_then_stay_on_all_threads() -> None:
    pace = Pace()
    for _ in range(100):
        for _ in range(Pace.SIGNS - 1):
            pace.observe(1.0, waits=60, launches=100)
        pace.observe(0.5, waits=0, launches=100)
        assert not pace.alone


def test_threads_of_many_executors_do_not_mix() -> None:
    several = [Executor(2) for _ in range(4)]
    x = torch.randn(33, 5)
    for _ in range(50):
        for cpu in several:
            assert torch.equal(chain(cpu, x, 2), 4 * x)
    for cpu in several:
        cpu.close()
