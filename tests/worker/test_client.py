from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.exposition import generate_latest

from plait.config import EngineConfig
from plait.errors import (
    BadFile,
    CheckpointError,
    ConfigError,
    ContextTooLong,
    DeadlineExceeded,
    EngineError,
    EngineKilled,
    EngineLost,
    InvalidField,
    ModelNotFound,
    OutOfMemory,
    QueueFull,
)
from plait.ops.seed import choice_seed
from plait.request import Event
from plait.schedule.plan import MOST_STEPS
from plait.server.http.errors import problem
from plait.state.blocks import extend, root
from plait.state.prefix_tree import PrefixChanges
from plait.worker.client import EngineProcess
from plait.worker.supervisor import Patience
from tests.engine.hash_model import BLOCK, Reader, oracle, prompts, request
from tests.loading.adapters.made import linear_modules, write_llama, write_peft
from tests.patience import until
from tests.worker.fake_engines import (
    BUILDER,
    GARBAGE,
    LONG,
    LOUD,
    POISON,
    SETTINGS,
    STALL,
    WORDY,
)

ROOT = Path(__file__).resolve().parents[2]
ORPHAN = """
import time
from tests.worker.fake_engines import BUILDER, SETTINGS
from plait.worker.client import EngineProcess
process = EngineProcess("fine", SETTINGS, builder=BUILDER)
process.ready(lambda *_: None)
print(process.pid, flush=True)
time.sleep(60)
"""


IMPORTING = """
import sys, time
from tests.worker.fake_engines import BUILDER, SETTINGS
from plait.worker.client import EngineProcess
sys.path.insert(0, sys.argv[1])  # which the engine's process gets
process = EngineProcess("fine", SETTINGS, builder=BUILDER)
time.sleep(60)
"""


@contextlib.contextmanager
def running(
    model: str = "fine", settings: EngineConfig = SETTINGS, **options: Any
) -> Iterator[EngineProcess]:
    process = EngineProcess(model, settings, builder=BUILDER, **options)
    try:
        process.ready(lambda *_: None)
        yield process
    finally:
        assert process.close(drain=False)


@pytest.fixture(scope="module")
def unharmed() -> Iterator[EngineProcess]:
    """For tests that leave it as it was."""
    with running() as process:
        yield process


def test_an_engine_takes_the_kernels_that_no_folder_took_from_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    before = set(Path(tempfile.gettempdir()).glob("plait-kernels-*"))
    with running("compiles", replace(SETTINGS, cache_dir=str(tmp_path / "file"))) as process:
        kill(process)
        until(lambda: process.healthy)
    said = [record.message for record in caplog.records]
    assert [text for text in said if text.startswith("compiled:")] == ["compiled: True", "compiled: False"]
    assert len([text for text in said if str(tmp_path / "file") in text]) == 1
    assert set(Path(tempfile.gettempdir()).glob("plait-kernels-*")) <= before


def kill(process: EngineProcess, number: int = signal.SIGKILL) -> None:
    pid, restarts = process.pid, process.num_restarts
    assert pid is not None
    os.kill(pid, number)
    if number != signal.SIGSTOP:
        until(lambda: process.num_restarts == restarts + 1)


def done(reader: Reader, *names: str, choices: int = 1) -> Callable[[], bool]:
    return lambda: all(len(reader.ends(name)) == choices for name in names)


def test_streams_of_an_engine_that_is_killed_go_on_with_the_same_tokens() -> None:
    given, reader = prompts(16), Reader()
    with running() as process:
        for i, prompt in enumerate(given):
            process.submit(request(f"r{i}", prompt, max_tokens=150, seed=i, n=1 + i % 2), reader)
        until(lambda: all(len(reader.tokens(f"r{i}")) > 5 for i in range(16)))
        kill(process)
        assert not process.healthy or process.num_restarts == 1
        until(lambda: all(len(reader.ends(f"r{i}")) == 1 + i % 2 for i in range(16)))
        assert process.healthy
    for i, prompt in enumerate(given):
        for index in range(1 + i % 2):
            assert reader.tokens(f"r{i}", index) == oracle(prompt, 150, choice_seed(i, index))
            assert [e.finish_reason for e in reader.events[f"r{i}", index] if e.finish_reason] == ["length"]
            trace = reader.last(f"r{i}", index).trace
            assert trace is not None
            assert trace.first_token_s is not None
            assert trace.arrival_s < trace.first_token_s < trace.finish_s
            assert trace.num_output_tokens == 150


