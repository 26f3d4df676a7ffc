"""`plait serve --store` as a process, for OpenAI's client: killed, started again, encrypted."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.conftest import NANO_HYBRID, serve
from tests.server.conftest import wait_until

pytestmark = pytest.mark.slow
MODEL = "nano"
OPTIONS = ("--served-model-name", MODEL, "--max-model-len", "512", "--api-key", "me:k")


def client_of(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0)


def upload(openai: OpenAI, count: int) -> str:
    lines = [
        {
            "custom_id": str(i),
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL, "prompt": f"{i}: once", "max_tokens": 24, "temperature": 0},
        }
        for i in range(count)
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    return openai.files.create(file=("in.jsonl", text.encode()), purpose="batch").id


def test_a_killed_server_goes_on_with_its_batch_and_conversation(tmp_path: Path) -> None:
    options = (*OPTIONS, "--store", str(tmp_path / "s.db"))
    is_killed = False
    with suppress(AssertionError), serve(NANO_HYBRID, *options) as server:  # it does not exit with 0
        openai = client_of(server.url)
        made = openai.batches.create(
            input_file_id=upload(openai, 200), endpoint="/v1/completions", completion_window="24h"
        )
        first = openai.responses.create(model=MODEL, input="one", max_output_tokens=8)
        asked: Any = {"model": MODEL, "input": "go", "extra_body": {"ignore_eos": True}}
        begun = openai.responses.create(background=True, **asked)
        assert wait_until(lambda: (openai.batches.retrieve(made.id).request_counts.completed or 0) > 5)  # type: ignore[union-attr]
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
        is_killed = True
    assert is_killed
    with serve(NANO_HYBRID, *options) as server:
        openai = client_of(server.url)
        found = openai.responses.retrieve(begun.id)
        if found.status != "completed":  # it may have been quicker than the signal
            assert (found.status, found.error.code) == ("failed", "server_error")  # type: ignore[union-attr]
        second = openai.responses.create(
            model=MODEL, input="two", previous_response_id=first.id, max_output_tokens=8
        )
        assert len([*openai.responses.input_items.list(second.id)]) == 3
        assert wait_until(lambda: openai.batches.retrieve(made.id).status == "completed", 120)
        batch = openai.batches.retrieve(made.id)
        assert batch.request_counts is not None
        assert (batch.request_counts.completed, batch.request_counts.failed) == (200, 0)
        assert batch.output_file_id is not None
        answers = [json.loads(line) for line in openai.files.content(batch.output_file_id).text.splitlines()]
        assert [answer["custom_id"] for answer in answers] == [str(i) for i in range(200)]


def test_an_encrypted_store_has_no_text_of_a_client(tmp_path: Path) -> None:
    pytest.importorskip("cryptography", reason="cryptography is not installed: it is an extra")
    path, key = tmp_path / "s.db", tmp_path / "key"
    key.touch(0o600)
    key.write_text("5e" * 32)
    options = (*OPTIONS, "--store", str(path), "--store-key", str(key))
    with serve(NANO_HYBRID, *options) as server:
        openai = client_of(server.url)
        made = openai.responses.create(model=MODEL, input="a very secret text", max_output_tokens=4)
        events = [
            *openai.responses.create(
                model=MODEL, input="hidden too", background=True, stream=True, max_output_tokens=4
            )
        ]
        again = [*openai.responses.retrieve(events[0].response.id, stream=True)]  # type: ignore[union-attr]
        assert [event.type for event in again] == [event.type for event in events]
        assert openai.responses.retrieve(made.id).output_text == made.output_text
    content = path.read_bytes()
    assert b"secret" not in content
    assert b"hidden" not in content


def test_a_bad_store_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    (tmp_path / "s.db").write_text("no database at all, " * 50)
    command = [sys.executable, "-m", "plait.cli.main", "serve", str(NANO_HYBRID), "--cpu", "--port", "0"]
    done = subprocess.run(
        [*command, "--store", str(tmp_path / "s.db")], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "the file is damaged or no database; move it away" in done.stderr
