"""Ranks that are forked from the engine's process: what they keep of it, and how they end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.config import EngineConfig
from plait.runner.ranks import processes
from plait.runner.ranks.messages import Failed, Stepped, encode
from plait.runner.ranks.processes import StartedRank
from plait.worker import fork_ranks
from tests.patience import PATIENCE_S

linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is needed")
FORK = """
import os, select, signal, subprocess, sys, time, types
from pathlib import Path

def be_rank(socket_fd, alive_fd):  # it loads nothing, and ends as a rank does
    while True:
        ready, _, _ = select.select([socket_fd, alive_fd], [], [])
        message = socket_fd in ready and os.read(socket_fd, 1)
        os._exit(7 if message else 0)

sys.modules["plait.worker.rank"] = fake = types.ModuleType("plait.worker.rank")
fake.main = be_rank
from plait.runner.ranks import processes
from plait.worker.fork_ranks import _fork_rank

kept = os.pipe()
first, second, third, last = (_fork_rank() for _ in range(4))
processes.offer_ranks([first, second])
assert processes.take_rank() is first and processes.take_rank() is second
try:
    first.process.wait(0.02)
except subprocess.TimeoutExpired:
    print("runs")
first.connection.send_bytes(b"a message")
print("ended", first.process.wait(60))
mine = {os.readlink(f"/proc/self/fd/{number}") for number in (*kept, first.connection.fileno())}
for _ in range(200):  # it may only just have begun
    theirs = {os.readlink(entry) for entry in Path(f"/proc/{third.process.pid}/fd").iterdir()}
    if not mine & theirs:
        break
    time.sleep(0.05)
print("of mine", len(mine & theirs))
second.process.kill()
print("killed", second.process.wait(), second.process.wait())
second.process.kill()
third.let_go()
third.end()
print("let go", third.process.wait())
print("last", last.process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@linux
def test_forked_ranks_hold_none_of_the_engine_s_descriptors_and_end_with_it() -> None:
    done = subprocess.run([sys.executable, "-c", FORK], capture_output=True, text=True, timeout=240)
    assert done.returncode == -signal.SIGKILL, done.stderr
    *lines, last = done.stdout.splitlines()
    assert lines == ["runs", "ended 7", "of mine 0", "killed -9 -9", "let go 0"]
    pid = int(last.split()[1])
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists() or "Z (zombie)" in Path(f"/proc/{pid}/status").read_text():
            return
        threading.Event().wait(0.05)
    pytest.fail("a rank outlived the process that forked it")


@linux
def test_ranks_are_forked_only_from_a_process_without_threads_and_for_cpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    two = EngineConfig(device="cpu", tensor_parallel_size=2)
    monkeypatch.setattr(fork_ranks, "TASKS", tmp_path)
    (tmp_path / "1").mkdir()
    assert fork_ranks.why_not(two) is None
    assert "GPU" in str(fork_ranks.why_not(EngineConfig(device="cuda", tensor_parallel_size=2)))
    automatic = EngineConfig(device="auto", tensor_parallel_size=2)
    monkeypatch.setattr(fork_ranks, "has_gpu", lambda: False)
    assert fork_ranks.why_not(automatic) is None
    monkeypatch.setattr(fork_ranks, "has_gpu", lambda: True)
    assert "GPU" in str(fork_ranks.why_not(automatic))
    (tmp_path / "2").mkdir()
    monkeypatch.setattr(fork_ranks, "_fork_rank", lambda: pytest.fail("it was forked"))
    monkeypatch.setattr(fork_ranks, "import_all", lambda config: pytest.fail("it was imported"))
    assert fork_ranks.why_not(two) == "this process has 2 threads"
    fork_ranks.fork_ranks(two)
    fork_ranks.fork_ranks(EngineConfig(device="cpu"))
    monkeypatch.setattr(fork_ranks, "TASKS", tmp_path / "none")
    assert "does not list" in str(fork_ranks.why_not(two))


def test_a_rank_without_signs_of_life_is_found_and_one_that_has_not_begun_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [100.0]
    monkeypatch.setattr(processes, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ours, theirs = socket.socketpair()
    silent, _other = socket.socketpair()
    mine, reports = Pipe()
    begun, loading = (
        StartedRank(SimpleNamespace(pid=pid), connection, end)  # type: ignore[arg-type]
        for pid, connection, end in ((11, mine, ours), (12, Connection(os.dup(silent.fileno())), silent))
    )
    processes.offer_ranks([begun, loading])
    assert [processes.take_rank(), processes.take_rank()] == [begun, loading]
    try:
        watch = processes.RankWatch()

        def look_after(seconds: float) -> int | None:
            clock[0] += seconds
            return watch.find_quiet(60.0)

        theirs.send(b"..")
        assert [look_after(10.0) for _ in range(7)] == [None] * 7  # the first sees the signs
        assert look_after(10.0) == 11
        theirs.send(b".")
        assert look_after(10.0) is None
        assert look_after(600.0) is None  # this process was stopped itself
        assert [look_after(10.0) for _ in range(7)][-2:] == [None, 11]
        assert watch.find_ended() is None
        theirs.close()  # it has ended, which the step finds out, unless it waits for the rank
        assert look_after(10.0) is None
        assert watch.find_ended() is None
        clock[0] += processes.ENDED_S + 1
        assert watch.find_ended() == (11, "has ended")
        reports.send_bytes(encode(Stepped(1, b"")))
        reports.send_bytes(encode(Failed("RankLost: no memory")))
        assert watch.find_ended() == (11, "has failed: RankLost: no memory")
    finally:
        begun.let_go()
        loading.let_go()


def test_a_rank_shows_signs_until_the_other_end_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "SIGN_S", 0.005)
    ours, theirs = socket.socketpair()
    showing = threading.Thread(target=processes.show_signs, args=(theirs,))
    showing.start()
    assert ours.recv(1) == b"."
    ours.close()
    showing.join(PATIENCE_S)
    assert not showing.is_alive()
