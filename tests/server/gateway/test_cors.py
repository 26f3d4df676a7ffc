"""CORS: no web page of another origin may call the server, unless its origin is allowed."""

from __future__ import annotations

import pytest

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.app import create_app
from tests.server.conftest import Client, serving
from tests.server.fake import fake_front

ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization,content-type",
}


def test_without_the_option_no_page_elsewhere_may_read_an_answer(client: Client) -> None:
    asked = client.request("GET", "/v1/models", headers={"Origin": ORIGIN})
    assert asked.status == 200
    assert "access-control-allow-origin" not in asked.headers
    preflight = client.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
    assert preflight.status == 405
    assert "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize(("origin", "allowed"), [(ORIGIN, ORIGIN), ("*", "*")])
def test_a_named_origin_may_ask_and_read_also_refusals(origin: str, allowed: str) -> None:
    with serving(fake_front(), cors_origin=(origin,), api_key=("one",)) as client:
        preflight = client.request("OPTIONS", "/v1/chat/completions", headers=PREFLIGHT)
        assert preflight.status == 200
        assert preflight.headers["access-control-allow-origin"] == allowed
        assert "authorization" in preflight.headers["access-control-allow-headers"]
        refused = client.request("GET", "/v1/models", headers={"Origin": ORIGIN})
        assert refused.status == 401
        assert refused.headers["access-control-allow-origin"] == allowed
        headers = {"Origin": ORIGIN, "x-api-key": "one"}
        answer = client.request("GET", "/v1/models", headers=headers)
        assert answer.headers["access-control-allow-origin"] == allowed
        assert "x-request-id" in answer.headers["access-control-expose-headers"]


@pytest.mark.parametrize("origin", ["app.example", "https://app.example/", "https://App.example", ""])
def test_what_no_browser_sends_as_its_origin_is_refused(origin: str) -> None:
    with pytest.raises(ConfigError, match="cors_origin"):
        create_app(fake_front(), ServerConfig(cors_origin=(ORIGIN, "*", origin)))


def test_every_header_that_says_something_can_be_read_elsewhere() -> None:
    limits = {"requests_per_minute": 9, "tokens_per_minute": 900}
    with serving(fake_front(), cors_origin=(ORIGIN,), **limits) as client:
        body = {"prompt": "a", "max_tokens": 1, "strange": 1}
        answer = client.post("/v1/completions", body, Origin=ORIGIN)
        ours = {name for name in answer.headers if name.startswith("x-")}
        exposed = {name.strip() for name in answer.headers["access-control-expose-headers"].split(",")}
        assert len(ours) == 8
        assert ours | {"retry-after", "retry-after-ms", "x-plait-warning"} == exposed


def test_another_origin_may_not() -> None:
    with serving(fake_front(), cors_origin=(ORIGIN,)) as client:
        headers = {**PREFLIGHT, "Origin": "https://evil.example"}
        assert client.request("OPTIONS", "/v1/chat/completions", headers=headers).status == 400
        answer = client.request("GET", "/v1/models", headers={"Origin": "https://evil.example"})
        assert "access-control-allow-origin" not in answer.headers


def test_hosts_that_are_named_are_allowed_and_others_are_not() -> None:
    named = {"LLM.example:443": 200, "localhost": 200, "other.example": 403, "port.example:8080": 200}
    with serving(fake_front(), allowed_host=("llm.example", "Port.example:8080")) as client:
        for host, status in named.items():
            assert client.request("GET", "/version", headers={"Host": host}).status == status


def test_named_hosts_are_required_on_the_network_too() -> None:
    with serving(fake_front(), host="0.0.0.0", allowed_host=("0.0.0.0", "llm.example")) as client:
        for host, status in (("llm.example", 200), ("other.example", 403), ("localhost", 403)):
            assert client.request("GET", "/version", headers={"Host": host}).status == status
