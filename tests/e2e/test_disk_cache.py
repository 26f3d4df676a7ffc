"""A server that is killed with all its processes goes on with its conversations."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.e2e.conftest import NANO_HYBRID, Server, _wait_until_healthy, free_port
from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not hasattr(os, "killpg"), reason="no process groups")]
QUESTIONS = ("Tell me of the king.", "And of his sons?", "Who built the house?", "What did the people say?")


@contextlib.contextmanager
def killed(*options: str) -> Iterator[Server]:
    """A server in a process group, which gets SIGKILL, engine included."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "plait.cli.main",
        "serve",
        "--model",
        str(NANO_HYBRID),
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [*command, "--cpu", "--max-num-seqs", "2", *options], text=True, start_new_session=True
    )
    try:
        server = Server(f"http://127.0.0.1:{port}", process)
        _wait_until_healthy(server)
        yield server
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def ask(server: Server, messages: list[dict[str, str]]) -> tuple[str, int, int]:
    """(the reply, prompt tokens, those of them that were cached)."""
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        done = client.chat.completions.create(
            model="default",
            messages=messages,
            max_tokens=12,
            temperature=0.9,
            seed=3,  # type: ignore[arg-type]
        )
    assert done.usage is not None
    details = done.usage.prompt_tokens_details
    cached = details.cached_tokens if details else 0
    return done.choices[0].message.content or "", done.usage.prompt_tokens, cached or 0


def written(folder: Path) -> int:
    return len([*folder.rglob("*.state")])


def wait_until_written(folder: Path, before: int) -> None:
    """Writing is behind the reply; a moment without a new file means that it is done."""
    end, seen = time.monotonic() + PATIENCE_S, before
    while time.monotonic() < end:
        time.sleep(0.5)
        if (now := written(folder)) == seen > before:
            return
        seen = now
    raise TimeoutError("nothing was written")


def test_a_conversation_goes_on_after_a_kill_of_the_whole_server(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    messages: list[dict[str, str]] = []
    replies, computed = [], []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        before = written(folder)
        with killed("--cache-disk", str(folder)) as server:
            text, prompt, cached = ask(server, messages)
            wait_until_written(folder, before)
        replies.append(text)
        computed.append(prompt - cached)
        messages.append({"role": "assistant", "content": text})
    assert all(count <= 64 for count in computed)
    assert max(computed[1:]) < 16, "a turn computed more than its own tokens and the last of the reply"
    with killed() as plain:
        for i, text in enumerate(replies):
            assert ask(plain, messages[: 2 * i + 1])[0] == text


def test_a_kill_at_any_moment_leaves_a_folder_that_serves(tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    messages = [{"role": "user", "content": "Tell me of the king. " * 20}]
    texts = set()
    for delay in (0.0, 0.002, 0.01, 0.05):
        with killed("--cache-disk", str(folder)) as server:
            texts.add(ask(server, messages)[0])
            time.sleep(delay)
    assert len(texts) == 1


def test_a_long_conversation_goes_on_after_kills_in_mid_reply_and_behind_one() -> None:
    """As `benchmarks/restart.py` measures it with 30,000 tokens: each next turn computes few tokens."""
    script = Path(__file__).resolve().parents[2] / "benchmarks" / "restart.py"
    command = [sys.executable, str(script), str(NANO_HYBRID), "--tokens", "3000"]
    run = subprocess.run(
        [*command, "--set", "max_seq_len=8192", "--threads", "1"], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    computed = [int(number) for number in re.findall(r"computed (\d+) of", run.stdout)]
    assert len(computed) == 2
    assert all(count <= 64 for count in computed), run.stdout
    assert "the same tokens" in run.stdout
