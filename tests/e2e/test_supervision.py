"""`plait serve` when its engine is killed: every stream has the text of an undisturbed run."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import NANO_HYBRID, Server, serve

NUM_STREAMS, NUM_TOKENS = 16, 240
OPENINGS = ["Once upon a time", "The little dog", "One day, a girl", "In the garden"]


def body(i: int, num_tokens: int) -> dict[str, Any]:
    """Half of the streams are greedy, half drawn with a seed, some of these with penalties."""
    drawn = {"temperature": 1.0, "top_p": 0.95, "seed": i, "frequency_penalty": 0.5 * (i % 4 == 3)}
    return {
        "prompt": OPENINGS[i % len(OPENINGS)] + " and" * (i // len(OPENINGS)),
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "logprobs": 2 if i % 4 == 1 else None,
        **(drawn if i % 2 else {"temperature": 0}),
    }


class Stream(threading.Thread):
    """One completion, read as it comes."""

    def __init__(self, url: str, i: int, num_tokens: int) -> None:
        super().__init__()
        self._url, self._body = url, body(i, num_tokens)
        self.text, self.num_chunks = "", 0
        self.logprobs: list[float] = []
        self.reasons: list[str] = []
        self.usage: dict[str, Any] = {}

    def run(self) -> None:
        data = json.dumps(self._body).encode()
        sent = urllib.request.Request(
            self._url + "/v1/completions", data, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(sent, timeout=120) as lines:
            for line in lines:
                if line.startswith(b"data: {"):
                    self._take(json.loads(line.removeprefix(b"data: ")))

    def _take(self, chunk: dict[str, Any]) -> None:
        self.num_chunks += 1
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.text += choice["text"]
            self.logprobs += (choice.get("logprobs") or {}).get("token_logprobs", [])
            self.reasons += [choice["finish_reason"]] if choice["finish_reason"] else []


def streams(
    server: Server, interrupt: Callable[[list[Stream]], None], count: int, num_tokens: int
) -> list[Stream]:
    """All of them at the same time, to their ends."""
    found = [Stream(server.url, i, num_tokens) for i in range(count)]
    for stream in found:
        stream.start()
    interrupt(found)
    for stream in found:
        stream.join(180)
        assert not stream.is_alive()
    return found


def engine_of(server: Server) -> int:
    """The process that computes: the largest of the server's children."""
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    below = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return max(below, key=lambda pid: int(Path(f"/proc/{pid}/statm").read_text().split()[1]))


def rank_of(server: Server) -> int:
    """The process of rank 1, a child of the engine's."""
    tasks = Path(f"/proc/{engine_of(server)}/task").iterdir()
    (found,) = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    return found


def kill_engine(server: Server) -> None:
    os.kill(engine_of(server), signal.SIGKILL)


def kill_rank(server: Server) -> None:
    os.kill(rank_of(server), signal.SIGKILL)


def check_lost(
    server: Server,
    lose: Callable[[Server], None] = kill_engine,
    count: int = NUM_STREAMS,
    num_tokens: int = NUM_TOKENS,
) -> None:
    """Streams with a process lost in their middle, compared with the same streams left alone."""
    calm = streams(server, lambda found: None, count, num_tokens)
    assert server.get("/health")["totals"]["num_restarts"] == 0

    def interrupt(found: list[Stream]) -> None:
        while min(stream.num_chunks for stream in found) < 5:
            time.sleep(0.001)
        lose(server)

    killed = streams(server, interrupt, count, num_tokens)
    assert server.get("/health")["totals"]["num_restarts"] == 1
    for undisturbed, stream in zip(calm, killed, strict=True):
        assert stream.text == undisturbed.text
        assert stream.logprobs == undisturbed.logprobs
        assert stream.reasons == ["length"]
        assert stream.usage["prompt_tokens"] == undisturbed.usage["prompt_tokens"]
        assert stream.usage["completion_tokens"] == num_tokens
    assert len({stream.text for stream in calm}) > count // 2


