"""Servers with options: keys, a queue that is full, a prefix, web origins. Ours are started for it.

They are not what --base-url names, so these tests run only without it.
"""

from __future__ import annotations

import contextlib
import http.client
import json
from collections.abc import Iterator
from typing import Any

import pytest
from openai import AuthenticationError, OpenAI, RateLimitError

from tests.contract.conftest import option
from tests.contract.wire import Client
from tests.e2e.conftest import NANO_HYBRID, serve
from tests.patience import until

KEY = "sk-open-sesame"
JSON = {"Content-Type": "application/json"}
LONG: dict[str, Any] = {"ignore_eos": True, "max_tokens": 480}
OPTIONS = (
    *("--api-key", KEY, "--served-model-name", "oracle", "--root-path", "/llm"),
    *("--max-num-seqs", "1", "--max-waiting", "2", "--cors-origin", "https://app.example"),
)


@pytest.fixture(scope="module")
def guarded(pytestconfig: pytest.Config) -> Iterator[Client]:
    """A server with a key, capacity for one sequence and a queue of two; the client sends the key."""
    if option(pytestconfig, "--base-url"):
        pytest.skip("about servers with options, which are started here")
    with serve(NANO_HYBRID, *OPTIONS) as server:
        yield Client(server.url, "oracle", {"Authorization": f"Bearer {KEY}"})


@pytest.fixture
def stranger(guarded: Client) -> Client:
    return Client(guarded.base_url, guarded.model)


@pytest.fixture(scope="module")
def base_url(guarded: Client) -> str:
    return guarded.base_url


ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/oracle"),
    ("GET", "/metrics"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/chat/completions"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("POST", "/v1/embeddings"),
    ("GET", "/no/such/path"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "header", ["", "Bearer", "Bearer wrong", f"Basic {KEY}", f"Bearer {KEY} x", "Bearer é"]
)
def test_without_the_key_nothing_is_reported(stranger: Client, method: str, path: str, header: str) -> None:
    """Point 59. Not even which paths and models there are."""
    headers = {"Authorization": header.encode().decode("latin-1")} if header else {}
    answer = stranger.request(method, path, b"{}" if method == "POST" else None, headers)
    assert answer.status == 401
    assert answer.error["code"] == "invalid_api_key"
    assert answer.error["type"] == "authentication_error"
    assert "oracle" not in answer.body.decode()
    assert KEY not in answer.body.decode()


@pytest.mark.parametrize(
    "headers",
    [
        {"Authorization": f"Bearer {KEY}"},
        {"authorization": f"bearer {KEY}"},
        {"x-api-key": KEY},
        {"X-Api-Key": KEY},
    ],
)
def test_the_key_is_taken_from_either_header(stranger: Client, headers: dict[str, str]) -> None:
    """Point 59."""
    assert stranger.request("GET", "/v1/models", headers=headers).status == 200


def test_health_is_open_and_says_little(stranger: Client) -> None:
    """Point 59."""
    answer = stranger.get("/health")
    assert answer.status == 200
    assert answer.json == {"status": "ok"}


def test_a_browsers_question_needs_no_key(stranger: Client) -> None:
    """Point 59. The preflight of a web page with an allowed origin."""
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    for origin, told in (("https://app.example", "https://app.example"), ("https://evil.example", None)):
        answer = stranger.request("OPTIONS", "/v1/chat/completions", headers={"Origin": origin, **asked})
        assert answer.headers.get("access-control-allow-origin") == told
        assert answer.status == (200 if told else 400)


def test_the_openai_client_raises_authentication_errors(guarded: Client) -> None:
    """Point 59."""
    with (
        OpenAI(base_url=guarded.base_url + "/v1", api_key="wrong", max_retries=0) as openai,
        pytest.raises(AuthenticationError) as refused,
    ):
        openai.models.list()
    assert refused.value.code == "invalid_api_key"


def test_the_served_name_is_the_one_that_counts(guarded: Client) -> None:
    """Points 19 and 56."""
    assert guarded.get("/v1/models").json["data"][0]["id"] == "oracle"
    assert guarded.complete(model="oracle", max_tokens=1).json["model"] == "oracle"
    assert guarded.complete(model="nano-hybrid", max_tokens=1).status == 404


@pytest.mark.parametrize("path", ["/llm/v1/completions", "/v1/completions", "//llm//v1/completions/"])
def test_a_prefix_may_be_there(guarded: Client, path: str) -> None:
    """Point 66."""
    answer = guarded.post(path, {"prompt": "Hi", "max_tokens": 1})
    assert answer.status == 200, answer.body


def running(client: Client) -> tuple[int, int]:
    now = client.get("/health").json["engine"]
    return now["num_running"], now["num_waiting"]


@contextlib.contextmanager
def crowded(client: Client) -> Iterator[None]:
    """While one stream runs and two wait, which is the server's whole capacity."""
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            connection = http.client.HTTPConnection(*client.address, timeout=60)
            stack.enter_context(contextlib.closing(connection))
            body = json.dumps({"prompt": "Hi", "stream": True, **LONG})
            connection.request("POST", "/v1/completions", body, {**JSON, **client.headers})
        until(lambda: sum(running(client)) == 3)
        yield


def test_overload_is_429_with_a_time_to_come_back(guarded: Client) -> None:
    """Point 60. And the error class of OpenAI's client for it."""
    until(lambda: running(guarded) == (0, 0))
    with crowded(guarded):
        answer = guarded.complete("One more", max_tokens=1)
        assert answer.status == 429
        assert float(answer.headers["retry-after"]) > 0
        assert answer.error["type"] == "rate_limit_error"
        assert guarded.complete("One more", max_tokens=1, stream=True).status == 429
        with (
            OpenAI(base_url=guarded.base_url + "/v1", api_key=KEY, max_retries=0) as openai,
            pytest.raises(RateLimitError),
        ):
            openai.completions.create(model="oracle", prompt="One more", max_tokens=1)
    until(lambda: running(guarded) == (0, 0))
    assert guarded.complete(max_tokens=1).status == 200


def leave(client: Client, body: dict[str, Any], *, read: bool) -> None:
    connection = http.client.HTTPConnection(*client.address, timeout=60)
    sent = json.dumps({"prompt": "Hi", **LONG, **body})
    connection.request("POST", "/v1/completions", sent, {**JSON, **client.headers})
    if read:
        connection.getresponse().read(10)
    connection.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefill", "decode", "queue"])
def test_who_leaves_is_forgotten_at_once(guarded: Client, phase: str, stream: bool) -> None:
    """Point 68. In the queue, in the prompt, in the reply; streamed or whole."""
    until(lambda: running(guarded) == (0, 0))
    body: dict[str, Any] = {"stream": stream, "n": 1}
    if phase == "prefill":
        body["prompt"] = [5] * 500
        body["max_tokens"] = 10
    if phase == "queue":
        connection = http.client.HTTPConnection(*guarded.address, timeout=60)
        with contextlib.closing(connection):
            connection.request(
                "POST",
                "/v1/completions",
                json.dumps({"prompt": "Hi", "stream": True, **LONG}),
                {**JSON, **guarded.headers},
            )
            until(lambda: running(guarded)[0] == 1)
            leave(guarded, body, read=False)
            until(lambda: running(guarded)[1] == 0)
    else:
        leave(guarded, body, read=stream and phase == "decode")
    until(lambda: running(guarded) == (0, 0))
    assert guarded.complete(max_tokens=1).status == 200
