"""API keys: how they are written and read, which requests they admit, and what their names separate."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.app import create_app
from plait.server.gateway.api_keys import Allowance, Keyring, read_keys
from tests.server.conftest import serving
from tests.server.fake import fake_front
from tests.server.real_engine import engine_front


def ring(tmp_path: Path, text: str, **config: Any) -> Keyring:
    file = tmp_path / "keys"
    file.write_text(text)
    return read_keys(ServerConfig(api_key_file=str(file), **config))


def test_keys_are_written_plain_or_as_digests_with_names_and_limits(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"third").hexdigest()
    text = f"# keys\n\nfirst\nbob: second rpm=5 open=2\ncarol: sha256:{digest} tpm=100\n"
    keys = ring(tmp_path, text, requests_per_minute=60).keys
    assert [key.name for key in keys][1:] == ["bob", "carol"]
    assert keys[0].name.startswith("key-")
    assert keys[0].allowance == Allowance(requests_per_minute=60)
    assert keys[1].allowance == Allowance(requests_per_minute=5, max_requests=2)
    assert keys[2].allowance == Allowance(requests_per_minute=60, tokens_per_minute=100)
    assert keys[2].digest == hashlib.sha256(b"third").digest()


def test_a_key_without_a_name_is_called_the_same_wherever_it_stands() -> None:
    one, other = read_keys(ServerConfig(api_key=("a-key", "b-key"))), read_keys(ServerConfig(api_key="b-key"))
    assert one.keys[1].name == other.keys[0].name != one.keys[0].name
    assert "b-key" not in other.keys[0].name


@pytest.mark.parametrize(
    "line",
    ["a b", "no/name: x", "bob:", "bob: sha256:123", "bob: x rpm=0", "bob: x tpm=-1", "bob: x rpm=many"],
)
def test_a_line_that_cannot_be_read_is_refused_by_its_number_alone(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="line 2") as found:
        ring(tmp_path, f"# one\n{line}\n")
    assert line not in str(found.value)


@pytest.mark.parametrize("text", ["", "# none\n"])
def test_a_file_without_keys_lets_no_one_in(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match="holds no key"):
        ring(tmp_path, text)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(ServerConfig(api_key_file=str(tmp_path / "missing")))


@pytest.mark.parametrize("keys", [("same", "same"), ("x:one", "x:two")])
def test_two_keys_that_are_one_are_refused(keys: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="key"):
        read_keys(ServerConfig(api_key=keys))


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ({"authorization": "Bearer one"}, "a"),
        ({"authorization": "bearer one"}, "a"),
        ({"authorization": "BEARER   two "}, "b"),
        ({"x-api-key": "two"}, "b"),
        ({"authorization": "Bearer wrong", "x-api-key": "two"}, "b"),
        ({"authorization": "Bearer sk-ü".encode().decode("latin-1")}, "c"),
        ({}, None),
        ({"authorization": "Bearer"}, None),
        ({"authorization": "Basic one"}, None),
        ({"authorization": "one"}, None),
        ({"x-api-key": "On"}, None),
        ({"x-api-key": "one "}, "a"),
        ({"x-api-key": "ones"}, None),
    ],
)
def test_a_key_is_found_in_either_header(headers: dict[str, str], name: str | None) -> None:
    found = read_keys(ServerConfig(api_key=("a:one", "b:two", "c:sk-ü"))).find(headers)
    assert (found.name if found else None) == name


def test_without_keys_all_clients_share_one_allowance() -> None:
    keyring = read_keys(ServerConfig(requests_per_minute=3))
    found = keyring.find({})
    assert not keyring
    assert found is not None
    assert found.allowance.requests_per_minute == 3


OPEN = {"/live", "/", "/health", "/ready", "/docs", "/openapi.json"}


def test_every_route_but_what_is_the_same_for_all_clients_requires_a_key() -> None:
    app = create_app(fake_front(), ServerConfig(api_key="k"))
    routes = [route for route in app.routes if isinstance(route, Route)]
    assert len(routes) > 8
    with serving(fake_front(), api_key=("k",), admin_key="a") as client:
        for route in routes:
            (method,) = (route.methods or set()) - {"HEAD"}
            answer = client.request(method, route.path.replace("{id:path}", "fake"))
            is_open = route.path in OPEN or route.path.startswith("/page/")
            assert (answer.status != 401) == is_open, route.path
        assert client.get("/no/such/path").status == 401
        assert client.request("OPTIONS", "/v1/models").status == 405


def test_a_client_without_a_key_gets_what_to_send() -> None:
    with serving(fake_front(), api_key=("alice:one",)) as client:
        answer = client.complete("Hi")
        assert (answer.status, answer.error["type"]) == (401, "authentication_error")
        assert answer.error["code"] == "invalid_api_key"
        assert "Bearer" in answer.error["message"]
        assert answer.headers["www-authenticate"] == "Bearer"
        wrong = client.post("/v1/completions", {"prompt": "Hi"}, Authorization="Bearer nope")
        assert wrong.status == 401
        assert "not one of" in wrong.error["message"]
        assert "nope" not in wrong.body.decode()
        for header in ({"Authorization": "bearer one"}, {"x-api-key": "one"}):
            assert client.request("GET", "/v1/models", headers=header).status == 200


def test_a_refusal_has_the_shape_of_its_endpoint() -> None:
    with serving(fake_front(), api_key=("one",)) as client:
        answer = client.post("/v1/messages", {})
        assert answer.status == 401
        assert answer.json["type"] == "error"
        assert answer.json["error"]["type"] == "authentication_error"


def test_one_keys_prompts_are_not_found_by_another() -> None:
    front = fake_front()
    with serving(front, api_key=("alice:one", "bob:two")) as client:
        for key, salt in (("one", None), ("one", "x"), ("two", None), ("two", "x")):
            answer = client.post(
                "/v1/completions", {"prompt": "Hi", "max_tokens": 1, "cache_salt": salt}, x_api_key=key
            )
            assert answer.status == 200
            assert "x-plait-ignored" not in answer.headers
    assert [r.cache_salt for r in front.loop.requests] == ["alice/", "alice/x", "bob/", "bob/x"]


def test_without_keys_salts_are_as_they_are_sent() -> None:
    front = fake_front()
    with serving(front) as client:
        client.complete("Hi", max_tokens=1, cache_salt="x")
    assert front.loop.requests[0].cache_salt == "x"


def test_strangers_see_that_the_server_is_well_and_no_more() -> None:
    with serving(fake_front(), api_key=("one",)) as client:
        assert client.get("/health").json == {"status": "ok"}
        known = client.request("GET", "/health", headers={"x-api-key": "one"})
        assert "engine" in known.json
        assert client.get("/ready").status == 200


@pytest.mark.parametrize(("public", "status"), [(True, 200), (False, 401)])
def test_metrics_are_public_only_if_set_so(public: bool, status: int) -> None:
    with serving(engine_front(), api_key=("one",), metrics_public=public) as client:
        assert client.get("/metrics").status == status
