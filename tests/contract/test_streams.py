"""The wire contract of streams: framing, connections, errors before and after the first byte."""

from __future__ import annotations

import http.client
import json
import socket
from typing import Any

import pytest

BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


def body(path: str, text: str = "Hello there", **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {"temperature": 0, "max_tokens": 8, **asked, **more}


@BOTH
def test_a_stream_is_declared_as_one(client: Any, path: str) -> None:
    answer = client.post(path, body(path, stream=True))
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-length" not in answer.headers
    assert "content-encoding" not in answer.headers


@BOTH
def test_every_event_is_one_data_line_and_the_last_is_done(client: Any, path: str) -> None:
    answer = client.post(path, body(path, "a\nb\r\n\n é", stream=True))
    assert answer.events
    assert answer.body.count(b"[DONE]") == 1
    assert b"event:" not in answer.body
    assert b"\r" not in answer.body


@BOTH
def test_a_connection_serves_again_after_a_stream(client: Any, path: str) -> None:
    connection = http.client.HTTPConnection(*client.address, timeout=60)
    for _ in range(3):
        raw = json.dumps(body(path, stream=True))
        connection.request("POST", path, raw, {"Content-Type": "application/json"})
        response = connection.getresponse()
        assert response.read().endswith(b"data: [DONE]\n\n")
        used = connection.sock
    assert used is connection.sock
    connection.close()


@BOTH
def test_an_error_before_the_first_byte_is_not_a_stream(client: Any, path: str) -> None:
    answer = client.post(path, body(path, stream=True, temperature=-1))
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["param"] == "temperature"


@BOTH
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_a_wrong_method_says_which_is_right(client: Any, path: str, method: str) -> None:
    answer = client.request(method, path)
    assert answer.status == 405
    assert answer.headers["allow"] == "POST"
    if method != "HEAD":
        assert answer.error["code"] == "method_not_allowed"


@BOTH
def test_usage_comes_once_before_done_if_asked_for(client: Any, path: str) -> None:
    *chunks, last = client.post(path, body(path, stream=True, stream_options={"include_usage": True})).events
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    whole = client.post(path, body(path)).json["usage"]
    assert {**usage, "prompt_tokens_details": 0} == {**whole, "prompt_tokens_details": 0}


@BOTH
def test_usage_does_not_come_unasked(client: Any, path: str) -> None:
    assert all("usage" not in chunk for chunk in client.post(path, body(path, stream=True)).events)


@BOTH
def test_stream_options_need_a_stream(client: Any, path: str) -> None:
    answer = client.post(path, body(path, stream_options={"include_usage": True}))
    assert answer.status == 400
    assert answer.error["param"] == "stream_options"


@BOTH
@pytest.mark.parametrize("n", [1, 3])
def test_the_head_of_every_chunk_is_the_same(client: Any, path: str, n: int) -> None:
    asked = body(path, stream=True, n=n, stream_options={"include_usage": True}, temperature=1, seed=5)
    chunks = client.post(path, asked).events
    heads = {(c["id"], c["created"], c["model"], c["object"], c["system_fingerprint"]) for c in chunks}
    assert len(heads) == 1
    kind = "chat.completion.chunk" if "chat" in path else "text_completion"
    assert {c["object"] for c in chunks} == {kind}
    finals = [c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["finish_reason"]]
    assert sorted(choice["index"] for choice in finals) == list(range(n))


@BOTH
def test_http_1_0_gets_a_stream_and_a_closed_connection(client: Any, path: str) -> None:
    raw = json.dumps(body(path, stream=True)).encode()
    head = f"POST {path} HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}\r\n\r\n"
    with socket.create_connection(client.address, timeout=60) as sock:
        sock.sendall(head.encode() + raw)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    headers, _, events = answer.partition(b"\r\n\r\n")
    assert b"200" in headers.splitlines()[0]
    assert b"chunked" not in headers
    assert events.endswith(b"data: [DONE]\n\n")