def test_streams_of_an_engine_that_lost_its_gpu_are_replayed_by_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    given, reader = prompts(8), Reader()
    with running("loses its GPU", replace(SETTINGS, cache_dir=str(tmp_path))) as process:
        for i, prompt in enumerate(given):
            process.submit(request(f"r{i}", prompt, max_tokens=80, seed=i), reader)
        until(done(reader, *(f"r{i}" for i in range(8))))
        assert process.num_restarts == 1
    assert (tmp_path / "lost").exists()
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 80, choice_seed(i, 0))
        assert [e.finish_reason for e in reader.events[f"r{i}", 0] if e.finish_reason] == ["length"]
    text = "the engine's process has ended: the GPU cuda:0 was lost in a step: CUDA error: unspecified launch"
    assert text in caplog.text


def test_restart_emits_prompt_results_once_and_limits_count_from_the_prompt() -> None:
    reader, prompt = Reader(), [3, 5, 7, 11] * 6
    told = oracle(prompt, 120)
    stops = frozenset([told[10], told[100]])
    with running() as process:
        process.submit(request("scored", prompt, max_tokens=100, prompt_logprobs=1), reader)
        process.submit(request("stopped", prompt, stops, max_tokens=300, min_tokens=95), reader)
        until(lambda: len(reader.tokens("scored")) > 20 and len(reader.tokens("stopped")) > 20)
        kill(process)
        until(done(reader, "scored", "stopped"))
    scored = [e for e in reader.events["scored", 0] if e.prompt_logprobs is not None]
    assert [len(e.prompt_logprobs or ()) for e in scored] == [len(prompt) - 1]
    assert reader.tokens("scored") == told[:100]
    first = next(i for i in range(95, 120) if told[i] in stops)
    assert reader.tokens("stopped") == told[:first]
    assert reader.last("stopped").stop_token_id == told[first]


def test_what_was_cached_of_a_prompt_stays_what_it_was() -> None:
    reader, prompt = Reader(), [3, 5, 7, 11] * 6
    with running() as process:
        process.submit(request("first", prompt, max_tokens=2), reader)
        until(done(reader, "first"))
        process.submit(request("second", prompt, max_tokens=200), reader)
        until(lambda: len(reader.tokens("second")) > 20)
        kill(process)
        until(done(reader, "second"))
    cached = {e.num_cached_tokens for e in reader.events["second", 0]}
    assert len(cached) == 1
    assert 0 < cached.pop() < len(prompt)


def test_request_that_ends_engines_fails_after_two_and_no_other_does() -> None:
    given, reader = prompts(12, seed=4), Reader()
    with running() as process:
        for i, prompt in enumerate(given):
            process.submit(request(f"r{i}", prompt, max_tokens=150), reader)
        until(lambda: all(len(reader.tokens(f"r{i}")) > 5 for i in range(12)))
        process.submit(request("poison", [POISON, POISON], max_tokens=5), reader)
        until(done(reader, "poison", *(f"r{i}" for i in range(12))))
        error = reader.last("poison").error
        assert isinstance(error, EngineKilled)
        assert "2 engines have ended" in str(error)
        assert process.num_restarts == 2
        process.submit(request("after", [5], max_tokens=5), reader)
        until(done(reader, "after"))
    assert [reader.tokens(f"r{i}") for i in range(12)] == [oracle(prompt, 150) for prompt in given]


