"""Work in time slices: every key gets its turn, and work that no client waits for ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future

import pytest

from plait.errors import CapacityError
from plait.fair_queue import SliceTurns, _Job


def slices(name: str, count: int, log: list[str]) -> Generator[None, None, str]:
    for _ in range(count):
        log.append(name)
        yield
    return name


async def all_of(turns: SliceTurns, jobs: list[tuple[str, Generator[None, None, str]]]) -> list[str]:
    return list(await asyncio.gather(*(turns.run(key, work) for key, work in jobs)))


def test_a_short_job_of_another_key_ends_before_long_ones_do() -> None:
    log: list[str] = []
    gate = threading.Event()

    def first() -> Generator[None, None, str]:
        gate.wait(20)  # until all the others wait
        yield
        return "gate"

    async def run() -> list[str]:
        turns = SliceTurns(1)
        jobs = [("x", first()), *(("a", slices("long", 50, log)) for _ in range(16))]
        asked = asyncio.ensure_future(all_of(turns, [*jobs, ("b", slices("short", 2, log))]))
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(gate.set)
        return await asked

    assert asyncio.run(run()) == ["gate", *["long"] * 16, "short"]
    assert log.index("short") < 4
    assert [i for i, name in enumerate(log) if name == "short"][-1] < 8


def test_a_key_has_one_thread_at_a_time() -> None:
    running, most = [0], [0]

    def work() -> Generator[None, None, str]:
        for _ in range(20):
            running[0] += 1
            most[0] = max(most[0], running[0])
            running[0] -= 1
            yield
        return "done"

    async def run() -> list[str]:
        turns = SliceTurns(4)
        return await all_of(turns, [("a", work()) for _ in range(8)])

    assert asyncio.run(run()) == ["done"] * 8
    assert most == [1]


def test_what_a_slice_raises_is_raised_to_its_caller_alone() -> None:
    def broken() -> Generator[None, None, str]:
        yield
        raise ValueError("broken")

    async def run() -> None:
        turns = SliceTurns(1)
        with pytest.raises(ValueError, match="broken"):
            await turns.run("a", broken())
        assert await turns.run("a", slices("next", 3, [])) == "next"

    asyncio.run(run())


def test_work_that_no_client_waits_for_is_given_up() -> None:
    begun, closed = threading.Event(), threading.Event()

    def endless() -> Generator[None, None, str]:
        try:
            while True:
                begun.set()
                yield
        finally:
            closed.set()

    async def run() -> None:
        asked = asyncio.ensure_future(SliceTurns(1).run("a", endless()))
        await asyncio.to_thread(begun.wait, 20)
        asked.cancel()
        assert await asyncio.to_thread(closed.wait, 20)

    asyncio.run(run())


def test_a_thread_that_does_not_start_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async def run() -> None:
        turns = SliceTurns(1)
        with monkeypatch.context() as patched:
            patched.setattr(threading.Thread, "start", refuse)
            with pytest.raises(CapacityError, match="can't start new thread; try again later"):
                await turns.run("a", slices("refused", 1, []))
        assert await asyncio.wait_for(turns.run("a", slices("next", 1, [])), 20) == "next"

    asyncio.run(run())


def test_work_that_comes_as_a_thread_is_about_to_end_is_done_by_it() -> None:
    turns, job = SliceTurns(1), _Job(slices("late", 1, []), Future())

    class Late(threading.Condition):
        def wait(self, timeout: float | None = None) -> bool:
            turns._queue.put("a", job)
            return False

    turns._changed = Late()
    assert turns._next() == ("a", job)
