"""A store that refuses: typed errors where storing was requested, and everything else is served as before."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, InternalServerError, OpenAI

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.server.run import serve_front
from plait.server.store.store import Store, open_store
from tests.contract.wire import Client
from tests.server.conftest import Running, start, wait_until
from tests.server.fake import fake_front
from tests.server.small_disk import fill_disk, small_disk

__all__ = ["small_disk"]  # a fixture

CHAT: Any = {"model": "default", "messages": [{"role": "user", "content": "Hi"}], "temperature": 0}
Pragma = Callable[[str], None]


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    front, path = fake_front(), tmp_path_factory.mktemp("damage") / "s.db"
    found = start(lambda report: front, ServerConfig(port=0, store=str(path)))
    assert wait_until(lambda: Client(found.url).get("/health").status == 200)
    yield found
    found.stop()


def fill(call: Callable[[], object]) -> None:
    """Repeat it until the last page of the file is full."""
    for _ in range(20):
        call()


@pytest.fixture
def openai(running: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as found:
        yield found


@pytest.fixture(params=["max_page_count = 1", "query_only = ON"], ids=["full", "read-only"])
def broken(running: Running, request: pytest.FixtureRequest) -> Iterator[str]:
    """The code of what the store answers while its disk is full, or its file cannot be written."""
    assert running.server._state is not None
    database = running.server._state.store._database

    def pragma(text: str) -> None:
        database.call(lambda connection: connection.execute(f"PRAGMA {text}").fetchall())

    pragma(request.param)
    yield "store_full" if "page" in request.param else "store_unavailable"
    pragma("query_only = OFF")
    pragma("max_page_count = 1073741823")


def test_a_reply_that_was_to_be_stored_is_a_typed_error(openai: OpenAI, broken: str) -> None:
    large = "x" * 1000  # more than the pages that are there have free
    calls: list[Callable[[], Any]] = [
        lambda: openai.responses.create(model="default", input=large, store=True),
        lambda: openai.responses.create(model="default", input=large, background=True),
        lambda: openai.chat.completions.create(**{**CHAT, "store": True, "metadata": {"a": "x" * 500}}),
        lambda: openai.files.create(file=("a", b"x" * 20_000), purpose="batch"),
    ]
    for call in calls:
        with pytest.raises(InternalServerError) as caught:
            fill(call)
        assert (caught.value.status_code, caught.value.code) == (503, broken)
        assert str(caught.value.message).count("\n") == 0


def test_a_stream_that_was_to_be_stored_ends_with_the_error(openai: OpenAI, broken: str) -> None:
    asked: Any = {"model": "default", "input": "y" * 1500, "store": True, "stream": True}
    kinds: list[str] = []
    while "response.failed" not in kinds:
        kinds = [event.type for event in openai.responses.create(**asked)]
    assert kinds[-2:] == ["error", "response.failed"]


def test_all_else_is_served_as_before(openai: OpenAI, running: Running, broken: str) -> None:
    assert openai.chat.completions.create(**CHAT).choices[0].message.content == "Hi"
    assert openai.responses.create(model="default", input="Hi", store=False).output_text == "Hi"
    client = Client(running.url)
    body: Any = {}
    while body.get("store") is not False:  # storing was not requested: the reply is answered, and says so
        answer = client.post("/v1/responses", {"input": "z" * 900})
        body = answer.json
    assert (answer.status, body["status"]) == (200, "completed")
    assert "the response was not stored: store:" in answer.headers["x-plait-warning"]


def test_a_damaged_store_is_refused_in_one_line_at_startup(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    path.write_bytes(b"SQLite format 3\0" + os.urandom(5000))
    with pytest.raises(ConfigError, match="damaged") as caught:
        serve_front(lambda report: fake_front(), ServerConfig(port=0, store=str(path)))
    assert "\n" not in str(caught.value)


def test_two_servers_may_not_share_a_store(running: Running, openai: OpenAI) -> None:
    assert running.server._state is not None
    path = running.server._state.store._database.path
    with pytest.raises(ConfigError, match="another server uses it"):
        serve_front(lambda report: fake_front(), ServerConfig(port=0, store=path))
    assert openai.responses.create(model="default", input="Hi").output_text == "Hi"
    with pytest.raises(APIStatusError):
        openai.responses.retrieve("resp_none")


def test_a_server_starts_on_a_full_disk_and_reads_what_is_stored(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Store, "clean_every_s", 0.05)
    config = ServerConfig(port=0, store=str(small_disk / "s.db"))
    first = start(lambda report: fake_front(), config)
    assert wait_until(lambda: Client(first.url).get("/health").status == 200)
    with OpenAI(base_url=first.url + "/v1", api_key="x", max_retries=0) as client:
        stored, other = (client.responses.create(model="default", input="Hi") for _ in range(2))
    first.stop()
    store = open_store(config)
    assert store is not None
    store.call(
        lambda rows: rows.change(found := rows.get("", "response", other.id), found.body, "in_progress")
    )
    store.close()
    ballast = fill_disk(small_disk)

    running = start(lambda report: fake_front(), config)
    assert wait_until(lambda: Client(running.url).get("/health").status == 200)
    try:
        with OpenAI(base_url=running.url + "/v1", api_key="x", max_retries=0) as client:
            assert client.responses.retrieve(stored.id).output_text == stored.output_text
            assert [*client.responses.input_items.list(stored.id)]
            more: Any = {"model": "default", "input": "More", "previous_response_id": stored.id}
            assert client.responses.create(**more, store=False).output_text
            with pytest.raises(InternalServerError, match="the disk is full"):
                client.responses.create(**more, store=True)
            ballast.unlink()
            assert wait_until(lambda: client.responses.retrieve(other.id).status == "failed")
            assert client.responses.create(**more, store=True).status == "completed"
    finally:
        running.stop()