def test_what_a_process_prints_is_logged_and_a_stderr_that_is_not_read_holds_up_no_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    reader, writer = os.pipe()
    kept = os.dup(2)
    os.dup2(writer, 2)
    try:
        with running() as process:
            seen = Reader()
            process.submit(request("loud", [LOUD, LOUD], max_tokens=5), seen)
            until(done(seen, "loud"))
            pid = process.pid
            assert pid is not None
            os.kill(pid, signal.SIGSEGV)  # which Python says on stderr
            until(lambda: "Segmentation fault" in caplog.text)
            until(lambda: process.num_restarts == 1)
    finally:
        os.dup2(kept, 2)
        for fd in (reader, writer, kept):
            os.close(fd)
    assert seen.ends("loud") == ["length"]
    lines = [record.getMessage() for record in caplog.records]
    assert lines.count("a line of a library") == 4_000
    assert any("Segmentation fault" in line for line in lines)


def test_a_process_that_is_frozen_is_replaced() -> None:
    reader = Reader()
    with running(patience=Patience(frozen_s=3.0)) as process:
        process.submit(request("r", [5], max_tokens=300), reader)
        until(lambda: len(reader.tokens("r")) > 5)
        kill(process, signal.SIGSTOP)
        until(lambda: not process.healthy)
        until(done(reader, "r"))
        assert process.num_restarts == 1
    assert reader.tokens("r") == oracle([5], 300)


@pytest.mark.parametrize("token", [STALL, GARBAGE, LONG])
def test_a_step_that_hangs_and_frames_that_are_none_are_faults_of_the_process(token: int) -> None:
    reader = Reader()
    stalled_s = 2.0 if token == STALL else 60.0  # no other step takes so long, on any machine
    with running(patience=Patience(stalled_s=stalled_s)) as process:
        process.submit(request("r", [5], max_tokens=300), reader)
        process.submit(request("bad", [token, token], max_tokens=300), reader)
        until(done(reader, "r", "bad"))
        assert isinstance(reader.last("bad").error, EngineKilled)
        assert process.num_restarts == 2
    assert reader.tokens("r") == oracle([5], 300)


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_an_idle_engine_that_ends_is_replaced_again_and_again_and_nothing_is_left_behind(times: int) -> None:
    reader = Reader()
    with running() as process:
        assert process.stats()["num_free_blocks"] > 0
        kill(process)
        until(lambda: process.healthy)
        fds, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for i in range(times):
            process.submit(request(f"r{i}", [5], max_tokens=3), reader)
            until(done(reader, f"r{i}"))
            kill(process)
            until(lambda: process.healthy)
        assert len(os.listdir("/proc/self/fd")) == fds
        assert threading.active_count() == threads
        assert process.stats()["num_restarts"] == times + 1
        assert process.stats()["num_output_tokens"] == 3 * times


@pytest.mark.parametrize(
    ("model", "error", "says"),
    [
        ("bad option", ConfigError, "there is no such vocabulary"),
        ("bad file", BadFile, "the file ends early"),
        ("no memory", OutOfMemory, "out of memory; choose a smaller"),
        ("killed", EngineError, "ended by SIGKILL.*its memory was [0-9.]+ GiB at most"),
        ("crashed", EngineError, "exited with code 7"),
        ("broken", EngineError, "ZeroDivisionError: a fault of ours"),
    ],
)
def test_what_goes_wrong_while_loading_is_raised_as_it_was_there(
    model: str, error: type[Exception], says: str
) -> None:
    process = EngineProcess(model, SETTINGS, builder=BUILDER)
    with pytest.raises(error, match=says) as caught:
        process.ready(lambda *_: None)
    assert type(caught.value) is error
    assert process.close()
    assert not process.healthy
    with pytest.raises(EngineError):
        process.submit(request("late", [5]), Reader())