def test_streams_of_a_killed_engine_have_the_text_they_would_have_had(nano_server: Server) -> None:
    check_lost(nano_server)


def test_streams_go_on_when_a_rank_is_killed() -> None:
    with serve(NANO_HYBRID, "--max-num-seqs", "8", "--tp", "2", "--cpu") as running:
        check_lost(running, kill_rank, 8, 40)
        rank, engine = (
            Path(f"/proc/{found(running)}/cmdline").read_bytes() for found in (rank_of, engine_of)
        )
        assert rank == engine  # it was forked, and shares what the engine had imported


WRONG_ONCE = """
from pathlib import Path
from plait.worker import rank

flag, right = Path(__file__).with_suffix(".flag"), rank.digest_of

def digest_of(message, answers):
    if flag.exists():  # other plans, or other tokens, have another hash
        flag.unlink()
        message += b"another"
    return right(message, answers)

rank.digest_of = digest_of
"""


@pytest.mark.slow
def test_streams_go_on_when_a_rank_has_computed_something_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plugin = tmp_path / "wrong_once.py"
    plugin.write_text(WRONG_ONCE)
    options = ("--max-num-seqs", "8", "--tp", "2", "--plugin", str(plugin))
    with serve(NANO_HYBRID, *options) as running:
        check_lost(running, lambda server: plugin.with_suffix(".flag").touch(), 8, 120)
    assert "rank 1 computed something else in step" in capsys.readouterr().out


@pytest.mark.slow
def test_streams_go_on_when_a_rank_is_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of it runs any more: after a minute without a sign of life it is lost."""
    with serve(NANO_HYBRID, "--max-num-seqs", "8", "--tp", "2") as running:
        check_lost(running, lambda server: os.kill(rank_of(server), signal.SIGSTOP), 8, 120)
    assert "has shown no sign of life for 60 s" in capsys.readouterr().out


@pytest.mark.slow
def test_streams_of_a_larger_model_do_too(smollm2: Path) -> None:
    with serve(smollm2, "--max-num-seqs", str(NUM_STREAMS), "--max-model-len", "512") as running:
        check_lost(running)


def test_the_process_that_answers_http_holds_no_tensors(nano_server: Server) -> None:
    for name in ("torch", "numba", "llvmlite"):
        assert f"/{name}/" not in Path(f"/proc/{nano_server.process.pid}/maps").read_text()
    assert "/llvmlite/" in Path(f"/proc/{engine_of(nano_server)}/maps").read_text()


@pytest.mark.slow  # tests/loading/image/test_startup.py has the same of a process without a server
def test_an_engine_from_a_startup_image_holds_neither_torch_nor_numba(
    tmp_path: Path, kernel_folder: Path
) -> None:
    (tmp_path / "kernels").symlink_to(kernel_folder)
    options = ("--max-num-seqs", "4", "--cpu", "--cache-dir", str(tmp_path))
    for is_first in (True, False):
        with serve(NANO_HYBRID, *options) as running:
            maps = Path(f"/proc/{engine_of(running)}/maps").read_text()
            assert [f"/{name}/" in maps for name in ("torch", "numba")] == [is_first] * 2


@pytest.mark.slow
def test_streams_of_a_killed_engine_from_an_image_with_drafts_go_on(
    tmp_path: Path, kernel_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The engine that follows one that was killed from outside begins with the image, too."""
    (tmp_path / "kernels").symlink_to(kernel_folder)
    options = ("--max-num-seqs", "8", "--cpu", "--cache-dir", str(tmp_path), "--speculate", "mtp")
    with serve(NANO_HYBRID, *options):
        pass
    capsys.readouterr()
    with serve(NANO_HYBRID, *options) as running:
        assert "/torch/" not in Path(f"/proc/{engine_of(running)}/maps").read_text()
        check_lost(running, count=3, num_tokens=120)
    assert capsys.readouterr().out.count("from the startup image") == 2
