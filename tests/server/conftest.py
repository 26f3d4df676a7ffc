"""A server on a free port over the fake model, and ways to talk to it."""

from __future__ import annotations

import contextlib
import http.client
import json
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import pytest
from openai import OpenAI

from plait.config import ServerConfig
from plait.engine.front import Front
from plait.server.run import Load, Server, serve_front
from tests.server.fake import EchoLoop, fake_front


@dataclass
class Answer:
    """One HTTP response, read to its end."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        found: dict[str, Any] = self.json["error"]
        assert set(found) == {"message", "type", "param", "code"}
        assert isinstance(found["message"], str)
        assert isinstance(found["type"], str)
        assert found["param"] is None or isinstance(found["param"], str)
        assert found["code"] is None or isinstance(found["code"], str)
        return found

    @property
    def events(self) -> list[dict[str, Any]]:
        """The JSON of a stream's events; the stream must be framed exactly and end with [DONE], once."""
        *frames, end = self.body.decode().split("\n\n")
        assert end == ""
        frames = [frame for frame in frames if not frame.startswith(":")]
        assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
        assert frames[-1] == "data: [DONE]"
        return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]


@dataclass
class Client:
    """Plain HTTP on one connection per call."""

    base_url: str
    model: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def address(self) -> tuple[str, int]:
        parts = urlsplit(self.base_url)
        assert parts.hostname is not None
        assert parts.port is not None
        return parts.hostname, parts.port

    def request(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> Answer:
        connection = http.client.HTTPConnection(*self.address, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, body, {**self.headers, **(headers or {})})
            response = connection.getresponse()
            found = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, found, response.read())

    def get(self, path: str) -> Answer:
        return self.request("GET", path)

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **{k.replace("_", "-"): v for k, v in headers.items()}}
        return self.request("POST", path, raw, sent)

    def complete(self, prompt: Any = "Hello there", **more: Any) -> Answer:
        return self.post("/v1/completions", {"prompt": prompt, "temperature": 0, **more})

    def chat(self, content: Any = "Hello there", **more: Any) -> Answer:
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, "temperature": 0, **more})


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
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()


def start(load: Load, config: ServerConfig) -> Running:
    """`serve_front` in a thread; returns as soon as it listens."""
    listening: queue.SimpleQueue[Server] = queue.SimpleQueue()
    raised: list[BaseException] = []

    def run() -> None:
        try:
            serve_front(load, config, listening.put)
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return Running(listening.get(timeout=10), thread, raised)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10) -> bool:
    """Whether it became true in time."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


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
    """Where the contract is checked; another conftest may put a real model behind it."""
    with serving(front) as client:
        yield client.base_url


@pytest.fixture
def client(base_url: str) -> Client:
    return Client(base_url, Client(base_url).get("/v1/models").json["data"][0]["id"])


@pytest.fixture
def openai(base_url: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as found:
        yield found
