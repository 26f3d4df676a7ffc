"""A server on a free port over the fake model, and ways to talk to it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from openai import OpenAI

from plait.config import ServerConfig
from plait.frontend.frontend import Front
from plait.server.http import listening
from plait.server.run import Load, Server, serve_front
from tests.contract.wire import Answer, Client
from tests.patience import PATIENCE_S, wait_until
from tests.server.fake import EchoLoop, fake_front

__all__ = ["Answer", "Client", "Running", "serving", "start", "wait_until"]


@dataclass
class Running:
    """A server in this process."""

    server: Server
    thread: threading.Thread
    raised: list[BaseException]

    @property
    def url(self) -> str:
        return self.server.url

    def stop(self) -> None:
        """At once: no client is far away, with a connection that has only begun."""
        with pytest.MonkeyPatch.context() as patch:
            if not self.server.should_exit:  # else a test of the end has begun it
                patch.setattr(listening, "HANDSHAKE_S", 0.0)
            self.server.should_exit = True
            self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


def start(load: Load, config: ServerConfig) -> Running:
    """`serve_front` in a thread; returns as soon as it listens."""
    servers: queue.SimpleQueue[Server] = queue.SimpleQueue()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            serve_front(load, config, servers.put)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return Running(servers.get(timeout=PATIENCE_S), thread, raised)


@contextlib.contextmanager
def serving(front: Front, **config: Any) -> Iterator[Client]:
    """A client of a healthy server over `front`."""
    running = start(lambda report: front, ServerConfig(port=0, **config))
    client = Client(running.url, front.name)
    try:
        assert wait_until(lambda: client.get("/health").status == 200)
        yield client
    finally:
        running.stop()


@pytest.fixture(scope="session")
def front() -> Front:
    return fake_front()


@pytest.fixture(scope="session")
def engine(front: Front) -> EchoLoop:
    assert isinstance(front.loop, EchoLoop)
    return front.loop


@pytest.fixture(scope="session")
def base_url(front: Front) -> Iterator[str]:
    """A server over the fake model."""
    with serving(front) as client:
        yield client.base_url


@pytest.fixture
def client(base_url: str) -> Client:
    return Client(base_url, Client(base_url).get("/v1/models").json["data"][0]["id"])


@pytest.fixture
def openai(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as found:
        yield found