@pytest.mark.parametrize(
    ("counts", "error", "says"),
    [
        ((3, 4), OutOfMemory, "because memory ran out.*choose a smaller --max-model-len"),
        ((3, 3), EngineError, "not for memory.*a user or a program sent it"),
        ((None, None), EngineError, "does not say whether for memory, which is one possibility"),
    ],
)
def test_a_kill_while_loading_says_what_is_known_of_it(
    monkeypatch: pytest.MonkeyPatch,
    counts: tuple[int | None, int | None],
    error: type[Exception],
    says: str,
) -> None:
    left = list(counts)
    monkeypatch.setattr("plait.worker.child_process.num_oom_kills", lambda: left.pop(0))
    process = EngineProcess("killed", SETTINGS, builder=BUILDER)
    with pytest.raises(error, match=says) as caught:
        process.ready(lambda *_: None)
    assert type(caught.value) is error
    assert process.close()


def test_waiting_for_a_model_reports_progress_and_may_be_left() -> None:
    said: list[str] = []

    def report(text: str, done: int, total: int) -> None:
        said.append(text)
        if said.count("reading headers") == 2:
            raise InterruptedError

    process = EngineProcess("waits", SETTINGS, builder=BUILDER)
    assert process.source(report).metadata == {"tokenizer.odd": "\udcff"}
    with pytest.raises(InterruptedError):
        process.ready(report)
    assert process.close(drain=False)


def test_an_engine_that_cannot_be_started_again_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.worker.supervisor.BACKOFF_S", 0.01)
    monkeypatch.setattr("plait.worker.supervisor.MAX_DEATHS", 2)
    damage, reader = tmp_path / "damage", Reader()
    with running(str(damage)) as process:
        process.submit(request("r", [5], max_tokens=300), reader)
        until(lambda: len(reader.tokens("r")) > 5)
        damage.touch()
        kill(process)
        until(done(reader, "r"))
        error = reader.last("r").error
        assert isinstance(error, EngineLost)
        assert "cannot be read any more" in str(error)
        assert not process.healthy
        with pytest.raises(EngineError, match="stopped after a fault"):
            process.submit(request("late", [5]), reader)
        assert process.stats()["num_running"] == 0
        assert b"plait_engine_up 0.0" in generate_latest(process.registry)
    so_far = reader.tokens("r")
    assert so_far == oracle([5], len(so_far))


def test_no_engine_with_other_weights_goes_on_in_the_place_of_one_that_ended(tmp_path: Path) -> None:
    """Replies would go on with another model, and the front has the tokenizer and limits of the old one."""
    (tmp_path / "weights").write_text("of today")
    reader = Reader()
    with running("may be replaced", replace(SETTINGS, cache_dir=str(tmp_path))) as process:
        kill(process)
        until(lambda: process.healthy)
        process.submit(request("r", [5], max_tokens=300), reader)
        until(lambda: len(reader.tokens("r")) > 5)
        (tmp_path / "weights").write_text("of tomorrow")
        kill(process)
        until(done(reader, "r"))
        error = reader.last("r").error
        assert isinstance(error, EngineLost)
        assert "weights were replaced" in str(error)
        assert not process.healthy
        assert not process.live
        with pytest.raises(EngineLost, match="restart the server"):
            process.submit(request("late", [5]), reader)


def test_an_idle_engine_that_keeps_ending_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.worker.supervisor.BACKOFF_S", 0.01)
    monkeypatch.setattr("plait.worker.supervisor.MAX_DEATHS", 3)
    with running() as process:
        assert process.live
        for _ in range(2):
            kill(process)
            until(lambda: process.healthy)
            assert process.live
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: process.fault is not None)
        assert not process.live
        with pytest.raises(EngineLost):
            process.check_capacity()


