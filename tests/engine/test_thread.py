from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from prometheus_client import generate_latest

from plait.engine.core import Engine
from plait.engine.thread import EngineLoop
from plait.errors import DeadlineExceeded, EngineError, InvalidField, QueueFull
from plait.request import Event, Request, SamplingParams
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits
from plait.schedule.plan import Done, Sampled, SamplingBatch, StepPlan, Ticket
from plait.schedule.scheduler import Scheduler
from tests.patience import PATIENCE_S, until


class Counting:
    """A model that says its position. `gate`: closed, it holds the step."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.entered = threading.Event()

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        self.entered.set()
        assert self.gate.wait(PATIENCE_S)
        return Done([Sampled((row.position,)) for row in sampling.rows])


class Mailbox:
    """Events of one request, from the engine's thread to the test's."""

    def __init__(self, choices: int = 1) -> None:
        self.events: list[Event] = []
        self.threads: set[str] = set()
        self._open, self._ended = choices, threading.Event()
        self.got = threading.Event()

    def __call__(self, event: Event) -> None:
        self.events.append(event)
        self.threads.add(threading.current_thread().name)
        self.got.set()
        if event.finish_reason:
            self._open -= 1
            if not self._open:
                self._ended.set()

    def wait(self) -> list[Event]:
        assert self._ended.wait(PATIENCE_S)
        return self.events

    @property
    def tokens(self) -> list[int]:
        return [t for e in self.events for t in e.token_ids]


@contextmanager
def running(**limits: Any) -> Iterator[tuple[EngineLoop, Counting]]:
    options = dict(max_num_seqs=4, max_num_batched_tokens=64, max_waiting=100, max_model_len=100_000)
    rules = SchedulerLimits(**(options | limits))
    memory = Allocation((), (), 16, num_slots=rules.max_num_seqs + 1, max_step_len=64)
    model = Counting()
    loop = EngineLoop(Engine(model, Scheduler(rules, memory), vocab_size=200_000, max_model_len=100_000))
    try:
        yield loop, model
    finally:
        model.gate.set()
        assert loop.close(drain=False)


def request(name: str, **params: Any) -> Request:
    settings = dict(max_tokens=5, temperature=0.0) | params
    return Request(name, (1, 2, 3), SamplingParams(**settings))


def test_many_threads_are_served_and_events_come_on_the_engines_thread() -> None:
    with running() as (loop, _):
        boxes = [Mailbox() for _ in range(40)]
        threads = [
            threading.Thread(target=loop.submit, args=(request(f"r{i}"), box)) for i, box in enumerate(boxes)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for box in boxes:
            box.wait()
            assert box.tokens == [3, 4, 5, 6, 7]
            assert box.threads == {"plait-engine"}
        until(lambda: not loop.has_work)
        assert loop.stats()["num_free_slots"] == loop.stats()["num_slots"] == 4


def is_asleep(loop: EngineLoop) -> bool:
    rounds = loop.num_rounds
    time.sleep(0.02)
    return loop.num_rounds == rounds


def test_an_idle_loop_sleeps_and_wakes_again() -> None:
    with running() as (loop, _):
        for name in ("a", "b"):
            box = Mailbox()
            loop.submit(request(name), box)
            box.wait()
            until(lambda: not loop.has_work)
            until(lambda: is_asleep(loop))
        assert loop.healthy


def test_the_loop_reports_a_request_that_cannot_be_as_an_event() -> None:
    with running() as (loop, _):
        box = Mailbox()
        loop.submit(Request("r", (), SamplingParams()), box)
        assert isinstance(box.wait()[-1].error, InvalidField)


def test_a_full_queue_is_refused_where_it_is_submitted() -> None:
    with running(max_num_seqs=1, max_waiting=2) as (loop, model):
        model.gate.clear()
        boxes = [Mailbox() for _ in range(3)]
        loop.submit(request("r0"), boxes[0])
        assert model.entered.wait(PATIENCE_S)
        loop.submit(request("r1"), boxes[1])
        loop.submit(request("r2"), boxes[2])
        with pytest.raises(QueueFull, match=r"max_waiting \(2\)"):
            loop.submit(request("r3"), Mailbox())
        model.gate.set()
        for box in boxes:
            assert box.wait()[-1].finish_reason == "length"


def test_what_only_the_engine_can_refuse_arrives_as_an_event() -> None:
    with running() as (loop, model):
        model.gate.clear()
        first, second = Mailbox(), Mailbox(2)
        loop.submit(request("same"), first)
        assert model.entered.wait(PATIENCE_S)
        loop.submit(request("same", n=2), second)
        model.gate.set()
        assert [(e.index, e.finish_reason) for e in second.wait()] == [(0, "error"), (1, "error")]
        assert isinstance(second.events[0].error, InvalidField)
        assert first.wait()[-1].finish_reason == "length"


def test_cancel_reaches_a_running_request_and_is_harmless_afterwards() -> None:
    with running() as (loop, _):
        box = Mailbox()
        loop.submit(request("r", max_tokens=90_000), box)
        assert box.got.wait(PATIENCE_S)
        loop.cancel("r")
        assert box.wait()[-1].finish_reason == "cancelled"
        loop.cancel("r", 0)
        until(lambda: not loop.has_work)
        assert loop.healthy


def test_closing_with_drain_finishes_what_is_open() -> None:
    with running(max_num_seqs=1) as (loop, _):
        boxes = [Mailbox() for _ in range(5)]
        for i, box in enumerate(boxes):
            loop.submit(request(f"r{i}"), box)
        assert loop.close(drain=True, timeout_s=PATIENCE_S)
        assert [box.wait()[-1].finish_reason for box in boxes] == ["length"] * 5
        assert not loop.healthy
        assert not loop.is_alive
        with pytest.raises(EngineError, match="closing"):
            loop.submit(request("late"), Mailbox())
        loop.cancel("r0")
        assert loop.close()


@pytest.mark.parametrize("options", [{"drain": False}, {"drain": True, "timeout_s": 0.02}])
def test_closing_cancels_what_does_not_finish_in_time(options: dict[str, Any]) -> None:
    with running(max_num_seqs=1) as (loop, _):
        boxes = [Mailbox(), Mailbox()]
        for i, box in enumerate(boxes):
            loop.submit(request(f"r{i}", max_tokens=90_000), box)
        assert loop.close(**options)
        assert [box.wait()[-1].finish_reason for box in boxes] == ["cancelled"] * 2


def test_a_fault_outside_every_request_ends_all_of_them_and_is_remembered() -> None:
    with running() as (loop, model):
        model.gate.clear()
        boxes = [Mailbox(), Mailbox()]
        loop.submit(request("open", max_tokens=90_000), boxes[0])
        assert model.entered.wait(PATIENCE_S)
        loop.submit(request("arriving"), boxes[1])

        def broken(*_: object) -> None:
            raise RuntimeError("the table is torn")

        loop.engine.scheduler.commit = broken  # type: ignore[method-assign,assignment]
        model.gate.set()
        for box in boxes:
            last = box.wait()[-1]
            assert last.finish_reason == "error"
            assert isinstance(last.error, EngineError)
            assert "the table is torn" in str(last.error)
        until(lambda: not loop.is_alive)
        assert not loop.healthy
        with pytest.raises(EngineError, match="the table is torn"):
            loop.submit(request("late"), Mailbox())


def test_a_hanging_step_is_seen_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as (loop, model):
        model.gate.clear()
        loop.submit(request("r"), Mailbox())
        assert model.entered.wait(PATIENCE_S)
        rounds = loop.num_rounds
        time.sleep(0.02)
        assert loop.has_work
        assert loop.num_rounds == rounds
        assert loop.healthy
        monkeypatch.setattr("plait.engine.thread.STALLED_S", 0.01)
        assert not loop.healthy
        model.gate.set()
        until(lambda: not loop.has_work)
        until(lambda: loop.healthy)


def test_the_time_of_a_request_counts_from_when_it_was_handed_over() -> None:
    with running() as (loop, model):
        model.gate.clear()
        boxes = [Mailbox(), Mailbox()]
        loop.submit(request("first"), boxes[0])
        assert model.entered.wait(PATIENCE_S)
        loop.submit(request("second"), boxes[1])
        handed_over = time.monotonic()
        time.sleep(0.005)
        model.gate.set()
        trace = boxes[1].wait()[-1].trace
        assert trace is not None
        assert trace.first_scheduled_s is not None
        assert trace.arrival_s <= handed_over < trace.first_scheduled_s


def test_a_deadline_passes_while_the_engine_is_busy_with_others() -> None:
    with running(max_num_seqs=1) as (loop, _):
        boxes = [Mailbox(), Mailbox()]
        loop.submit(request("long", max_tokens=90_000), boxes[0])
        late = Request("late", (1, 2, 3), SamplingParams(max_tokens=5, temperature=0.0), timeout_s=0.02)
        loop.submit(late, boxes[1])
        assert isinstance(boxes[1].wait()[-1].error, DeadlineExceeded)
        loop.cancel("long")
        assert boxes[0].wait()[-1].finish_reason == "cancelled"


def test_engine_audits_block_tables_once_after_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plait.engine.core.AUDIT_AFTER_S", 0.01)
    with running() as (loop, _):
        threads: list[str] = []
        check = loop.engine.scheduler.check

        def counted() -> None:
            threads.append(threading.current_thread().name)
            check()

        monkeypatch.setattr(loop.engine.scheduler, "check", counted)
        for rounds in (1, 2):
            box = Mailbox()
            loop.submit(request("r"), box)
            box.wait()
            until(lambda expected=rounds: len(threads) == expected)  # type: ignore[misc]
            time.sleep(0.05)
            assert threads == ["plait-engine"] * rounds
        assert loop.engine.metrics.num_repairs == 0


def test_idle_engine_repairs_wrong_block_tables(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("plait.engine.core.AUDIT_AFTER_S", 0.01)
    with running(max_num_seqs=2) as (loop, _):
        slots = loop.engine.scheduler.memory.pools.slots
        assert slots is not None
        slots.take(1)  # held by no sequence
        for name in ("a", "b"):
            box = Mailbox()
            loop.submit(request(name), box)
            assert box.wait()[-1].finish_reason == "length"
            until(lambda: loop.engine.metrics.num_repairs == 1)
        stats = loop.stats()
        assert stats["num_free_slots"] + stats["num_snapshots"] == stats["num_slots"] == 2
        assert loop.healthy
    assert any(r.name == "plait.engine" and r.levelname == "ERROR" for r in caplog.records)


def test_failed_repair_of_block_tables_ends_no_request(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken() -> list[str]:
        raise RuntimeError("torn beyond repair")

    monkeypatch.setattr("plait.engine.core.AUDIT_AFTER_S", 0.01)
    with running() as (loop, _):
        monkeypatch.setattr(loop.engine.scheduler, "check", broken)
        monkeypatch.setattr(loop.engine.scheduler, "repair", broken)
        for name in ("a", "b"):
            box = Mailbox()
            loop.submit(request(name), box)
            assert box.wait()[-1].finish_reason == "length"
            until(lambda: "could not be repaired" in caplog.text)
        assert loop.healthy


def test_work_that_cannot_go_on_yet_is_tried_again() -> None:
    with running() as (loop, _):
        plan, refused = loop.engine.scheduler.plan, []

        def later(*drafts: Any, **words: bool) -> StepPlan | None:
            if len(refused) < 3:
                refused.append(1)
                return None
            return plan(*drafts, **words)

        loop.engine.scheduler.plan = later  # type: ignore[method-assign]
        box = Mailbox()
        loop.submit(request("r"), box)
        assert box.wait()[-1].finish_reason == "length"
        assert len(refused) == 3


def test_metrics_can_be_scraped_while_it_runs_and_after_its_end() -> None:
    with running() as (loop, _):
        box = Mailbox()
        loop.submit(request("r", max_tokens=500), box)
        while not box.events or box.events[-1].finish_reason is None:
            assert b"plait_output_tokens_total" in generate_latest(loop.registry)
        until(lambda: not loop.has_work)
    assert b"plait_output_tokens_total 500.0" in generate_latest(loop.registry)
