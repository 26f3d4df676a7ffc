"""A server with a store over the fake model, for the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import OpenAI

from plait.frontend.frontend import Front
from tests.contract.wire import Client
from tests.server.conftest import serving
from tests.server.fake import fake_front

KEYS = ("alice:key-of-alice", "bob:key-of-bob")


@pytest.fixture(scope="session")
def echo() -> Front:
    return fake_front()


@pytest.fixture(scope="session")
def server(echo: Front, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    path: Path = tmp_path_factory.mktemp("store") / "s.db"
    with serving(echo, store=str(path), api_key=KEYS) as client:
        yield client


def client_of(server: Client, key: str) -> OpenAI:
    return OpenAI(
        base_url=server.base_url + "/v1", api_key=key, max_retries=0, _strict_response_validation=True
    )


@pytest.fixture(scope="session")
def alice(server: Client) -> Iterator[OpenAI]:
    with client_of(server, "key-of-alice") as found:
        yield found


@pytest.fixture(scope="session")
def bob(server: Client) -> Iterator[OpenAI]:
    with client_of(server, "key-of-bob") as found:
        yield found
