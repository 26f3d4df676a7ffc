"""What a client sees when the engine refuses or fails, and what the engine sees when a client leaves."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import socket
import threading
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from openai import APIError, OpenAI

from plait.frontend.deltas import TextLogprob
from plait.server.api.token_scores import finite
from plait.server.gateway import middleware
from plait.server.gateway.request_context import FIRST_WAIT_S
from plait.server.http import transfer
from tests.patience import PATIENCE_S
from tests.server.conftest import Client, serving, wait_until
from tests.server.fake import EchoLoop, fake_front

PATHS = ["/v1/completions", "/v1/chat/completions"]
BOTH = pytest.mark.parametrize("path", PATHS)
STREAMED = pytest.mark.parametrize("stream", [False, True])


def body(path: str, text: str, **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {"temperature": 0, **asked, **more}


@BOTH
@STREAMED
@pytest.mark.parametrize(("text", "status"), [("FULL", 429), ("BROKEN", 500), ("REFUSE", 503)])
def test_a_refusal_is_an_http_error(
    client: Client, path: str, stream: bool, text: str, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.server.gateway.request_context.FIRST_WAIT_S", 30.0)  # as on an idle machine
    answer = client.post(path, body(path, text, stream=stream))
    assert answer.status == status
    assert answer.error["message"]
    assert ("retry-after" in answer.headers) == (status in {429, 503})


@BOTH
def test_a_failure_is_a_500_that_says_what_failed(client: Client, path: str) -> None:
    answer = client.post(path, body(path, "BOOM"))
    assert answer.status == 500
    assert answer.error == {
        "message": "the engine failed here",
        "type": "server_error",
        "param": None,
        "code": "engine_error",
    }


@BOTH
def test_a_failure_after_the_first_byte_is_an_event(
    client: Client, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("plait.server.gateway.request_context.FIRST_WAIT_S", 0.0)
    answer = client.post(path, body(path, "BOOM", stream=True))
    assert answer.status == 200
    assert answer.events[-1]["error"]["message"] == "the engine failed here"
    assert set(answer.events[-1]["error"]) == {"message", "type", "param", "code"}


def test_the_openai_client_raises_a_failure_in_a_stream(openai: OpenAI) -> None:
    chunks = openai.completions.create(model="fake", prompt="BOOM", stream=True)
    said: list[str] = []
    with pytest.raises(APIError, match="the engine failed here"):
        said.extend(chunk.choices[0].text for chunk in chunks)
    assert "".join(said) == "BOO"


def test_a_failure_of_one_prompt_ends_the_others(client: Client, engine: EchoLoop) -> None:
    answer = client.complete(["SLOW " * 90, "BOOM"], max_tokens=400, ignore_eos=True)
    assert answer.status == 500
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_a_refused_prompt_takes_the_others_back(client: Client, engine: EchoLoop) -> None:
    assert client.complete(["HANG", "HANG", "FULL"]).status == 429
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_a_template_that_refuses_is_a_400(client: Client) -> None:
    answer = client.chat("UNSAYABLE")
    assert (answer.status, answer.error["code"]) == (400, "bad_template")


def leave(client: Client, path: str, sent: dict[str, Any], wait: Any) -> None:
    raw = json.dumps(sent).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert wait(sock)


@BOTH
@STREAMED
@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("text", ["HANG", "SLOW" * 60])
def test_leaving_cancels(
    client: Client, engine: EchoLoop, path: str, stream: bool, n: int, text: str
) -> None:
    known = len(engine.requests)
    asked = body(path, text, stream=stream, n=n, max_tokens=1000, ignore_eos=True)
    leave(client, path, asked, lambda sock: wait_until(lambda: engine.stats()["running"] > 0))
    assert len(engine.requests) == known + 1
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_leaving_in_the_middle_of_a_stream_cancels(client: Client, engine: EchoLoop) -> None:
    asked = body(PATHS[0], "SLOW" * 60, stream=True, max_tokens=1000)
    leave(client, PATHS[0], asked, lambda sock: b"data: " in sock.recv(65536) + sock.recv(65536))
    assert wait_until(lambda: engine.stats()["running"] == 0)


def test_leaving_in_the_middle_of_a_body_asks_for_nothing(client: Client, engine: EchoLoop) -> None:
    known = len(engine.requests)
    with socket.create_connection(client.address, timeout=20) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: 99\r\n\r\n{")
        time.sleep(0.05)
    assert client.get("/health").status == 200
    assert len(engine.requests) == known


def test_a_hundred_cancels_leave_nothing(client: Client, engine: EchoLoop) -> None:
    threads = threading.active_count()

    def one(i: int) -> None:
        asked = body(PATHS[i % 2], "SLOW" * 60, stream=i % 3 > 0, n=1 + i % 2, max_tokens=500)
        with contextlib.suppress(OSError):
            leave(client, PATHS[i % 2], asked, lambda sock: time.sleep(0.001 * (i % 40)) is None)

    workers = [threading.Thread(target=one, args=(i,)) for i in range(100)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert wait_until(lambda: engine.stats()["running"] == 0)
    assert wait_until(lambda: threading.active_count() <= threads + 40)
    assert client.complete("Hi", max_tokens=2).status == 200


def test_headers_come_before_the_first_token(client: Client) -> None:
    raw = json.dumps(body(PATHS[0], "HANG", stream=True)).encode()
    head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        assert sock.recv(4096).startswith(b"HTTP/1.1 200 OK\r\n")
    assert FIRST_WAIT_S < 1


def test_silence_is_filled_with_comments(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PING_S", 0.02)
    raw = json.dumps(body(PATHS[1], "HANG", stream=True)).encode()
    head = f"POST {PATHS[1]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw)
        seen = b""
        while seen.count(b": ping\n\n") < 3:
            seen += sock.recv(4096)


def test_comments_do_not_disturb_the_openai_client(openai: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PING_S", 0.004)
    chunks = openai.completions.create(model="fake", prompt="SLOW and slower", stream=True)
    assert "".join(chunk.choices[0].text for chunk in chunks) == "SLOW and slower"


def test_a_client_that_reads_nothing_is_given_up(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(transfer, "SEND_TIMEOUT_S", 0.2)
    front = fake_front()
    with serving(front) as client, socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1024)
        sock.connect(client.address)
        asked = body(PATHS[0], "x", stream=True, max_tokens=2000, ignore_eos=True, n=16, logprobs=20)
        raw = json.dumps(asked).encode()
        head = f"POST {PATHS[0]} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        head += f"X-Request-Id: slow\r\nContent-Length: {len(raw)}\r\n\r\n"
        sock.sendall(head.encode() + raw)
        assert wait_until(lambda: front.stats()["running"] > 0)
        assert wait_until(lambda: front.stats()["running"] == 0)
        assert "slow: the client read nothing for 0.2 s" in caplog.text
        assert client.complete("Hi", max_tokens=2).status == 200


def test_an_open_request_too_many_is_429(monkeypatch: pytest.MonkeyPatch, client: Client) -> None:
    monkeypatch.setattr(middleware, "MAX_OPEN_REQUESTS", 0)
    answer = client.get("/v1/models")
    assert (answer.status, answer.error["code"]) == (429, "too_many_requests")
    assert answer.headers["retry-after"] == "1"
    # Who looks after a busy server must not take it for a dead one.
    assert [client.get(path).status for path in ("/health", "/ready")] == [200, 200]


def test_a_comment_that_no_client_reads_ends_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "PING_S", 0.01)
    monkeypatch.setattr(transfer, "SEND_TIMEOUT_S", 0.05)
    ended = asyncio.Event()

    async def silence() -> AsyncIterator[Any]:
        await asyncio.Event().wait()
        yield {}

    async def close() -> None:
        ended.set()

    async def nothing() -> Any:
        await asyncio.Event().wait()

    async def stuck(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def stream() -> None:
        await transfer.EventStream(silence(), close)({"type": "http"}, nothing, stuck)

    asyncio.run(asyncio.wait_for(stream(), PATIENCE_S))
    assert ended.is_set()


def test_without_a_tokenizer_token_ids_go_in_and_out() -> None:
    with serving(fake_front(tokenizer=False)) as client:
        answer = client.complete([5, 6, 7], max_tokens=5, logprobs=1, echo=True)
        (choice,) = answer.json["choices"]
        assert choice["token_ids"] == [5, 6, 7]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"][:3] == ["token_id:5", "token_id:6", "token_id:7"]
        streamed = client.complete([5, 6, 7], max_tokens=5, stream=True).events
        assert [i for chunk in streamed for i in chunk["choices"][0]["token_ids"]] == [5, 6, 7]
        assert client.complete("text").error["param"] == "prompt"
        assert client.chat("text").error["code"] == "bad_template"


@pytest.mark.parametrize("value", [-math.inf, math.nan, -1e300, 0.0, 0.5, -1.5])
def test_logprobs_are_always_json(value: float) -> None:
    assert -9999.0 <= finite(value) <= 0
    assert TextLogprob("a", 1, b"a", value).logprob is value


def test_impossible_alternatives_have_the_least_log_probability(client: Client) -> None:
    top = client.complete("a", max_tokens=1, logprobs=20).json["choices"][0]["logprobs"]["top_logprobs"][0]
    assert -9999.0 in top.values()
    assert len(top) == 20


def test_a_character_in_several_tokens_is_never_torn(client: Client) -> None:
    text = "né漢🙂e"
    chunks = client.complete(text, stream=True).events
    said = [chunk["choices"][0]["text"] for chunk in chunks]
    assert "".join(said) == text
    assert not any("�" in piece for piece in said)
    assert client.complete(text, max_tokens=2).json["choices"][0]["text"] == "n�"
    content = client.chat(text, logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert len(content) == len(text.encode())
    assert bytes(b for one in content for b in one["bytes"]).decode() == text
    lists = client.complete("é", logprobs=0).json["choices"][0]["logprobs"]
    assert lists["tokens"] == ["bytes:\\xc3", "bytes:\\xa9"]


def test_n_choices_differ(client: Client) -> None:
    said = [choice["message"]["content"] for choice in client.chat("abc", n=3).json["choices"]]
    assert said == ["abc", "bca", "cab"]


def test_min_tokens_and_ignore_eos_keep_the_end_away(client: Client) -> None:
    assert client.complete("ab", ignore_eos=True, max_tokens=5).json["choices"][0]["text"] == "ababa"
    short = client.complete("ab", stop=["b"], min_tokens=3, ignore_eos=True, max_tokens=9).json["choices"][0]
    assert short["text"] == "aba"


def test_special_tokens_are_shown_if_requested(client: Client) -> None:
    asked: Any = {"echo": True, "max_tokens": 1}
    ids = [256, 72, 105]
    assert client.complete(ids, **asked).json["choices"][0]["text"] == "HiH"
    shown = client.complete(ids, skip_special_tokens=False, **asked).json["choices"][0]["text"]
    assert shown == "<bos>HiH"


def test_an_empty_answer_is_an_empty_text(client: Client) -> None:
    answer = client.chat("x", stop="x").json
    assert answer["choices"][0]["message"]["content"] == ""
    assert answer["choices"][0]["finish_reason"] == "stop"