def test_an_engine_that_was_lost_is_tried_again_and_refuses_requests_until_it_is_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.worker.supervisor.BACKOFF_S", 0.01)
    monkeypatch.setattr("plait.worker.supervisor.MAX_DEATHS", 2)
    damage, reader = tmp_path / "damage", Reader()
    with running(str(damage), patience=Patience(goes_on=True)) as process:
        process.submit(request("r", [5], max_tokens=300), reader)
        until(lambda: len(reader.tokens("r")) > 5)
        damage.touch()
        kill(process)
        until(lambda: process._lost is not None)
        assert process.fault is None
        assert process.live  # a restart of the server would not help sooner
        assert process.loading is None
        with pytest.raises(EngineLost, match="try again later") as caught:
            process.submit(request("early", [5]), reader)
        assert problem(caught.value).status == 503
        assert problem(caught.value).headers["Retry-After"]
        until(done(reader, "r"))
        assert isinstance(reader.last("r").error, EngineLost)
        damage.unlink()
        until(lambda: process.healthy)
        assert process.live
        process.submit(request("after", [5], max_tokens=5), reader)
        until(done(reader, "after"))
    assert reader.tokens("after") == oracle([5], 5)


def test_requests_that_come_while_there_is_no_engine_wait_for_it_and_may_leave() -> None:
    reader = Reader()
    with running() as process:
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: process.pid is None)
        process.submit(request("waits", [5], max_tokens=5), reader)
        process.submit(request("leaves", [5], max_tokens=5), reader)
        process.submit(request("late", [5], max_tokens=5, more={"timeout_s": 0.01}), reader)
        process.cancel("leaves")
        process.cancel("nobody")
        until(done(reader, "waits", "leaves", "late"))
    assert reader.tokens("waits") == oracle([5], 5)
    assert reader.ends("leaves") == ["cancelled"]
    assert isinstance(reader.last("late").error, DeadlineExceeded)


def test_what_can_be_refused_at_once_is_and_the_rest_arrives_as_events() -> None:
    settings, reader, again = EngineConfig(max_num_seqs=1, max_waiting=1), Reader(), Reader()
    with running(settings=settings) as process:
        wrong = {"a": ([500], InvalidField), "b": ([5] * 500, ContextTooLong)}
        for name, (ids, _) in wrong.items():
            process.submit(request(name, ids), reader)
        until(done(reader, *wrong))
        for name, (_, error) in wrong.items():
            assert isinstance(reader.last(name).error, error)
        process.submit(request("r0", [5], max_tokens=300), reader)
        process.submit(request("r1", [5], max_tokens=2), reader)
        with pytest.raises(QueueFull):
            process.submit(request("r2", [5]), reader)
        process.cancel("r0")
        until(done(reader, "r0", "r1"))
        process.submit(request("r3", [5], max_tokens=300), reader)
        process.submit(request("r3", [5], max_tokens=300), again)
        until(done(again, "r3"))
    assert isinstance(again.last("r3").error, InvalidField)
    assert reader.ends("r3") == ["cancelled"]
    assert reader.ends("r0") == ["cancelled"]


def test_the_process_knows_the_longest_sequence_that_memory_holds(unharmed: EngineProcess) -> None:
    assert unharmed.longest == 400


@pytest.mark.parametrize("drain", [True, False])
def test_closing_with_drain_finishes_what_is_open_and_without_cancels_it(drain: bool) -> None:
    reader = Reader()
    process = EngineProcess("fine", SETTINGS, builder=BUILDER)
    process.ready(lambda *_: None)
    pid = process.pid
    process.submit(request("r", [5], max_tokens=200), reader)
    until(lambda: len(reader.tokens("r")) > 5)
    assert process.close(drain=drain)
    assert reader.ends("r") == ["length" if drain else "cancelled"]
    assert reader.last("r").trace is not None
    assert not Path(f"/proc/{pid}").exists()
    process.cancel("r")
    with pytest.raises(EngineError, match="takes no more"):
        process.submit(request("late", [5]), reader)


def test_a_reader_that_fails_has_its_own_request_ended(unharmed: EngineProcess) -> None:
    reader = Reader()

    def broken(event: Any) -> None:
        raise ValueError("a reader's fault")

    unharmed.submit(request("bad", [5], max_tokens=300), broken)
    unharmed.submit(request("good", [5], max_tokens=20), reader)
    until(done(reader, "good"))
    until(lambda: unharmed.stats()["num_running"] == 0)
    assert reader.tokens("good") == oracle([5], 20)


