"""The order of grammar trials: keys take turns, no key has every process, and known results need no wait."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from plait.errors import BadGrammar, CapacityError
from plait.fair_queue import Lanes
from plait.request import Grammar
from plait.text.grammar import trial_pool
from plait.text.grammar.checker import GrammarChecker
from plait.text.grammar.library import GrammarLimits
from plait.text.grammar.trial_pool import TrialPool, Verdict, Verdicts, digest
from tests.server.fake import ByteTokenizer

WAIT_S = 60.0


def test_keys_take_turns_and_a_key_keeps_its_order() -> None:
    turns: Lanes[int] = Lanes()
    for n in range(4):
        turns.put("a", n)
    turns.put("b", 10)
    turns.put("c", 20)
    turns.drop("c", 20)
    turns.drop("c", 21)
    assert [turns.count(key) for key in "abc"] == [4, 1, 0]
    assert [turns.take() for _ in range(3)] == [("a", 0), ("b", 10), ("a", 1)]
    turns.put("b", 11)
    assert turns.take({"a"}) == ("b", 11)
    assert turns.take({"a"}) is None
    assert [turns.take() for _ in range(3)] == [("a", 2), ("a", 3), None]


class Stage:
    """Stands for the processes: each question waits until the test lets it be answered."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.num_started = 0
        self._begun = threading.Condition()
        self._may_end: dict[str, threading.Event] = {}

    def child(self, limits: GrammarLimits) -> Any:
        self.num_started += 1
        return self

    def set_up(self, setup: str, limits: GrammarLimits) -> None:
        pass

    def alive(self) -> bool:
        return True

    def stop(self) -> None:
        pass

    def ask(self, line: str, timeout_s: float) -> str:
        source = json.loads(line)["source"]
        with self._begun:
            self.asked.append(source)
            event = self._may_end.setdefault(source, threading.Event())
            self._begun.notify_all()
        assert event.wait(WAIT_S)
        return json.dumps({"error": "bad"} if source.startswith("!") else {"form": source})

    def wait_for(self, *sources: str) -> None:
        """Until the trials of these have begun, in any order."""
        with self._begun:
            assert self._begun.wait_for(lambda: set(sources) <= set(self.asked), WAIT_S), self.asked

    def end(self, *sources: str) -> None:
        with self._begun:
            for source in sources:
                self._may_end.setdefault(source, threading.Event()).set()


@pytest.fixture
def stage(monkeypatch: pytest.MonkeyPatch) -> Stage:
    found = Stage()
    monkeypatch.setattr(trial_pool, "TrialChild", found.child)
    return found


def pool(**limits: Any) -> tuple[TrialPool, Callable[..., Future[Verdict]]]:
    made = TrialPool({"size": 1, "special": {}, "ends": [0]}, GrammarLimits(**limits))
    return made, lambda source, key="": made.submit(Grammar("regex", source), key)


def test_no_key_has_every_process_while_another_may_come(stage: Stage) -> None:
    made, submit = pool()
    first = [submit(f"a{n}", "a") for n in range(4)]
    stage.wait_for("a0")
    other = submit("b0", "b")
    stage.wait_for("b0")
    assert stage.asked == ["a0", "b0"]
    stage.end("b0")
    assert other.result(WAIT_S) == Verdict(True, "b0")
    assert stage.asked == ["a0", "b0"]  # the free process is kept for others
    stage.end("a0", "a1", "a2", "a3")
    assert [future.result(WAIT_S).text for future in first] == ["a0", "a1", "a2", "a3"]
    made.close()


def test_without_keys_every_process_works_in_the_order_of_arrival(stage: Stage) -> None:
    made, submit = pool()
    futures = [submit(f"a{n}") for n in range(3)]
    stage.wait_for("a0", "a1")
    assert sorted(stage.asked) == ["a0", "a1"]
    stage.end("a1")
    stage.wait_for("a2")
    stage.end("a0", "a2")
    assert all(future.result(WAIT_S).is_good for future in futures)
    made.close()


def test_a_crowd_of_one_key_lets_another_go_before_it(stage: Stage) -> None:
    made, submit = pool(children=1)
    crowd = [submit(f"a{n}", "a") for n in range(16)]
    stage.wait_for("a0")
    other = submit("b0", "b")
    stage.end("b0", *(f"a{n}" for n in range(16)))
    assert other.result(WAIT_S).is_good
    assert all(future.result(WAIT_S).is_good for future in crowd)
    assert stage.asked.index("b0") <= 2  # behind the one that ran, and one that was before it
    made.close()


def test_a_grammar_is_tried_once_for_all_who_ask_and_remembered(stage: Stage) -> None:
    made, submit = pool()
    futures = [submit(source, key) for key in ("a", "b", "a") for source in ("x", "!y")]
    stage.end("x", "!y")
    assert [future.result(WAIT_S).is_good for future in futures] == [True, False] * 3
    assert submit("!y", "c").result(0).text == "the grammar cannot be honoured: bad"
    assert sorted(stage.asked) == ["!y", "x"]
    made.close()


def test_who_goes_away_leaves_the_queue(stage: Stage) -> None:
    made, submit = pool(children=1)
    running = submit("a0", "a")
    stage.wait_for("a0")
    gone, shared, stays = submit("a1", "a"), submit("a2", "a"), submit("a2", "b")
    last = submit("a3", "a")
    assert gone.cancel()
    assert shared.cancel()
    stage.end("a0", "a2", "a3")
    assert running.result(WAIT_S).is_good
    assert stays.result(WAIT_S).is_good
    assert last.result(WAIT_S).is_good
    assert "a1" not in stage.asked
    assert submit("a2", "c").result(0).is_good
    made.close()


