"""Files and batches over HTTP, for OpenAI's own client."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import APIStatusError, BadRequestError, ConflictError, NotFoundError, OpenAI

from plait.config import ServerConfig
from plait.frontend.frontend import Front
from plait.server.store.store import Store
from plait.server.stored import batches
from tests.contract.wire import Client
from tests.server.conftest import serving, start, wait_until
from tests.server.fake import fake_front
from tests.server.stored.conftest import client_of

CHAT = "/v1/chat/completions"


def line(name: str, content: str = "Hi", url: str = CHAT, **more: Any) -> str:
    body = {"messages": [{"role": "user", "content": content}], "temperature": 0, **more}
    return json.dumps({"custom_id": name, "method": "POST", "url": url, "body": body})


def upload(openai: OpenAI, *lines: str, name: str = "in.jsonl") -> str:
    return openai.files.create(file=(name, "\n".join(lines).encode()), purpose="batch").id


def begin(openai: OpenAI, source: str, **more: Any) -> Any:
    asked = {"endpoint": CHAT, "completion_window": "24h", **more}
    return openai.batches.create(input_file_id=source, **asked)


def ended(openai: OpenAI, name: str) -> Any:
    final = ("completed", "failed", "expired", "cancelled")
    assert wait_until(lambda: openai.batches.retrieve(name).status in final)
    return openai.batches.retrieve(name)


def read(openai: OpenAI, name: str | None) -> list[dict[str, Any]]:
    assert name is not None
    return [json.loads(text) for text in openai.files.content(name).text.splitlines()]


def test_a_batch_answers_every_line_in_order(alice: OpenAI, bob: OpenAI, echo: Any) -> None:
    lines = [line(f"n{i}", f"text {i}") for i in range(12)]
    lines[5] = line("n5", max_tokens=-1)
    source = upload(alice, *lines)
    made = begin(alice, source, metadata={"run": "1"})
    assert (made.status, made.metadata, made.expires_at - made.created_at) == (
        "validating",
        {"run": "1"},
        86_400,
    )
    found = ended(alice, made.id)
    assert (found.status, found.errors) == ("completed", None)
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (12, 11, 1)
    answers = read(alice, found.output_file_id)
    assert [answer["custom_id"] for answer in answers] == [f"n{i}" for i in range(12) if i != 5]
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == "text 0"
    assert answers[0]["response"]["request_id"].startswith("req")
    (fault,) = read(alice, found.error_file_id)
    assert (fault["custom_id"], fault["response"]["status_code"]) == ("n5", 400)
    assert {request.priority for request in echo.loop.requests[-11:]} == {1_000}
    file = alice.files.retrieve(found.output_file_id)
    assert (file.purpose, file.bytes) == ("batch_output", len(alice.files.content(file.id).content))
    assert found.id in [batch.id for batch in alice.batches.list(limit=1)]
    for call in (bob.batches.retrieve, bob.batches.cancel):
        with pytest.raises(NotFoundError):
            call(made.id)
    for call in (bob.files.retrieve, bob.files.content, bob.files.delete):
        with pytest.raises(NotFoundError):
            call(found.output_file_id)
    with pytest.raises(NotFoundError):
        begin(bob, source)
    assert [*bob.batches.list()] == [*bob.files.list()] == []


def test_responses_of_a_batch_are_not_stored_unless_they_say_so(alice: OpenAI) -> None:
    bodies = [{"input": "one"}, {"input": "two", "store": True}]
    lines = [
        json.dumps({"custom_id": str(i), "url": "/v1/responses", "body": b}) for i, b in enumerate(bodies)
    ]
    found = ended(alice, begin(alice, upload(alice, *lines), endpoint="/v1/responses").id)
    one, two = (answer["response"]["body"] for answer in read(alice, found.output_file_id))
    assert (one["store"], two["store"]) == (False, True)
    assert alice.responses.retrieve(two["id"]).output_text == "two"
    with pytest.raises(NotFoundError):
        alice.responses.retrieve(one["id"])


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{", line("a")], "line 1: the body is not JSON"),
        ([line("a"), "", line("a")], "line 3: custom_id 'a' is there twice"),
        ([line("a", url="/v1/completions")], "line 1: url '/v1/completions' is not the batch's endpoint"),
        ([line("a", stream=True)], "line 1: stream: a batch has no streams"),
        ([line("a", background=True)], "line 1: background"),
        (["\n \n"], "the file has no request"),
    ],
)
def test_a_file_that_is_no_batch_fails_and_names_the_line(
    alice: OpenAI, lines: list[str], words: str
) -> None:
    found = ended(alice, begin(alice, upload(alice, *lines)).id)
    assert (found.status, found.output_file_id) == ("failed", None)
    assert found.errors.data[0].message.startswith(words)


def test_a_batch_is_cancelled_with_the_answers_that_it_has(alice: OpenAI, echo: Any) -> None:
    source = upload(alice, line("a", "quick"), *(line(f"h{i}", "HANG") for i in range(20)))
    made = begin(alice, source)
    assert wait_until(lambda: alice.batches.retrieve(made.id).request_counts.completed == 1)
    with pytest.raises(ConflictError, match="a batch uses this file"):
        alice.files.delete(source)
    found = alice.batches.cancel(made.id)
    assert (found.status, found.request_counts.completed) == ("cancelled", 1)  # type: ignore[union-attr]
    assert [answer["custom_id"] for answer in read(alice, found.output_file_id)] == ["a"]
    assert wait_until(lambda: not echo.loop.stats()["running"])
    assert alice.batches.cancel(made.id).status == "cancelled"
    assert alice.files.delete(source).deleted


def test_a_batch_that_takes_too_long_expires(alice: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "WINDOW_S", 2)  # of whole seconds
    found = ended(alice, begin(alice, upload(alice, line("a"), line("b", "HANG"))).id)
    assert (found.status, found.request_counts.failed) == ("expired", 1)
    assert [answer["custom_id"] for answer in read(alice, found.output_file_id)] == ["a"]
    assert read(alice, found.error_file_id)[0]["error"]["code"] == "batch_expired"


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"endpoint": "/v1/files"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": 1}}, "metadata.a"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 1}}, "output_expires_after"),
        ({"input_file_id": 5}, "input_file_id"),
        ({"input_file_id": "file-x"}, "input_file_id"),
    ],
)
def test_a_wrong_batch_is_refused_by_name(alice: OpenAI, more: dict[str, Any], param: str) -> None:
    asked = {"endpoint": CHAT, "completion_window": "24h", "input_file_id": "file-x", **more}
    with pytest.raises(APIStatusError) as caught:
        alice.batches.create(**asked)
    error: Any = caught.value.body
    assert (caught.value.status_code in (400, 404), error["param"].split(".")[0].partition("[")[0]) == (
        True,
        param.split(".")[0],
    )


def test_batches_of_a_key_are_bounded(alice: OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches, "MAX_OPEN", 1)
    made = begin(alice, upload(alice, line("a", "HANG")))
    with pytest.raises(APIStatusError, match="1 batches of this key are in work"):
        begin(alice, upload(alice, line("a")))
    alice.batches.cancel(made.id)


class TestFiles:
    def test_a_file_of_some_megabytes_comes_back_as_it_was(self, alice: OpenAI) -> None:
        content = bytes(range(256)) * 12_345
        made = alice.files.create(file=("../../etc/näme.jsonl", content), purpose="batch")
        assert (made.bytes, made.filename, made.purpose) == (len(content), "näme.jsonl", "batch")
        assert alice.files.content(made.id).content == content
        assert alice.files.retrieve(made.id).to_dict() == made.to_dict()
        assert alice.files.delete(made.id).deleted
        with pytest.raises(NotFoundError):
            alice.files.content(made.id)

    def test_lists_have_pages_and_purposes(self, bob: OpenAI) -> None:
        ids = [upload(bob, "x") for _ in range(3)]
        assert [file.id for file in bob.files.list(limit=2)] == ids[::-1]
        assert [file.id for file in bob.files.list(order="asc", purpose="batch", after=ids[0])] == ids[1:]
        assert [*bob.files.list(purpose="batch_output")] == []
        for name in ids:
            bob.files.delete(name)

    def test_a_file_may_have_an_age_of_its_own(self, bob: OpenAI) -> None:
        more: Any = {"expires_after": {"anchor": "created_at", "seconds": 3600}}
        made = bob.files.create(file=("a", b"x"), purpose="batch", **more)
        assert made.expires_at == made.created_at + 3600
        bob.files.delete(made.id)
        more["expires_after"]["seconds"] = 5
        with pytest.raises(BadRequestError, match=r"expires_after\.seconds"):
            bob.files.create(file=("a", b"x"), purpose="batch", **more)

    def test_what_is_no_file_is_refused_and_leaves_nothing(
        self, server: Client, bob: OpenAI, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        with pytest.raises(BadRequestError, match="purpose: 'fine-tune' is not batch"):
            bob.files.create(file=("a", b"x"), purpose="fine-tune")
        with pytest.raises(BadRequestError, match="it is empty"):
            bob.files.create(file=("a", b""), purpose="batch")
        answer = server.post("/v1/files", {}, x_api_key="key-of-bob")
        assert (answer.status, answer.error["code"]) == (415, "unsupported_media_type")
        monkeypatch.setattr(Store, "max_file_bytes", 1000)
        with pytest.raises(APIStatusError, match="more than 1000 bytes") as caught:
            bob.files.create(file=("a", b"x" * 2000), purpose="batch")
        assert caught.value.status_code == 413
        with pytest.raises(APIStatusError, match="more than 1000 bytes"):
            bob.files.create(file=("a", b"x" * 200_000), purpose="batch")
        assert [*bob.files.list()] == []


@pytest.mark.slow
def test_a_batch_of_a_key_that_is_removed_says_so(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    with serving(fake_front(), store=str(path), api_key=("old:k1", "new:k2")) as server:
        openai = client_of(server, "k1")
        made = begin(openai, upload(openai, line("a", "HANG"), line("b")))
        assert wait_until(lambda: openai.batches.retrieve(made.id).request_counts.completed == 1)  # type: ignore[union-attr]
    front = fake_front()
    running = start(lambda report: front, ServerConfig(port=0, store=str(path), api_key=("new:k2",)))
    assert running.server._state is not None
    store = running.server._state.store
    assert wait_until(lambda: not store.call(lambda rows: rows.list_working("batch")))
    openai = client_of(Client(running.url), "k2")
    with pytest.raises(NotFoundError):
        openai.batches.retrieve(made.id)
    running.stop()
    with serving(fake_front(), store=str(path), api_key=("old:k3",)) as server:  # another secret, one name
        openai = client_of(server, "k3")
        found = ended(openai, made.id)
        assert (found.status, found.request_counts.failed) == ("completed", 1)
        assert read(openai, found.error_file_id)[0]["error"]["code"] == "key_removed"


@contextmanager
def stored(front: Front, path: Path) -> Iterator[tuple[Client, OpenAI]]:
    """A server over the store at `path`, and its client."""
    with serving(front, store=str(path), shutdown_timeout_s=0.2) as server, client_of(server, "x") as found:
        yield server, found


def test_after_a_restart_batches_go_on_and_responses_say_why_they_ended(tmp_path: Path) -> None:
    path = tmp_path / "s.db"
    first = fake_front()
    with stored(first, path) as (_, openai):
        source = upload(openai, line("a"), line("b", "HANG"), line("c"))
        made = begin(openai, source)
        assert wait_until(lambda: openai.batches.retrieve(made.id).request_counts.completed == 2)
        response = openai.responses.create(model="default", input="HANG", background=True)
        stopped = openai.responses.create(model="default", input="HANG", background=True)
        kept = openai.responses.create(model="default", input="one")
    connection = sqlite3.connect(path)  # as if the server had been killed
    connection.execute("UPDATE objects SET status = 'in_progress' WHERE id = ?", (response.id,))
    connection.commit()
    connection.close()
    second = fake_front()
    with stored(second, path) as (_, openai):
        found = openai.responses.retrieve(response.id)
        assert found.status == "failed"
        assert found.error is not None
        assert "the server ended before" in found.error.message
        error = openai.responses.retrieve(stopped.id).error
        assert error is not None
        assert "the server is stopping" in error.message
        assert openai.responses.retrieve(kept.id).output_text == "one"
        assert wait_until(lambda: bool(second.loop.requests))  # type: ignore[attr-defined]
        batch = openai.batches.cancel(made.id)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed) == ("cancelled", 2)
        assert [answer["custom_id"] for answer in read(openai, batch.output_file_id)] == ["a", "c"]
    assert len(second.loop.requests) == 1, "lines with an answer are not run again"  # type: ignore[attr-defined]