def test_requests_that_the_engine_has_not_looked_at_yet_wait(unharmed: EngineProcess) -> None:
    reader = Reader()
    until(lambda: unharmed.healthy)
    os.kill(unharmed.pid or 0, signal.SIGSTOP)
    for i in range(3):
        unharmed.submit(request(f"r{i}", [5 + i], max_tokens=4), reader)
    assert unharmed.stats()["num_waiting"] == 3
    os.kill(unharmed.pid or 0, signal.SIGCONT)
    until(done(reader, "r0", "r1", "r2"))
    until(lambda: unharmed.stats()["num_waiting"] == 0)


def test_a_request_in_a_long_step_runs_and_one_that_is_cancelled_meanwhile_does_not_wait() -> None:
    with running() as process:
        process.submit(request("a", [STALL, STALL]), Reader())
        until(lambda: process.stats()["num_running"] == 1)
        assert process.stats()["num_waiting"] == 0
        for name in ("b", "c"):
            process.submit(request(name, [5], n=3), Reader())
        until(lambda: process.stats()["num_waiting"] == 6)
        process.cancel("b")
        until(lambda: process.stats()["num_waiting"] == 3)
        process.cancel("c")
        until(lambda: process.stats()["num_waiting"] == 0)
        assert process.stats()["num_running"] == 1  # its step goes on, whatever its client does


def test_a_request_that_is_replayed_when_its_engine_is_killed_again_is_not_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("plait.worker.child_process.num_oom_kills", lambda: 0)
    reader = Reader()
    with running() as process:
        process.submit(request("r", [5], max_tokens=200), reader)
        for num_tokens in (5, 8, 11):
            until(lambda n=num_tokens: len(reader.tokens("r")) > n)  # type: ignore[misc]
            until(lambda: process.pid is not None)  # the engine before may have written so many at once
            kill(process)
        until(done(reader, "r"))
    assert reader.tokens("r") == oracle([5], 200)