def test_a_key_has_a_bounded_number_waiting(stage: Stage) -> None:
    made, submit = pool(children=1, max_waiting=2)
    submit("a0", "a")
    stage.wait_for("a0")
    waiting = [submit("a1", "a"), submit("a2", "a")]
    with pytest.raises(CapacityError, match="2 grammars of this key wait"):
        submit("a3", "a")
    submit("b0", "b")
    made.close()
    for future in waiting:
        with pytest.raises(CapacityError, match="stopping"):
            future.result(WAIT_S)
    stage.end("a0")


def test_the_processes_start_before_the_first_grammar(stage: Stage) -> None:
    made, _ = pool(children=2)
    made.start()
    made.start()
    assert stage.num_started == 2
    made.close()


class SlowChild:
    """Stands for a process that takes until `may_go` to come up. `is_begun`: it has been started."""

    is_begun, may_go = threading.Event(), threading.Event()

    def __init__(self, limits: GrammarLimits) -> None:
        self.is_stopped = False
        made.append(self)

    def set_up(self, setup: str, limits: GrammarLimits) -> None:
        self.is_begun.set()
        assert self.may_go.wait(WAIT_S)

    def stop(self) -> None:
        self.is_stopped = True


made: list[SlowChild] = []


def test_a_process_that_comes_up_behind_the_end_of_the_pool_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial_pool, "TrialChild", SlowChild)
    found, submit = pool(children=1)
    future = submit("a")
    assert SlowChild.is_begun.wait(WAIT_S)
    found.close()
    SlowChild.may_go.set()
    with pytest.raises(CapacityError, match="the server is stopping"):
        future.result(WAIT_S)
    assert [child.is_stopped for child in made] == [True]


def test_every_free_place_takes_what_came_during_the_start(stage: Stage) -> None:
    made, submit = pool(children=2)
    made._running = dict.fromkeys(range(2))  # as during `start`, in another thread
    futures = [submit(source, source) for source in ("a", "b")]
    made._running = {}
    made.start()
    stage.wait_for("a", "b")
    stage.end("a", "b")
    assert all(future.result(WAIT_S).is_good for future in futures)
    made.close()


def test_a_thread_that_does_not_start_leaves_no_grammar_waiting(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    made, submit = pool(children=2)
    made._running = dict.fromkeys(range(2))
    alone = [submit(source, source) for source in ("a", "b")]
    made._running = {}
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        made.start()
        for future in alone:
            with pytest.raises(CapacityError, match="can't start new thread; try again later"):
                future.result(0)
    first = submit("c", "c")
    stage.wait_for("c")
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refuse)
        second = submit("d", "d")
    stage.end("c", "d")
    assert [future.result(WAIT_S).text for future in (first, second)] == ["c", "d"]
    made.close()


@pytest.mark.parametrize("number", ["SIGKILL", "SIGTERM", "SIGHUP", "SIGINT"])
def test_an_end_from_outside_is_no_verdict(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, number: str
) -> None:
    def broken(line: str, timeout_s: float) -> str:
        raise BrokenPipeError

    monkeypatch.setattr(stage, "read_status", lambda: -signal.Signals[number], raising=False)
    made, submit = pool()
    with monkeypatch.context() as patched:
        patched.setattr(stage, "ask", broken)
        with pytest.raises(CapacityError, match="try again"):
            submit("a").result(WAIT_S)
    stage.end("a")
    assert submit("a").result(WAIT_S).is_good
    made.close()


def test_a_wait_that_is_too_long_is_no_verdict(stage: Stage) -> None:
    checker = GrammarChecker(ByteTokenizer(), limits=GrammarLimits(wait_s=0.01))
    grammar = Grammar("regex", "a")
    with pytest.raises(CapacityError, match=r"not tried out within 0\.01 s"):
        checker.check(grammar)
    stage.end("a")
    assert checker.check(grammar, WAIT_S).form == "a"
    with pytest.raises(BadGrammar, match="bytes; at most"):
        checker.submit(Grammar("regex", "a" * 300_000))
    checker.close()


def test_verdicts_are_kept_within_their_bytes_by_content() -> None:
    kept = Verdicts(max_bytes=10 * (100 + 600))
    grammars = [Grammar("regex", f"{n}") for n in range(100)]
    for grammar in grammars:
        kept.put(digest(grammar), Verdict(True, "x" * 100))
        kept.get(digest(grammars[0]))
    known = [g for g in grammars if kept.get(digest(g))]
    assert known == [grammars[0], *grammars[-9:]]
    kept.put(digest(grammars[5]), Verdict(True, "x" * 800))  # more than an eighth: it would drop others
    assert [g for g in grammars if kept.get(digest(g))] == known
    kept.put(digest(grammars[0]), Verdict(True, "x" * 10_000))
    assert [g for g in grammars if kept.get(digest(g))] == known[1:]
    one = Grammar("regex", "a", "guided_regex")
    assert digest(one) == digest(Grammar("regex", "a"))
    others = [Grammar("lark", "a"), Grammar("regex", "a", lead="b"), Grammar("regex", "a", space="any")]
    assert len({digest(g) for g in (one, *others)}) == 4
