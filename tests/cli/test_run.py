"""`plait run`: a chat through a server that is there, or that is started."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from plait.cli.common.log_file import MAX_BYTES, last_lines, log_path, prepare_log
from plait.cli.common.server_client import ServerClient, ServerError
from plait.cli.run import free_port, match_name
from plait.errors import ConfigError

Run = Callable[..., Any]


class Served(ThreadingHTTPServer):
    """A server of one model, with replies that tests write."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.events = [chunk("Hel"), chunk("lo"), {"choices": [], "usage": {"prompt_tokens": 7}}, "[DONE]"]
        self.refusal: tuple[int, object] | None = None
        self.url = f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Served

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_GET(self) -> None:
        self.server.keys.append(self.headers["Authorization"])
        self.answer(200, {"data": [{"id": "tiny", "max_model_len": 64}]})

    def do_POST(self) -> None:
        self.server.asked.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        if self.server.refusal:
            return self.answer(*self.server.refusal)
        self.send_response(200)
        self.end_headers()
        for event in self.server.events:
            text = event if isinstance(event, str) else json.dumps(event)
            self.wfile.write(f"data: {text}\n\n".encode())
        return None


def chunk(text: str) -> dict[str, Any]:
    return {"choices": [{"delta": {"content": text}}]}


@pytest.fixture
def served() -> Iterator[Served]:
    with Served() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


@pytest.fixture(autouse=True)
def state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return tmp_path / "plait"


def test_a_server_that_has_the_model_is_used(
    plait: Run, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n/set temperature 0\nAnd now?\n"))
    result = plait("run", "some/tiny:Q4_K_M", "--url", served.url, "--api-key", "secret", "--seed", "3")
    assert (result.code, result.out) == (0, "Hello\nHello\n")
    assert "7 prompt tokens" in result.err
    first, second = served.asked
    assert first["seed"] == 3
    assert first["model"] == "tiny"
    assert "temperature" not in first  # the model's choice
    assert second["temperature"] == 0
    assert [each["role"] for each in second["messages"]] == ["user", "assistant", "user"]
    assert set(served.keys) == {"Bearer secret"}


def test_options_for_another_server_are_not_ignored(plait: Run, served: Served) -> None:
    result = plait("run", "tiny", "--url", served.url, "-p", "x", "--", "--threads", "1")
    assert result.code == 2
    assert "--threads 1: a server at" in result.err


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([chunk("Hel")], "broke its reply off"),
        ([chunk("Hel"), "{"], "an event that cannot be read"),
        ([chunk("Hel"), {"error": {"message": "the engine is lost"}}], "the engine is lost"),
        ([{"choices": 3}], "an event that cannot be read"),
        (["[]"], "an event that cannot be read"),
    ],
)
def test_a_stream_that_goes_wrong_is_one_line(
    plait: Run, served: Served, events: list[Any], told: str
) -> None:
    served.events = events
    result = plait("run", "tiny", "--url", served.url, "-p", "x")
    assert result.code == 1
    assert told in result.err
    assert result.err.count("plait:") == 1


def test_a_refusal_is_reported_in_the_words_of_the_server(plait: Run, served: Served) -> None:
    served.refusal = (400, {"error": {"message": "the context is too short"}})
    assert "the context is too short" in plait("run", "tiny", "--url", served.url, "-p", "x").err
    served.refusal = (401, {"error": {"message": "no such key"}})
    assert "no such key (--api-key" in plait("run", "tiny", "--url", served.url, "-p", "x").err
    served.refusal = (503, "busy")
    assert "status 503" in plait("run", "tiny", "--url", served.url, "-p", "x").err


@pytest.mark.parametrize("url", ["ftp://one", "http://", "http://a:b"])
def test_an_address_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address"):
        ServerClient(url)


def test_an_address_may_have_a_prefix_and_v1() -> None:
    assert ServerClient("https://one/llm/v1/").url == "https://one/llm"
    assert ServerClient("one:80").url == "http://one:80"
    with pytest.raises(ServerError, match="cannot be reached"):
        ServerClient(f"127.0.0.1:{free_port()}").models()


def test_a_model_is_found_by_its_path_or_name() -> None:
    served = {"tiny": 1, "b.gguf": 2}
    assert match_name("./models/tiny", served) == "tiny"
    assert match_name("tiny.gguf", served) == "tiny"
    assert match_name("org/tiny:Q8_0", served) == "tiny"
    assert match_name("b.gguf", served) == "b.gguf"
    assert match_name("other", served) is None


@pytest.mark.slow
def test_a_server_that_does_not_start_says_why(plait: Run, state: Path) -> None:
    result = plait("run", "./absent", "--url", f"127.0.0.1:{free_port()}", "-p", "x")
    assert result.code == 2
    assert "the server did not start: absent: no such file or directory" in result.err
    assert plait("logs", "-n", "1").out.startswith("plait: absent: no such file")


@pytest.mark.slow
def test_a_server_is_started_and_ends_with_the_chat(plait: Run, smollm2: Path) -> None:
    url = f"127.0.0.1:{free_port()}"
    result = plait("run", str(smollm2), "--url", url, "-p", "Hi", "--max-tokens", "4", "--keep")
    assert result.code == 0, result.err
    pid = int(result.err.partition("`kill ")[2].partition("`")[0])
    again = plait("run", str(smollm2), "--url", url, "-p", "Hi", "--max-tokens", "4")
    assert again.code == 0
    assert "is served at" not in again.err  # it is there
    os.kill(pid, signal.SIGTERM)
    os.waitpid(pid, 0)
    ended = plait("run", str(smollm2), "--url", url, "-p", "Hi", "--max-tokens", "4")
    assert ended.code == 0
    assert f"is served at http://{url}" in ended.err
    with pytest.raises(ServerError):
        ServerClient(url).models()


def test_the_log_is_bounded_and_its_end_is_shown(plait: Run, state: Path) -> None:
    assert "started no server yet" in plait("logs").err
    path = prepare_log()
    assert path == log_path() == state / "serve.log"
    assert path.stat().st_mode & 0o077 == 0
    path.write_text("".join(f"line {i}\n" for i in range(9)))
    assert plait("logs", "-n", "2").out == "line 7\nline 8\n"
    assert last_lines(path, 9, begin=path.stat().st_size) == []
    path.write_bytes(b"x\n" * (MAX_BYTES // 2 + 1))
    assert len(last_lines(path, 1 << 30)) < MAX_BYTES // 2
    assert prepare_log().stat().st_size == 0
    assert plait("logs", "--file", str(state / "absent")).code == 2