def test_totals_go_on_when_an_engine_is_replaced() -> None:
    reader = Reader()
    with running() as process:
        process.submit(request("a", [5], max_tokens=20), reader)
        until(done(reader, "a"))
        kill(process)  # no scrape has read what it had counted
        until(lambda: process.num_restarts == 1 and process.healthy)
        text = generate_latest(process.registry).decode()
        assert "plait_output_tokens_total 20.0" in text
        assert 'plait_requests_total{finish_reason="length"} 1.0' in text
        process.submit(request("b", [5], max_tokens=22), reader)
        until(done(reader, "b"))
        text = generate_latest(process.registry).decode()
        assert "plait_output_tokens_total 42.0" in text
        assert 'plait_requests_total{finish_reason="length"} 2.0' in text
        assert 'plait_request_output_tokens_bucket{le="+Inf"} 1.0' in text
        assert "plait_engine_restarts_total 1.0" in text
        assert "plait_requests_running 0.0" in text


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the child sees it at its next message")
def test_an_engine_ends_with_the_process_in_front_of_it() -> None:
    front = subprocess.Popen([sys.executable, "-c", ORPHAN], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert front.stdout is not None
    pid = int(front.stdout.readline())
    try:
        assert Path(f"/proc/{pid}").exists()
    finally:
        front.kill()
        front.wait()
        front.stdout.close()
    until(lambda: not Path(f"/proc/{pid}").exists())


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the child sees it at its next message")
def test_an_engine_that_still_imports_ends_with_the_process_in_front_of_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    writes = f"pathlib.Path({str(file)!r}).write_text(str(os.getpid()))"
    (tmp_path / "msgspec.py").write_text(f"import os, pathlib, time\n{writes}\ntime.sleep(60)\n")
    front = subprocess.Popen([sys.executable, "-c", IMPORTING, str(tmp_path)], cwd=ROOT)
    try:
        until(lambda: file.exists() and file.read_text() != "")
    finally:
        front.kill()
        front.wait()
    pid = int(file.read_text())
    until(lambda: not Path(f"/proc/{pid}").exists())


def test_engine_follows_log_levels_and_so_does_the_next_one(caplog: pytest.LogCaptureFixture) -> None:
    reader = Reader()

    def say(name: str) -> int:
        process.submit(request(name, [WORDY, WORDY], max_tokens=3), reader)
        until(done(reader, name))
        return caplog.text.count("a wordy step")

    with running() as process:
        assert say("a") == 0
        with caplog.at_level(logging.DEBUG, "plait.step"):
            process.follow_log_levels()
            assert say("b") == 1
            kill(process)
            assert say("c") == 2
        process.follow_log_levels()
        assert say("d") == 2


def test_an_engine_that_takes_another_s_place_says_how_it_gets_on() -> None:
    with running() as process:
        assert process.loading is None
        seen: list[tuple[str, int, int]] = []
        pid = process.pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        until(lambda: bool((found := process.loading) and not seen.append(found)))
        until(lambda: process.healthy)
        assert process.loading is None
        assert seen[0][0] in {"starting another engine", "reading headers", "ready"}
    assert process.loading is None


def test_tokens_of_one_interval_cross_in_one_event(unharmed: EngineProcess) -> None:
    reader, prompt = Reader(), [3, 5, 7, 11]
    unharmed.submit(request("fours", prompt, max_tokens=11, n=2, more={"interval": 4}), reader)
    unharmed.submit(request("whole", prompt, max_tokens=70, more={"interval": 64}), reader)
    until(done(reader, "whole"))
    until(done(reader, "fours", choices=2))
    for name, index, interval, count in (("fours", 0, 4, 11), ("fours", 1, 4, 11), ("whole", 0, 64, 70)):
        events = reader.events[name, index]
        first, *others = [n for e in events if (n := len(e.token_ids))]
        # Several steps at once may make an event longer. The end is two events: the last stays as it came.
        assert (first, first + sum(others)) == (1, count)
        assert all(interval <= n < interval + MOST_STEPS for n in others[:-2]), others
        seed = choice_seed(0, index)
        assert reader.tokens(name, index) == oracle(prompt, count, seed)
        assert [e.finish_reason for e in events if e.finish_reason] == ["length"]


def test_tokens_that_an_engine_kept_when_it_was_killed_are_computed_again() -> None:
    reader, prompt = Reader(), [3, 5, 7, 11]
    with running() as process:
        process.submit(request("whole", prompt, max_tokens=300, more={"interval": 64}), reader)
        until(lambda: len(reader.tokens("whole")) > 65)
        kill(process)
        until(done(reader, "whole"))
    assert reader.tokens("whole") == oracle(prompt, 300)


def test_a_process_that_cannot_be_started_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> None:
        raise OSError(11, "Resource temporarily unavailable")

    monkeypatch.setattr("plait.worker.supervisor.Spawned", refused)
    process = EngineProcess("fine", SETTINGS, builder=BUILDER)
    with pytest.raises(EngineError, match=r"could not be started: .*Resource temporarily unavailable$"):
        process.ready(lambda *_: None)
    process.close(drain=False)


@pytest.mark.slow
def test_streams_of_an_adapter_go_on_after_a_kill_with_the_same_tokens(tmp_path: Path) -> None:
    tensors = write_llama(tmp_path / "base")
    write_peft(tmp_path / "more/a", tensors, linear_modules(tensors))
    config = EngineConfig(lora_folder=str(tmp_path / "more"), device="cpu", threads=1, max_num_seqs=4)
    process, reader = EngineProcess(str(tmp_path / "base"), config), Reader()
    try:
        process.ready(lambda *_: None)
        with pytest.raises(CheckpointError):
            process.change_adapter("b", "nowhere")
        process.change_adapter("a", "a")
        for name, adapter in (("one", "a"), ("base", "")):
            asked = replace(request(name, [3, 1, 4, 1, 5], max_tokens=100), adapter=adapter)
            process.submit(asked, reader)
        until(done(reader, "one", "base"))
        process.submit(replace(request("two", [3, 1, 4, 1, 5], max_tokens=100), adapter="a"), reader)
        until(lambda: len(reader.tokens("two")) > 2)
        kill(process)
        until(done(reader, "two"))
        assert reader.tokens("two") == reader.tokens("one") != reader.tokens("base")
        process.change_adapter("a", None)
        kill(process)
        until(lambda: process.healthy)
        process.submit(replace(request("three", [3, 1, 4], max_tokens=4), adapter="a"), reader)
        until(done(reader, "three"))
        assert isinstance(reader.last("three").error, ModelNotFound)
    finally:
        assert process.close(drain=False)


@pytest.mark.slow
def test_a_stream_does_not_go_on_after_a_kill_with_another_adapter_of_the_name(tmp_path: Path) -> None:
    tensors, longest = write_llama(tmp_path / "base"), 1 << 16  # its reply does not end before the kill
    file = tmp_path / "base" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": longest}))
    for seed, name in enumerate(("a", "other")):
        write_peft(tmp_path / "more" / name, tensors, linear_modules(tensors), seed=seed)
    config = EngineConfig(lora_folder=str(tmp_path / "more"), device="cpu", threads=1, max_num_seqs=1)
    process, reader = EngineProcess(str(tmp_path / "base"), config), Reader()
    try:
        process.ready(lambda *_: None)
        process.change_adapter("a", "a")
        process.submit(replace(request("one", [3, 1, 4], max_tokens=longest - 8), adapter="a"), reader)
        until(lambda: len(reader.tokens("one")) > 2)
        process.change_adapter("a", None)
        process.change_adapter("a", "other")
        kill(process)
        until(done(reader, "one"))
        assert "was unloaded meanwhile" in str(reader.last("one").error)
    finally:
        assert process.close(drain=False)


def test_what_can_be_resumed_behind_a_reply_is_reported_before_its_end() -> None:
    points, known = set[bytes](), dict[str, bool]()

    def read(event: Event) -> None:
        if event.finish_reason is not None:
            chain = [root("")]
            extend(chain, [int(event.request_id), 6, 7, 8] * 10, BLOCK)
            known[event.request_id] = chain[-1] in points

    with running() as process:
        process.follow_prefixes(lambda changes: points.update(changes.added))
        process.submit(request("busy", [9, 8, 7, 6] * 10, max_tokens=300), Reader())  # it is never idle
        for name in ("1", "2", "3", "4"):
            process.submit(request(name, [int(name), 6, 7, 8] * 10, max_tokens=3), read)
            until(lambda name=name: name in known)
        process.cancel("busy")
    assert known == dict.fromkeys(("1", "2", "3", "4"), True)


def test_prefixes_are_followed_across_processes_and_engines() -> None:
    reader, found = Reader(), list[PrefixChanges]()
    points: set[bytes] = set()

    def follow(changes: PrefixChanges) -> None:
        found.append(changes)
        if changes.begins:
            points.clear()
        points.difference_update(changes.removed)
        points.update(changes.added)

    with running() as process:
        process.submit(request("before", [1, 2, 3, 4] * 10, max_tokens=2), reader)
        until(done(reader, "before"))
        process.follow_prefixes(follow)
        until(lambda: bool(found))
        assert [(changes.begins, changes.added) for changes in found] == [(True, ())]
        process.submit(request("one", [5, 6, 7, 8] * 10, max_tokens=2), reader)
        until(lambda: len(points) >= 2)
        stored = [block for changes in found for block in changes.stored]
        assert stored[0].tokens == tuple(([5, 6, 7, 8] * 10)[: len(stored[0].tokens)])
        known = set(points)
        process.follow_prefixes(follow)  # anew
        until(lambda: found[-1].begins and points == known)
        kill(process)
        until(lambda: not points)
        process.submit(request("two", [5, 6, 7, 8] * 10, max_tokens=2), reader)
        until(lambda: points >= known)
