"""Hostile requests: an answer that reports what is wrong, in time, and a server that goes on.

The rows of the table of hostile inputs (6.2 of the contract), and inputs that have taken other servers down.
"""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.contract.wire import Answer, Client

PATIENCE_S = 60.0  # far more than any refusal takes; a hang is what is looked for
PATHS = ("/v1/completions", "/v1/chat/completions")


@pytest.fixture(autouse=True)
def still_serving(client: Client) -> Iterator[None]:
    """After each test: healthy, and the same text as ever."""
    yield
    assert client.get("/health").status == 200
    assert client.complete("Hello", max_tokens=2).status == 200


def refused(client: Client, path: str, body: Any, *statuses: int) -> Answer:
    started = time.monotonic()
    answer = client.post(path, body)
    assert time.monotonic() - started < PATIENCE_S
    assert answer.status in (statuses or (400,)), answer.body[:500]
    assert answer.error["message"]
    assert len(answer.body) < 10_000, "an error repeats what was sent"
    return answer


def asked(path: str, **more: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Hi"}]} if "chat" in path else {"prompt": "Hi"}
    return {**body, "max_tokens": 2, **more}


BAD_JSON = {
    "half": b'{"prompt": "a',
    "not UTF-8": b'{"prompt": "\xff\xfe\xc3("}',
    "lone surrogate": b'{"prompt": "\\ud800"}',
    "5,000 digits": b'{"prompt": "a", "seed": ' + b"7" * 5000 + b"}",
    "NaN": b'{"prompt": "a", "temperature": NaN}',
    "infinity": b'{"prompt": "a", "temperature": -Infinity}',
    "100,000 levels": b'{"prompt": ' + b"[" * 100_000,
    "100,000 objects": b'{"prompt": ' + b'{"a":' * 100_000,
    "5,000 levels": b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    "NUL in a key": b'{"pro\x00mpt": "a"}',
}


@pytest.mark.parametrize("name", BAD_JSON)
@pytest.mark.parametrize("path", [*PATHS, "/tokenize"])
def test_bad_json_is_400(client: Client, path: str, name: str) -> None:
    refused(client, path, BAD_JSON[name])


def test_a_body_of_100_mb_is_413(client: Client) -> None:
    """Announced or not, and the connection is closed."""
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    for how in (b"Content-Length: 100000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n"):
        with socket.create_connection(client.address, timeout=60) as sock:
            sock.sendall(head + how)
            answer = b""
            piece = (b"100000\r\n" if b"chunked" in how else b"") + b" " * 0x100000
            with contextlib.suppress(ConnectionError):
                for _ in range(100):
                    sock.sendall(piece + (b"\r\n" if b"chunked" in how else b""))
            with contextlib.suppress(ConnectionError):
                while got := sock.recv(65536):
                    answer += got
            assert not answer or answer.startswith(b"HTTP/1.1 413 ")


@pytest.mark.parametrize("kind", ["one header of 1 MB", "100,000 headers"])
def test_headers_without_end_are_refused(client: Client, kind: str) -> None:
    """400 or 431, and the connection is closed, because nothing has to keep what is sent after that."""
    headers = b"X: " + b"x" * 1_000_000 if kind.startswith("one") else b"X-%d: y\r\n" * 100_000
    with socket.create_connection(client.address, timeout=60) as sock:
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n" + headers + b"\r\n\r\n")
        with contextlib.suppress(ConnectionError):
            while got := sock.recv(65536):
                answer += got
    assert not answer or answer.split()[1] in {b"400", b"431"}


TOO_MANY: dict[str, dict[str, Any]] = {
    "stop strings": {"stop": ["x"] * 10_000},
    "stop tokens": {"stop_token_ids": [1] * 20_000},
    "biases": {"logit_bias": {str(i): 1 for i in range(20_000)}},
    "choices": {"n": 10**9},
    "a choice more than can be": {"n": 129},
    "ranked choices": {"best_of": 10**9},
    "huge integers": {"n": 10**40},
    "negative": {"n": -1},
    "tokens by 10^30": {"max_tokens": 10**30},
    "fewest by 10^30": {"min_tokens": 10**30},
    "fewest more than most": {"min_tokens": 5, "max_tokens": 2},
    "priority": {"priority": 10**12},
    "salt": {"cache_salt": "x" * 100_000},
    "wrong salt": {"cache_salt": {"a": 1}},
    "stop string": {"stop": "x" * 1_000_000},
}


@pytest.mark.parametrize("name", TOO_MANY)
@pytest.mark.parametrize("path", PATHS)
def test_counts_are_bounded_before_any_work(client: Client, path: str, name: str) -> None:
    """Point 48 among others; extreme max_tokens, extreme n and best_of."""
    refused(client, path, asked(path, **TOO_MANY[name]))


@pytest.mark.parametrize("value", [2**31, 2**63 - 1, 2**63, 2**64])
def test_any_number_of_tokens_may_be_requested(client: Client, value: int) -> None:
    """Extreme max_tokens: clamped to the context, or refused."""
    stop = [*"aeiou ,.", "th"]
    answer = client.complete("Hi", max_tokens=value, stop=stop)
    assert answer.status in {200, 400}


def test_the_product_of_prompts_and_choices_is_bounded(client: Client) -> None:
    refused(client, "/v1/completions", {"prompt": ["x"] * 1000, "n": 100, "max_tokens": 1})


@pytest.mark.parametrize("number", [20_000, pytest.param(250_000, marks=pytest.mark.slow)])
def test_too_many_messages_are_refused(client: Client, number: int) -> None:
    body = b'{"messages": [' + b'{"role":"user","content":""},' * number + b'{"role":"user"}]}'
    refused(client, "/v1/chat/completions", body, 400, 413)


@pytest.mark.parametrize("number", [10_000, pytest.param(100_000, marks=pytest.mark.slow)])
def test_too_many_tools_are_refused(client: Client, number: int) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    refused(client, "/v1/chat/completions", asked("chat", tools=[tool] * number), 400, 413)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("top", [-1, 21, 10**9, 10**30, "5", 1.5, [1]])
def test_more_alternatives_than_there_are_is_400(client: Client, path: str, top: Any) -> None:
    more = {"logprobs": True, "top_logprobs": top} if "chat" in path else {"logprobs": top}
    refused(client, path, asked(path, **more))


NESTED: Any = {"type": "string"}
for _ in range(20):
    NESTED = {"type": "object", "properties": {"a": NESTED}, "required": ["a"]}
DEEP = b'{"type":"object","properties":{"a":' * 2500 + b'{"type":"string"}' + b"}}" * 2500
BAD_SCHEMAS: dict[str, Any] = {
    "unknown type": {"type": "sound"},
    "type is a number": {"type": 5},
    "wrong regex": {"type": "string", "pattern": "(("},
    "properties is text": {"type": "object", "properties": "a"},
    "reference to nothing": {"$ref": "#/$defs/nothing"},
    "reference away": {"$ref": "https://example.com/schema.json"},
    "reference to a file": {"$ref": "file:///etc/passwd"},
    "endless": {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
    "nothing allowed": False,
    "bomb": {"type": "string", "pattern": "(a{1,5000}){1,5000}"},
    "many": {"anyOf": [{"const": f"{i}" * 50} for i in range(5000)]},
    "text": "object",
}


@pytest.mark.parametrize("name", BAD_SCHEMAS)
def test_a_bad_schema_is_refused_or_obeyed(client: Client, name: str) -> None:
    """Point 54. 400 with the reason, or a reply it holds for; never 200 and free text."""
    told = {"type": "json_schema", "json_schema": {"name": "x", "schema": BAD_SCHEMAS[name]}}
    started = time.monotonic()
    answer = client.chat(response_format=told, max_tokens=24)
    assert time.monotonic() - started < PATIENCE_S
    assert answer.status in {200, 400}, answer.body
    if answer.status == 400:
        assert answer.error["param"].startswith("response_format")
    else:
        assert name in {"endless", "bomb", "many"}
        content = answer.json["choices"][0]["message"]["content"]
        assert answer.json["choices"][0]["finish_reason"] == "length" or json.loads(content) is not None


@pytest.mark.parametrize(
    "told",
    [{}, {"type": "sound"}, {"type": "json_schema"}, "json", 5, {"type": "json_schema", "json_schema": {}}],
)
def test_a_response_format_that_is_none_is_refused(client: Client, told: Any) -> None:
    """Point 54."""
    assert client.chat(response_format=told).status == 400


def test_a_schema_of_5000_levels_is_refused(client: Client) -> None:
    body = (
        b'{"messages":[{"role":"user","content":"x"}],"response_format":'
        b'{"type":"json_schema","json_schema":{"name":"x","schema":' + DEEP + b"}}}"
    )
    refused(client, "/v1/chat/completions", body)


@pytest.mark.parametrize(
    "pattern", ["((", "[", "(?<=a)b\\1", "(a{1,5000}){1,5000}", "a{1000000000}", "\ud7ff*" * 999]
)
@pytest.mark.parametrize("field", ["guided_regex", "structured_outputs"])
def test_a_bad_regex_is_refused(client: Client, pattern: str, field: str) -> None:
    """400, or a reply; a bomb is compiled within its bounds or not at all."""
    value = pattern if field == "guided_regex" else {"regex": pattern}
    started = time.monotonic()
    answer = client.chat(max_tokens=4, **{field: value})
    assert time.monotonic() - started < PATIENCE_S
    assert answer.status in {200, 400}, answer.body
    if pattern in {"((", "["}:
        assert answer.status == 400


@pytest.mark.parametrize(
    "tool",
    [
        5,
        {},
        {"type": "function"},
        {"type": "function", "function": {}},
        {"type": "function", "function": {"name": ""}},
        {"type": "function", "function": {"name": 5}},
        {"type": "function", "function": {"name": "f", "parameters": "x"}},
        {"type": "function", "function": {"name": "f", "parameters": {"type": "sound"}}},
        {"type": "function", "function": {"name": "a b\n<tool_call>", "parameters": {}}},
        {"type": "browser"},
    ],
)
def test_a_bad_tool_is_refused(client: Client, tool: Any) -> None:
    answer = client.chat(tools=[tool], tool_choice="required", max_tokens=2)
    assert answer.status == 400
    assert answer.error["param"].startswith("tool")


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" * 2000,
        "<tool_call>{" + '"a":{' * 1500,
        "<tool_call>" + "\\" * 8000,
        "[TOOL_CALLS][" * 800 + "<|python_tag|>" * 300,
        "```json\n" * 1500,
        '{"name": "' + "\\u00" * 2000,
        "a" * 10_000 + "!",
    ],
)
def test_text_that_makes_parsers_go_back_costs_no_time(client: Client, text: str) -> None:
    """Backtracking bombs for parsers of calls and of JSON, as text of an assistant in the history."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": text}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": text, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "a", "content": text},
        {"role": "user", "content": "y"},
    ]
    started = time.monotonic()
    answer = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert time.monotonic() - started < PATIENCE_S
    assert answer.status in {200, 400}, answer.body
    if answer.status == 400:
        assert answer.error["message"]


@pytest.mark.parametrize(
    "extra",
    [
        {"chat_template": "{{ cycler.__init__.__globals__ }}"},
        {"chat_template_kwargs": {"messages": [{"role": "user", "content": "other"}]}},
        {"chat_template_kwargs": {"chat_template": "x"}},
        {"chat_template_kwargs": {"tools": []}},
        {"chat_template_kwargs": {"tokenize": False}},
        {"chat_template_kwargs": [1]},
    ],
)
def test_no_request_brings_a_template(client: Client, extra: dict[str, Any]) -> None:
    assert client.chat(max_tokens=1, **extra).status == 400


def test_a_template_in_a_message_is_text(client: Client) -> None:
    text = "{{ 7 * 7 }}{% for i in range(10**9) %}x{% endfor %}"
    counts = [
        client.post("/tokenize", {"messages": [{"role": "user", "content": content}]}).json["count"]
        for content in (text, "")
    ]
    plain = client.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json["count"]
    assert abs(counts[0] - counts[1] - plain) <= 2


@pytest.mark.parametrize(
    "name",
    ["../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "a\x00b", "", "x" * 100_000, "http://a/b"],
)
@pytest.mark.parametrize("path", PATHS)
def test_models_are_names_and_not_places(client: Client, path: str, name: str) -> None:
    """Point 56."""
    answer = refused(client, path, asked(path, model=name), 400, 404)
    assert answer.error["param"] == "model"


@pytest.mark.parametrize(
    "path", ["/v1/models/..%2f..%2fetc%2fpasswd", "/page/../../run.py", "/page/%2e%2e/run.py"]
)
def test_paths_lead_nowhere_else(client: Client, path: str) -> None:
    assert client.get(path).status == 404


@pytest.mark.parametrize(
    "extra", [{"lora_path": "/etc"}, {"adapters": ["/etc/passwd"]}, {"lora": [{"id": 0}]}]
)
def test_no_request_brings_weights(client: Client, extra: dict[str, Any]) -> None:
    """Refused, or not read and reported."""
    answer = client.complete(max_tokens=1, **extra)
    assert answer.status == 400 or next(iter(extra)) in answer.headers["x-plait-ignored"]


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "image"])
def test_nothing_is_fetched(client: Client, kind: str) -> None:
    part = {"type": kind, kind: {"url": "http://127.0.0.1:1/a.png"}}
    answer = client.chat([part])
    assert answer.status == 400
    assert answer.error["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("name", ["a\r\nSet-Cookie: x=1", "\x1b[31m", "é" * 100, "x" * 5000])
def test_names_of_fields_reach_no_header_or_log_as_they_are(client: Client, name: str) -> None:
    answer = client.complete(max_tokens=1, **{name: 1})
    assert answer.status == 200
    assert "set-cookie" not in answer.headers
    assert len(answer.headers["x-plait-ignored"]) < 200
    assert answer.headers["x-plait-ignored"].isascii()


@pytest.mark.parametrize("host", ["evil.example", "127.0.0.1.evil.example", "localhost.evil.example:8080"])
def test_other_names_do_not_lead_to_a_local_server(client: Client, host: str) -> None:
    """DNS rebinding."""
    if not client.address[0].startswith(("127.", "localhost")):
        pytest.skip("this server is for the network")
    answer = client.request("GET", "/v1/models", headers={"Host": host})
    assert answer.status in {400, 403, 421}
    assert answer.error["message"]


def test_a_form_of_a_web_page_reaches_nothing(client: Client) -> None:
    """Cross-site requests: what a page may send without asking first is no JSON."""
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        answer = client.post(
            "/v1/completions", {"prompt": "a"}, Content_Type=kind, Origin="http://evil.example"
        )
        assert answer.status in {403, 415}
        assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100,
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 50,
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: ::1\r\nContent-Length: 1\r\ncontent-length: 2\r\n\r\na",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET /health HTTP/1.1\r\nHost: localhost\r\nHost: other\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
)
def test_what_is_not_http_is_400_and_closed(client: Client, data: bytes) -> None:
    with socket.create_connection(client.address, timeout=30) as sock:
        answer = b""
        with contextlib.suppress(ConnectionError):
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            while got := sock.recv(65536):
                answer += got
    assert not answer or int(answer.split()[1]) < 500
