"""Hosts, paths and bodies at their bounds; and whatever a client may send."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import string
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.errors import InvalidField
from plait.server.api.parse_fields import AS_MANY_AS_FIT, field_names, present
from plait.server.api.schema import ChatRequest, CompletionRequest
from plait.server.gateway.middleware import one_spelling
from plait.server.http import connection, transfer
from plait.server.http.errors import BadBody, problem
from plait.server.http.hosts import host_name, is_loopback
from plait.server.http.transfer import MAX_DEPTH, decode_object
from tests.server.conftest import Client, serving
from tests.server.fake import fake_front

LIMIT = 2000


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost", 200),
        ("LOCALHOST:8080", 200),
        ("127.0.0.1:1", 200),
        ("127.3.2.1", 200),
        ("[::1]:80", 200),
        ("testserver", 200),
        ("evil.example", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("10.0.0.1:8080", 403),
        ("[::2]", 403),
    ],
)
def test_only_local_hosts_reach_a_local_server(client: Client, host: str, status: int) -> None:
    answer = client.request("GET", "/health", headers={"Host": host})
    assert answer.status == status
    if status == 403:
        assert answer.error["code"] == "host_not_allowed"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        (b"HTTP/1.1\r\n", b"400"),
        (b"HTTP/1.1\r\nHost:\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: \t \r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost\r\nhost: evil.example\r\n", b"400"),
        (b"HTTP/1.1\r\nHost: localhost\r\n", b"200"),
        (b"HTTP/1.0\r\n", b"200"),
        (b"HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n", b"400"),
    ],
)
@pytest.mark.parametrize("path", [b"/health", b"/version"])
def test_a_request_has_one_host(client: Client, path: bytes, head: bytes, status: bytes) -> None:
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(b"GET " + path + b" " + head + b"Connection: close\r\n\r\n")
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert answer.split()[1] == status
    assert (b'"code":"invalid_host"' in answer) == (status == b"400")


def test_a_server_for_the_network_answers_to_any_host() -> None:
    with serving(fake_front(), host="0.0.0.0") as client:
        address = Client(client.base_url.replace("0.0.0.0", "127.0.0.1"))
        assert address.request("GET", "/health", headers={"Host": "anything.example"}).status == 200


@pytest.mark.parametrize(
    ("path", "expected"), [("/", "/"), ("//", "/"), ("/a/", "/a"), ("//a///b//", "/a/b"), ("", "/")]
)
def test_paths_have_one_spelling(path: str, expected: str) -> None:
    assert one_spelling(path) == expected


def test_paths_without_v1_are_the_same_paths(client: Client) -> None:
    assert client.get("/models").json == client.get("/v1/models").json
    assert client.get("/models/fake").json["id"] == "fake"
    asked = {"max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
    for path in ("/chat/completions", "/messages", "/messages/count_tokens"):
        assert client.post(path, asked).status == 200, path
    for path in ("/responses", "/responses/input_tokens", "/embeddings"):
        assert client.post(path, {"input": "Hi"}).status == 200, path
    assert client.post("/completions", {"prompt": "Hi", "stream": True}).events
    assert client.post("/messages", {}).json["type"] == "error"  # in that API's own words


def test_an_unknown_path_is_answered_with_those_of_the_apis(client: Client) -> None:
    for path in ("/v2/chat", "/v1/chat", "/model"):
        answer = client.post(path, {})
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        for known in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            assert known in answer.error["message"]


def test_host_names_are_read_without_ports() -> None:
    assert [host_name(h) for h in ("A:1", "[::1]:80", "::1", "a")] == ["a", "::1", "::1", "a"]
    assert not is_loopback("0.0.0.0")
    assert not is_loopback("localhost.")


def sized(size: int) -> bytes:
    frame = len(json.dumps({"prompt": "", "max_tokens": 1}))
    return json.dumps({"prompt": "x" * (size - frame), "max_tokens": 1}).encode()


def test_the_largest_body_is_taken_and_one_byte_more_is_413() -> None:
    with serving(fake_front(), max_body_bytes=LIMIT) as client:
        assert client.post("/v1/completions", sized(LIMIT)).status == 200
        answer = client.post("/v1/completions", sized(LIMIT + 1))
        assert answer.status == 413
        assert str(LIMIT) in answer.error["message"]
        assert answer.headers["connection"] == "close"


def test_a_body_without_a_length_is_bounded_too() -> None:
    with serving(fake_front(), max_body_bytes=LIMIT) as client:
        sending = http.client.HTTPConnection(*client.address, timeout=20)
        chunks = (b"x" * 1000 for _ in range(400))
        headers = {"Content-Type": "application/json"}
        sending.request("POST", "/v1/completions", chunks, headers, encode_chunked=True)
        assert sending.getresponse().status == 413
        sending.close()


def test_a_body_that_is_too_long_is_refused_before_it_comes() -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    with (
        serving(fake_front(), max_body_bytes=LIMIT) as client,
        socket.create_connection(client.address, timeout=20) as sock,
    ):
        sock.sendall(head + b"Expect: 100-continue\r\nContent-Length: 100000000\r\n\r\n")
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_large_body_gets_its_answer_although_it_is_not_read() -> None:
    with serving(fake_front(), max_body_bytes=LIMIT) as client:
        assert client.post("/v1/completions", b"x" * 20_000_000).status == 413


def test_a_body_that_stops_coming_is_408(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "BODY_TIMEOUT_S", 0.1)
    with socket.create_connection(client.address, timeout=20) as sock:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        sock.sendall(head + b"Content-Length: 99\r\n\r\n{")
        assert sock.recv(4096).startswith(b"HTTP/1.1 408 ")
    assert client.get("/health").status == 200


def test_headers_are_bounded(client: Client) -> None:
    with socket.create_connection(client.address, timeout=20) as sock:
        # Little enough to be read in one piece: closing over unread bytes would reset the connection.
        sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX: " + b"x" * 20_000)
        answer = b"".join(iter(lambda: sock.recv(4096), b""))
    assert answer.startswith(b"HTTP/1.1 431 ")
    assert b'"type":"invalid_request_error"' in answer


@pytest.mark.parametrize(
    "drip", [b"", b"GET /health HTTP/1.1\r\n", b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\nG"]
)
def test_a_head_that_does_not_come_closes_the_connection(
    client: Client, monkeypatch: pytest.MonkeyPatch, drip: bytes
) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.1)
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(drip)
        while sock.recv(4096):
            pass


def test_a_long_answer_is_not_a_late_head(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEAD_TIMEOUT_S", 0.7)
    text = "SLOW" * 20
    assert client.complete(text, max_tokens=len(text)).json["choices"][0]["text"] == text


def test_idle_connections_do_not_keep_others_out(client: Client) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(300):
            sock = stack.enter_context(socket.create_connection(client.address, timeout=20))
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\n")
        assert client.complete("Hi", max_tokens=2).status == 200


def test_a_connection_too_many_is_closed() -> None:
    with serving(fake_front(), max_connections=2) as client, contextlib.ExitStack() as stack:
        first, second, third = (
            stack.enter_context(socket.create_connection(client.address, timeout=20)) for _ in range(3)
        )
        assert third.recv(10) == b""
        for sock in (first, second):
            sock.sendall(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert sock.recv(100).startswith(b"HTTP/1.1 200 ")


def test_depth_is_counted_outside_strings_only() -> None:
    deepest = b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1)
    assert decode_object(b'{"a":' + deepest + b"}")
    with pytest.raises(BadBody, match="deeper"):
        decode_object(b'{"a":[' + deepest + b"]}")
    assert decode_object(json.dumps({"a": '"[{\\' * 500}).encode())
    for number in ("9" * 5000, "1e999"):
        with pytest.raises(BadBody, match=r"a number that no field can take: at most 1\.8e308"):
            decode_object(f'{{"a": {number}}}'.encode())
    with pytest.raises(BadBody):
        decode_object(b'"' + b'\\"' * 500_000 + b"[" * 100)  # linear, or this would take hours


def test_many_small_things_are_read() -> None:
    for many in ([[1]] * 90_000, [1] * 2_000_000):
        assert len(decode_object(json.dumps({"prompt": many}).encode())["prompt"]) == len(many)


def test_null_is_absent_and_aliases_have_one_meaning() -> None:
    assert present({"a": None, "n_predict": 4, "b": 0}) == {"b": 0, "max_tokens": 4}
    assert present({"n_predict": -1}) == {"max_tokens": AS_MANY_AS_FIT}
    with pytest.raises(InvalidField, match="contradicts"):
        present({"repeat_penalty": 1.5, "repetition_penalty": 1.2})


def test_what_is_not_ours_to_tell_is_an_internal_error() -> None:
    found = problem(ZeroDivisionError("the secret"))
    assert found.status == 500
    assert "secret" not in found.message


FIELDS = sorted((field_names(CompletionRequest) | field_names(ChatRequest) | {"tools", "x"}) - {"model"})
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8).filter(lambda s: s.isprintable()),
    st.sampled_from([0, 1, -1, 2**31, 2**63, 2**64, -(2**63) - 1, 10**40, 1e308, "", "user", "role"]),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "65", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "x"]), "content": VALUES},
        optional={"tool_calls": VALUES, "name": VALUES, "tool_call_id": VALUES},
    ),
    max_size=3,
)


def check_hostile(client: Client, path: str, sent: Any) -> None:
    sent = {**sent, "max_tokens": sent.get("max_tokens", 4)}
    answer = client.post(path, sent)
    assert answer.status in {200, 400, 413}, (sent, answer.body)
    if answer.status == 400:
        assert answer.error["message"]
    elif not sent.get("stream"):
        assert answer.json["choices"]


HOSTILE = settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@HOSTILE
@given(st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=4))
def test_no_completion_request_fails_the_server(client: Client, sent: dict[str, Any]) -> None:
    check_hostile(client, "/v1/completions", {"prompt": "Hi", **sent})


@HOSTILE
@given(MESSAGES, st.dictionaries(st.sampled_from(FIELDS), VALUES, max_size=3))
def test_no_chat_request_fails_the_server(client: Client, messages: Any, sent: dict[str, Any]) -> None:
    check_hostile(client, "/v1/chat/completions", {"messages": messages, **sent})


@HOSTILE
@given(st.binary(max_size=60) | st.text(string.printable, max_size=40).map(str.encode))
def test_no_body_fails_the_server(client: Client, sent: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        assert client.post(path, sent).status == 400


@HOSTILE
@given(st.binary(max_size=200))
def test_no_bytes_on_the_wire_fail_the_server(client: Client, sent: bytes) -> None:
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(sent)
        sock.shutdown(socket.SHUT_WR)
        assert b" 500 " not in sock.recv(65536)
    assert client.get("/health").status == 200
