"""The contract of the wire, checked against any server.

`pytest tests/contract --base-url http://host:8080 [--model NAME] [--api-key KEY]` checks the one named;
without --base-url two real servers are started: the nano hybrid, and SmolLM2 for chat.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from tests.contract.wire import Client
from tests.e2e.conftest import NANO_HYBRID, ROOT, serve

TEMPLATE = ROOT / "tests" / "text" / "templates" / "qwen.jinja"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("contract")
    group.addoption("--base-url", help="check this server, http://host:port; default: start one")
    group.addoption("--model", default="", help="the model to ask for; default: the first one listed")
    group.addoption("--api-key", default="", help="the key to send as a bearer token")


def option(config: pytest.Config, name: str) -> str:
    """An option's value; without one if pytest was not started on this folder."""
    return str(config.getoption(name, default=None) or "")


@pytest.fixture(scope="session")
def api_key(pytestconfig: pytest.Config) -> str:
    return option(pytestconfig, "--api-key")


@pytest.fixture(scope="session")
def nano_url(pytestconfig: pytest.Config) -> Iterator[str]:
    """The server that is checked; the nano hybrid, if none is named."""
    if named := option(pytestconfig, "--base-url"):
        yield named.rstrip("/").removesuffix("/v1")
        return
    with serve(NANO_HYBRID) as server:
        yield server.url


@pytest.fixture(scope="session")
def smol_url(pytestconfig: pytest.Config, request: pytest.FixtureRequest) -> Iterator[str]:
    """The server that is checked; SmolLM2 with a template for tools and thinking, if none is named."""
    if option(pytestconfig, "--base-url"):
        yield request.getfixturevalue("nano_url")
        return
    path: Path = request.getfixturevalue("smollm2")
    with serve(path, "--max-model-len", "1024", "--chat-template", str(TEMPLATE)) as server:
        yield server.url


@pytest.fixture(scope="module")
def base_url(nano_url: str) -> str:
    """Where a module's tests go; the modules about chat go to the other model."""
    return nano_url


@pytest.fixture
def unable(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Ends a test when its model does not generate what the test is about. This repository's models do."""

    def end(why: str) -> None:
        (pytest.skip if option(pytestconfig, "--base-url") else pytest.fail)(why)

    return end


@pytest.fixture(scope="module")
def client(pytestconfig: pytest.Config, base_url: str, api_key: str) -> Client:
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    found = Client(base_url, option(pytestconfig, "--model"), headers)
    found.model = found.model or found.get("/v1/models").json["data"][0]["id"]
    return found


@pytest.fixture(scope="module")
def openai(base_url: str, api_key: str) -> Iterator[OpenAI]:
    """OpenAI's client, which reads replies strictly: a missing or mistyped field raises."""
    with OpenAI(
        base_url=base_url + "/v1",
        api_key=api_key or "none",
        max_retries=0,
        _strict_response_validation=True,
    ) as found:
        yield found
