"""Threads that are shared fairly among API keys and other askers."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future

import pytest

from plait.fair_queue import FairThreads, current_client
from plait.server.api.reply import run_plan
from tests.patience import PATIENCE_S


def test_work_of_another_asker_goes_before_a_crowd_of_one() -> None:
    threads, order = FairThreads(1, 1, "test"), list[str]()
    gate = threading.Event()
    futures = [threads.submit(gate.wait)]

    def ask(who: str, count: int) -> None:
        token = current_client.set(who)
        futures.extend(threads.submit(order.append, who) for _ in range(count))
        current_client.reset(token)

    ask("many", 5)
    ask("few", 1)
    gate.set()
    for future in futures:
        future.result(30)
    assert order.index("few") == 1
    threads.shutdown()


def test_one_asker_never_has_every_thread() -> None:
    threads, gate = FairThreads(3, 2, "test"), threading.Event()
    held = [threads.submit(gate.wait) for _ in range(8)]
    token = current_client.set("another")
    assert threads.submit(lambda: "served").result(30) == "served"
    current_client.reset(token)
    gate.set()
    assert all(future.result(30) for future in held)
    threads.shutdown()


def test_errors_and_cancelled_work_are_as_in_any_executor() -> None:
    threads, gate = FairThreads(1, 1, "test"), threading.Event()
    first = threads.submit(gate.wait)
    second: Future[float] = threads.submit(lambda: 1 / 0)
    third = threads.submit(lambda: 3)
    assert third.cancel()
    gate.set()
    assert first.result(30)
    with pytest.raises(ZeroDivisionError):
        second.result(30)
    assert threads.submit(lambda: 4).result(30) == 4
    threads.shutdown()


def test_an_iterator_that_ends_hangs_no_request() -> None:
    async def run(threads: FairThreads | None) -> None:
        with pytest.raises(RuntimeError, match="StopIteration"):
            await asyncio.wait_for(run_plan(lambda: next(iter(())), threads), PATIENCE_S)

    asyncio.run(run(None))
    shared = FairThreads(1, 1, "test")
    with pytest.raises(RuntimeError, match="StopIteration"):
        shared.submit(next, iter(())).result(30)
    asyncio.run(run(shared))
    shared.shutdown()
