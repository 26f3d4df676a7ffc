"""The wire contract of streams: framing, connections, errors before and after the first byte."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
from typing import Any

import pytest
from openai import APIError, OpenAI

BOTH = pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])


def body(path: str, text: str = "Hello there", **more: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return {"temperature": 0, "max_tokens": 8, **asked, **more}


@BOTH
def test_a_stream_is_declared_as_one(client: Any, path: str) -> None:
    """Point 1."""
    answer = client.post(path, body(path, stream=True))
    assert answer.status == 200
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert "content-length" not in answer.headers
    assert "content-encoding" not in answer.headers


@BOTH
def test_every_event_is_one_data_line_and_the_last_is_done(client: Any, path: str) -> None:
    """Points 2 and 3."""
    answer = client.post(path, body(path, "a\nb\r\n\n é", stream=True))
    assert answer.events
    assert answer.body.count(b"[DONE]") == 1
    assert b"event:" not in answer.body
    assert b"\r" not in answer.body


@BOTH
def test_a_connection_serves_again_after_a_stream(client: Any, path: str) -> None:
    """Point 3."""
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
    """Point 5."""
    answer = client.post(path, body(path, stream=True, temperature=-1))
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.error["param"] == "temperature"


@BOTH
@pytest.mark.parametrize("method", ["GET", "HEAD", "PUT", "DELETE"])
def test_a_wrong_method_says_which_is_right(client: Any, path: str, method: str) -> None:
    """Point 6. Chats that are stored are listed with GET, which this server names an option for."""
    answer = client.request(method, path)
    is_stored = path.endswith("/chat/completions")
    if is_stored and method in ("GET", "HEAD"):
        assert answer.status == 400
        assert method == "HEAD" or "--store" in answer.error["message"]
        return
    assert answer.status == 405
    assert "POST" in answer.headers["allow"]
    if method != "HEAD":
        assert answer.error["code"] == "method_not_allowed"


@BOTH
def test_usage_comes_once_before_done_if_requested(client: Any, path: str) -> None:
    """Point 11."""
    *chunks, last = client.post(path, body(path, stream=True, stream_options={"include_usage": True})).events
    assert all(chunk["usage"] is None and len(chunk["choices"]) == 1 for chunk in chunks)
    assert last["choices"] == []
    usage = last["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    whole = client.post(path, body(path)).json["usage"]
    assert {**usage, "prompt_tokens_details": 0} == {**whole, "prompt_tokens_details": 0}


@BOTH
def test_every_chunk_shows_the_usage_so_far_if_requested(client: Any, path: str) -> None:
    """vLLM's `continuous_usage_stats`, which load generators send."""
    options = {"include_usage": True, "continuous_usage_stats": True}
    *chunks, last = client.post(path, body(path, stream=True, stream_options=options)).events
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts)
    assert counts[0] <= 1 < counts[-1] == last["usage"]["completion_tokens"]
    assert {chunk["usage"]["prompt_tokens"] for chunk in chunks} == {last["usage"]["prompt_tokens"]}


@BOTH
def test_usage_does_not_come_unasked(client: Any, path: str) -> None:
    """Point 11."""
    assert all("usage" not in chunk for chunk in client.post(path, body(path, stream=True)).events)


@BOTH
def test_stream_options_need_a_stream(client: Any, path: str) -> None:
    """Point 12."""
    answer = client.post(path, body(path, stream_options={"include_usage": True}))
    assert answer.status == 400
    assert answer.error["param"] == "stream_options"


@BOTH
@pytest.mark.parametrize("n", [1, 3])
def test_the_head_of_every_chunk_is_the_same(client: Any, path: str, n: int) -> None:
    """Points 8, 10, 14 and 23."""
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
    """Point 67."""
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


@BOTH
def test_headers_come_while_the_reply_is_still_made(client: Any, path: str) -> None:
    """Point 1. Headers do not wait for the text's end, nor for its first token."""
    connection = http.client.HTTPConnection(*client.address, timeout=60)
    with contextlib.closing(connection):
        raw = json.dumps(body(path, stream=True, max_tokens=400, ignore_eos=True))
        connection.request("POST", path, raw, {"Content-Type": "application/json", **client.headers})
        response = connection.getresponse()
        assert response.status == 200
        assert response.fp is not None
        assert b"[DONE]" not in response.fp.peek()


@BOTH
def test_an_error_after_the_first_byte_is_an_event(client: Any, path: str) -> None:
    """Point 5. The error object, then [DONE]; OpenAI's client raises on it."""
    asked = body(path, stream=True, timeout_s=0.15, max_tokens=480, ignore_eos=True, n=4)
    *chunks, last = client.post(path, asked).events
    assert set(last["error"]) == {"message", "type", "param", "code"}
    assert last["error"]["code"] == "deadline_exceeded"
    assert all("choices" in chunk for chunk in chunks)
    del asked["ignore_eos"], asked["timeout_s"]
    more = {"ignore_eos": True, "timeout_s": 0.15}
    with OpenAI(base_url=client.base_url + "/v1", api_key="x", default_headers=client.headers) as openai:
        create: Any = openai.chat.completions.create if "chat" in path else openai.completions.create
        stream = create(model=client.model, **asked, extra_body=more)
        with pytest.raises(APIError, match="timeout_s"):
            list(stream)


@BOTH
def test_pieces_of_choices_are_whole_in_themselves(client: Any, path: str) -> None:
    """Points 13 and 14. Put together by index they are the choices of the whole reply."""
    asked = body(path, n=3, seed=2, temperature=1.2, max_tokens=9)
    said = ["", "", ""]
    for event in client.post(path, {**asked, "stream": True}).events:
        (choice,) = event["choices"]
        said[choice["index"]] += choice["delta"].get("content", "") if "chat" in path else choice["text"]
    whole = client.post(path, asked).json["choices"]
    assert said == [choice["message"]["content"] if "chat" in path else choice["text"] for choice in whole]


@pytest.mark.parametrize("path", ["/", "/nothing", "/v1/chat", "/health", "/v1/models"])
def test_what_cannot_be_posted_to_is_an_error_object(client: Any, path: str) -> None:
    """Point 6. Never HTML."""
    answer = client.post(path, {})
    assert answer.status in {404, 405}
    assert answer.error["message"]
    assert ("allow" in answer.headers) == (answer.status == 405)
