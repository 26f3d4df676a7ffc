"""Errors, paths, bodies, connections and models: what every route shares."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from openai import BadRequestError, OpenAI


def test_a_prompt_that_is_too_long_is_refused_with_both_numbers(client: Any) -> None:
    """Point 57."""
    limit = client.get("/v1/models").json["data"][0]["max_model_len"]
    ids = client.post("/tokenize", {"prompt": "Hello"}).json["tokens"][-1:] * (limit + 7)
    answer = client.complete(ids)
    assert answer.status == 400
    assert answer.error["code"] == "context_length_exceeded"
    assert str(limit) in answer.error["message"]
    assert str(limit + 7) in answer.error["message"]


def test_models_are_listed_and_found(client: Any, openai: OpenAI) -> None:
    """Point 69."""
    first, second = client.get("/v1/models").json, client.get("/v1/models").json
    assert first == second
    assert first["object"] == "list"
    (card,) = first["data"]
    assert card["object"] == "model"
    assert isinstance(card["created"], int)
    assert {"id", "owned_by", "max_model_len"} <= set(card)
    assert openai.models.retrieve(card["id"]).id == card["id"]
    missing = client.get("/v1/models/nobody")
    assert missing.status == 404
    assert missing.error["code"] == "model_not_found"


def test_an_unknown_model_is_404_and_none_is_the_served_one(client: Any) -> None:
    """Points 19 and 56."""
    answer = client.complete(model="nobody")
    assert (answer.status, answer.error["code"], answer.error["param"]) == (404, "model_not_found", "model")
    assert client.complete(max_tokens=1).json["model"] == client.model
    assert client.complete(max_tokens=1, model=client.model).json["model"] == client.model
    assert client.complete(model=5).status == 400


@pytest.mark.parametrize("path", ["/v1", "/v1/nothing", "/v1/completions/x", "/../etc/passwd", "/%00"])
def test_an_unknown_path_is_404_in_json(client: Any, path: str) -> None:
    """Points 6 and 55."""
    answer = client.get(path)
    assert answer.status == 404
    assert answer.error["code"] == "not_found"


@pytest.mark.parametrize("path", ["/v1/completions/", "//v1//completions", "/v1/completions//"])
def test_slashes_do_not_matter(client: Any, path: str) -> None:
    """Point 66."""
    assert client.post(path, {"prompt": "Hi", "max_tokens": 1}).status == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"  ",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"5",
        b"\xff\xfe",
        b'{"prompt": "\\ud800"}',
        b'{"prompt": NaN}',
        b'{"prompt": "a", "temperature": 1e400}',
        b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
        b'{"prompt": "a"} {}',
    ],
)
def test_a_body_that_is_no_object_is_400(client: Any, body: bytes) -> None:
    """Point 58."""
    answer = client.post("/v1/completions", body)
    assert answer.status == 400
    assert answer.error["code"] in {"invalid_body", "invalid_value"}


def test_brackets_in_strings_are_not_depth(client: Any) -> None:
    """Point 58."""
    assert client.post("/tokenize", {"prompt": '[{"' * 200 + "\\"}).status == 200


@pytest.mark.parametrize(
    "kind", ["text/plain", "", "application/x-www-form-urlencoded", "multipart/form-data"]
)
def test_a_body_of_another_type_is_415(client: Any, kind: str) -> None:
    """Point 58."""
    answer = client.post("/v1/completions", {"prompt": "a"}, Content_Type=kind)
    assert answer.status == 415
    assert "curl: -H 'Content-Type: application/json'" in answer.error["message"]


def test_a_compressed_body_is_415(client: Any) -> None:
    """Point 58."""
    assert client.post("/v1/completions", {"prompt": "a"}, Content_Encoding="gzip").status == 415


def test_request_ids_are_echoed_if_sane(client: Any) -> None:
    """Point 65."""
    assert client.complete(max_tokens=1).headers["x-request-id"].startswith("req-")
    body = {"prompt": "a", "max_tokens": 1}
    assert client.post("/v1/completions", body, X_Request_Id="abc-1.2").headers["x-request-id"] == "abc-1.2"
    odd = client.post("/v1/completions", body, X_Request_Id="a b<script>")
    assert odd.headers["x-request-id"].startswith("req-")
    assert client.get("/nothing").headers["x-request-id"]


def raw_exchange(address: tuple[str, int], data: bytes) -> bytes:
    with socket.create_connection(address, timeout=60) as sock:
        sock.sendall(data)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    return answer


BODY = b'{"prompt": "Hi", "max_tokens": 1}'


HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


def test_expect_continue_works(client: Any) -> None:
    """Point 67."""
    more = b"Expect: 100-continue\r\nConnection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    answer = raw_exchange(client.address, HEAD + more + BODY)
    assert answer.startswith(b"HTTP/1.1 100 ")
    assert b"HTTP/1.1 200 " in answer


def test_a_chunked_body_works(client: Any) -> None:
    """Point 67."""
    chunks = b"".join(b"%x\r\n%s\r\n" % (1, bytes([b])) for b in BODY) + b"0\r\n\r\n"
    more = b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n"
    assert raw_exchange(client.address, HEAD + more + chunks).startswith(b"HTTP/1.1 200 ")


def test_pipelined_requests_are_answered_in_order(client: Any) -> None:
    """Point 67."""
    length = b"Content-Length: %d\r\n" % len(BODY)
    first = HEAD + b"X-Request-Id: first\r\n" + length + b"\r\n" + BODY
    second = HEAD + b"X-Request-Id: second\r\nConnection: close\r\n" + length + b"\r\n" + BODY
    answer = raw_exchange(client.address, first + second)
    assert answer.count(b"HTTP/1.1 200 ") == 2
    assert answer.index(b"x-request-id: first") < answer.index(b"x-request-id: second")


def test_http_1_0_without_a_host_works(client: Any) -> None:
    """Point 67."""
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    assert b" 200 " in raw_exchange(client.address, head % len(BODY) + BODY).splitlines()[0]


def test_tokenize_and_detokenize_are_inverse(client: Any) -> None:
    found = client.post("/tokenize", {"prompt": "née 漢字", "add_special_tokens": False}).json
    assert found["count"] == len(found["tokens"])
    assert client.post("/detokenize", {"tokens": found["tokens"]}).json["prompt"].strip() == "née 漢字"
    assert client.post("/detokenize", {"tokens": [-1]}).error["param"] == "tokens"
    assert client.post("/tokenize", {}).error["param"] == "prompt"


def test_many_clients_at_once_are_all_served(client: Any) -> None:
    """Point 50."""
    with ThreadPoolExecutor(12) as pool:
        found = list(pool.map(lambda i: client.complete(f"Count {i}", max_tokens=3).status, range(24)))
    assert found == [200] * 24


def test_the_openai_client_says_bad_request_for_a_prompt_that_is_too_long(
    openai: OpenAI, client: Any
) -> None:
    """Point 57."""
    limit = client.get("/v1/models").json["data"][0]["max_model_len"]
    with pytest.raises(BadRequestError) as refused:
        openai.completions.create(model=client.model, prompt=[1] * (limit + 1))
    assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
@pytest.mark.parametrize("body", [b"", b"[]", b"{", b'{"model": 1}', b'{"model": "nobody"}', b"{}"])
def test_every_error_has_all_four_keys(client: Any, path: str, body: bytes) -> None:
    """Point 55."""
    answer = client.post(path, body)
    assert 400 <= answer.status < 500
    assert answer.error["message"]
    assert answer.headers["content-type"] == "application/json"


def test_a_body_over_the_limit_is_refused_before_it_comes(client: Any) -> None:
    """Point 58. By its length alone."""
    more = b"Expect: 100-continue\r\nContent-Length: 100000000000\r\n\r\n"
    with socket.create_connection(client.address, timeout=20) as sock:
        sock.sendall(HEAD + more)
        assert sock.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_models_do_not_change_between_calls(client: Any) -> None:
    """Point 69."""
    cards = [client.get("/v1/models").json["data"][0] for _ in range(3)]
    assert cards[0] == cards[1] == cards[2]


def test_the_fingerprint_does_not_change(client: Any) -> None:
    """Point 23. A string or null, the same in both modes."""
    whole = {client.chat(max_tokens=1).json["system_fingerprint"] for _ in range(2)}
    streamed = {event["system_fingerprint"] for event in client.chat(max_tokens=1, stream=True).events}
    assert whole == streamed
    assert len(whole) == 1
