"""The access log: one line for each request, with what happened and nothing of any text."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from plait.config import ServerConfig
from plait.server.gateway.access_log import JsonFormat, TextFormat, escape_controls, follow, start_log
from tests.server.conftest import serving, wait_until
from tests.server.fake import fake_front
from tests.server.real_engine import engine_front


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def lines(self, style: logging.Formatter) -> list[str]:
        return [style.format(record) for record in self.records]

    def fields(self, **wanted: Any) -> list[dict[str, Any]]:
        found = [record.__dict__.get("fields", {}) for record in self.records]
        return [one for one in found if wanted.items() <= one.items()]


@pytest.fixture
def kept() -> Iterator[Kept]:
    handler, log = Kept(), logging.getLogger("plait")
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)
    log.setLevel(level)


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_one_line_with_its_numbers_and_without_its_text(kept: Kept, stream: bool) -> None:
    with serving(engine_front(), api_key=("alice:secret",), served_model_name="served") as client:
        asked = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True, "n": 2, "stream": stream}
        answer = client.post("/v1/completions", asked, x_api_key="secret", x_request_id="mine")
        assert answer.status == 200
        assert wait_until(lambda: len(kept.fields(id="mine")) == 1)
    (found,) = kept.fields(id="mine")
    assert found["key"] == "alice"
    assert (found["method"], found["path"], found["status"]) == ("POST", "/v1/completions", 200)
    assert (found["model"], found["prompt_tokens"], found["output_tokens"]) == ("served", 6, 10)
    assert found["finish"] == ("length", "length")
    assert found["cached_tokens"] == 0
    assert 0 <= found["queue_ms"] <= found["ttft_ms"] <= found["ms"]
    shown = "\n".join(kept.lines(TextFormat()) + kept.lines(JsonFormat()))
    assert "Hello" not in shown
    assert "secret" not in shown


def test_a_stop_string_does_not_hide_the_numbers(kept: Kept) -> None:
    with serving(engine_front(0.05)) as client:
        text = client.complete("Hello", max_tokens=9, ignore_eos=True).json["choices"][0]["text"]
        answer = client.complete("Hello", max_tokens=9, ignore_eos=True, stop=text[1])
        assert answer.status == 200
        wanted = answer.headers["x-request-id"]
        assert wait_until(lambda: len(kept.fields(id=wanted)) == 1)
    assert kept.fields(id=wanted)[0]["output_tokens"] >= 1


def test_refusals_are_logged_and_polled_routes_are_not(kept: Kept) -> None:
    with serving(fake_front(), api_key=("one",)) as client:
        for path in ("/health", "/ready", "/metrics", "/", "/page/js/main.js", "/v1/models"):
            client.get(path)
        assert client.get("/v1/none").status == 401
    found = {(one["path"], one["status"]) for one in kept.fields() if one}
    assert found == {("/v1/models", 401), ("/v1/none", 401)}


def record(message: str, **fields: Any) -> logging.LogRecord:
    made = logging.LogRecord("plait.access", logging.INFO, "", 0, message, (), None)
    made.fields = fields
    return made


HOSTILE = 'a\nfake INFO line\x1b[31m"quoted" \u2028\u202e=\x7f\\'


def test_a_refusal_says_why_and_nothing_of_what_was_sent(kept: Kept) -> None:
    with serving(fake_front()) as client:
        client.post("/v1/completions", {"prompt": "Hello", "temperature": -4})
        client.post("/v1/chat/completions", {"messages": [{"role": "secret", "content": "Hello"}]})
        client.post("/v1/completions", {"prompt": "Hello", "model": "some'\"secret"})
        assert wait_until(lambda: len(kept.fields(method="POST")) == 3)
    reasons = [fields["reason"] for fields in kept.fields(method="POST")]
    assert reasons[0].startswith("invalid_value (temperature): temperature: ")
    assert "-4" in reasons[0]
    assert [reason for reason in reasons if "secret" in reason] == []
    assert reasons[2].startswith("model_not_found (model): ")


def test_a_stream_that_fails_says_why(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("plait.server.gateway.request_context.FIRST_WAIT_S", 0.0)
    with serving(fake_front()) as client:
        for path in ("/v1/completions", "/api/generate"):
            assert client.post(path, {"model": "fake", "prompt": "BOOM", "stream": True}).status == 200
        assert wait_until(lambda: len(kept.fields(method="POST")) == 2)
    for found in kept.fields(method="POST"):
        assert (found["status"], found["reason"]) == (200, "engine_error: the engine failed here")


def test_refusals_before_any_endpoint_say_why_too(kept: Kept) -> None:
    with serving(fake_front(), api_key=("alice:secret",)) as client:
        for path, headers in (
            ("/v1/models", {"authorization": "Bearer wrong"}),
            ("/nopath", {"authorization": "Bearer secret"}),
            ("/v1/models", {"host": "evil.example", "authorization": "Bearer secret"}),
        ):
            replace(client, headers=headers).get(path)
        assert wait_until(lambda: len(kept.fields(method="GET")) == 3)
    reasons = [fields["reason"] for fields in kept.fields(method="GET")]
    assert [reason.split(" ")[0].rstrip(":") for reason in reasons] == [
        "invalid_api_key",
        "not_found",
        "host_not_allowed",
    ]
    assert "evil" not in "".join(reasons)


def test_what_a_client_sends_cannot_make_a_line_or_move_a_cursor() -> None:
    for line in (
        TextFormat().format(record("request", path=HOSTILE)),
        TextFormat().format(record(HOSTILE)),
        JsonFormat().format(record("request", path=HOSTILE)),
        JsonFormat().format(record(HOSTILE)),
    ):
        assert len(line.splitlines()) == 1
        assert line.isprintable()
    assert json.loads(JsonFormat().format(record("request", path=HOSTILE)))["path"] == HOSTILE
    assert escape_controls("plain é 漢") == "plain é 漢"


def test_text_lines_are_pairs() -> None:
    line = TextFormat().format(record("request", path="/a", key="", finish=("stop", "length"), said="a b"))
    assert line.endswith('INFO path=/a key="" finish=stop,length said="a b"')
    assert line[:4].isdigit()
    assert line.split()[0].endswith("Z")


def test_a_traceback_is_logged_in_both_styles() -> None:
    try:
        raise ValueError("bad\nworse")
    except ValueError:
        made = record("failed")
        made.exc_info = sys.exc_info()
    assert "ValueError: bad" in TextFormat().format(made)
    assert "ValueError: bad\nworse" in json.loads(JsonFormat().format(made))["exception"]


def test_the_level_and_the_style_are_as_set(capfd: pytest.CaptureFixture[str]) -> None:
    logs = [logging.getLogger(name) for name in ("", "plait", "uvicorn", "opentelemetry")]
    before = [(log.level, log.propagate, log.handlers) for log in logs]
    try:
        writer = start_log(ServerConfig(log_level="warning", log_format="json"))
        logging.getLogger("plait.server").info("not shown")
        logging.getLogger("plait.server").warning("shown")
        writer.flush()
        found = json.loads(capfd.readouterr().err)
        assert (found["level"], found["message"], found["logger"]) == ("warning", "shown", "plait.server")
        follow(ServerConfig(log_level="debug"), writer)
        logging.getLogger("plait.access").debug("now shown")
        logging.getLogger("some.library").warning("a complaint")
        writer.flush()
        lines = capfd.readouterr().err.splitlines()
        assert lines[0].endswith("DEBUG now shown")
        assert lines[1].endswith("WARNING a complaint")
    finally:
        logging.captureWarnings(False)
        for log, (level, propagate, handlers) in zip(logs, before, strict=True):
            log.level, log.propagate, log.handlers = level, propagate, handlers
            log.setLevel(level)
