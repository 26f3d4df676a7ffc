"""Stored responses, chats, files and batches on a server of several models, for OpenAI's own client."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from plait.errors import OutOfMemory
from plait.server.models.placement import RESIDENCE_S
from tests.contract.wire import Client
from tests.patience import PATIENCE_S
from tests.server.conftest import wait_until
from tests.server.models.pooling import Bench
from tests.server.models.test_served import ADMIN, serving
from tests.server.stored.test_batches import begin, line, read, upload
from tests.server.stored.test_batches import ended as batch_ended
from tests.server.stored.test_responses import ended

MODELS = ("small", "big", "bad")


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """No model stays longer than its requests and what it may stay in any case; `bad` cannot be loaded."""
    store = str(tmp_path / "s.db")
    made = Bench(*MODELS, fit=3, aliases={"big": ("gpt-4",)}, store=store, admin_key="secret", keep_alive="0")
    made.loader.broken["bad"] = ValueError("/models/bad/model.safetensors is truncated")
    return made


@pytest.fixture
def several(bench: Bench) -> Iterator[Client]:
    with serving(bench) as client:
        yield client


@pytest.fixture
def openai(several: Client) -> Iterator[OpenAI]:
    with OpenAI(base_url=several.base_url + "/v1", api_key="x", max_retries=0) as found:
        yield found


def phase(bench: Bench, name: str) -> str:
    return bench.phases()[name]


def test_a_model_stays_while_a_response_of_it_is_in_work_in_the_background(
    bench: Bench, openai: OpenAI, several: Client
) -> None:
    """The request that began it is over."""
    openai.responses.create(model="big", input="x", store=False)
    bench.clock.now += 10 * RESIDENCE_S
    asked: Any = {"model": "gpt-4", "input": "SLOW and sure", "background": True, "temperature": 0}
    begun = openai.responses.create(**asked, extra_body={"keep_alive": 0})
    assert phase(bench, "big") == "loaded"
    assert ended(openai, begun.id).output_text == "SLOW and sure"
    bench.clock.now += 10 * RESIDENCE_S  # it may have been unloaded and loaded again in between
    assert wait_until(lambda: phase(bench, "big") == "unloaded")
    assert bench.residents.models["big"].num_users == 0
    again = openai.responses.create(model="big", input="on", previous_response_id=begun.id, temperature=0)
    assert (again.model, again.output_text) == ("big", "on")


def test_unloading_waits_for_what_is_in_work_and_a_cancelled_one_lets_go(
    bench: Bench, openai: OpenAI, several: Client
) -> None:
    asked: Any = {"model": "big", "input": "HANG", "background": True}
    begun = openai.responses.create(**asked)
    assert several.request("POST", "/models/unload", b'{"model": "big"}', ADMIN).status == 200
    assert wait_until(lambda: openai.responses.retrieve(begun.id).status == "in_progress")
    assert phase(bench, "big") == "loaded"
    assert openai.responses.cancel(begun.id).status == "cancelled"
    assert wait_until(lambda: phase(bench, "big") == "unloaded")
    assert openai.responses.retrieve(begun.id).model == "big"  # also when its model is not loaded


def test_a_response_that_cannot_be_stored_holds_no_model(
    bench: Bench, openai: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object) -> None:
        raise OutOfMemory("the store is full")

    monkeypatch.setattr("plait.server.responses.state.ResponseKeeper.add", refuse)
    with pytest.raises(Exception, match="the store is full"):
        openai.responses.create(model="big", input="x", background=True)
    assert wait_until(lambda: bench.residents.models["big"].num_users == 0)


def test_a_conversation_goes_on_with_another_model(openai: OpenAI) -> None:
    one = openai.responses.create(model="small", input="first", temperature=0)
    two = openai.responses.create(model="big", input="second", previous_response_id=one.id, temperature=0)
    assert (one.model, two.model, two.output_text) == ("small", "big", "second")
    texts = [item.content[0].text for item in openai.responses.input_items.list(two.id, order="asc").data]  # type: ignore[union-attr]
    assert texts == ["first", "first", "second"]


def test_stored_chats_are_listed_by_their_model(openai: OpenAI) -> None:
    for model in ("small", "gpt-4"):
        said: Any = [{"role": "user", "content": model}]
        openai.chat.completions.create(model=model, messages=said, store=True, temperature=0)
    found = openai.chat.completions.list(model="big").data
    assert [chat.choices[0].message.content for chat in found] == ["gpt-4"]
    assert len(openai.chat.completions.list().data) == 2


def test_lines_of_a_batch_have_their_models_loaded(bench: Bench, openai: OpenAI) -> None:
    names = ["small", "gpt-4", "small", "big", "bad", "none"]
    lines = [line(f"n{i}", f"text {i}", model=name) for i, name in enumerate(names)]
    made = batch_ended(openai, begin(openai, upload(openai, *lines)).id)
    counts = made.request_counts
    assert (made.status, counts.completed, counts.failed) == ("completed", 4, 2)
    answers = {one["custom_id"]: one["response"]["body"] for one in read(openai, made.output_file_id)}
    assert [answers[f"n{i}"]["model"] for i in range(4)] == ["small", "big", "small", "big"]
    failed = {one["custom_id"]: json.dumps(one) for one in read(openai, made.error_file_id)}
    assert "truncated" in failed["n4"]
    assert "model_not_found" in failed["n5"]
    assert "/models/bad" not in failed["n4"]


def test_without_a_loaded_model_the_store_answers_and_refusals_are_the_same(
    bench: Bench, openai: OpenAI
) -> None:
    assert phase(bench, "big") == "unloaded"
    with pytest.raises(NotFoundError):
        openai.responses.retrieve("resp_none")
    with pytest.raises(BadRequestError, match="there is no response"):
        openai.responses.create(model="big", input="x", previous_response_id="resp_none")
    file = openai.files.create(file=("a.jsonl", b"{}\n"), purpose="batch")
    assert openai.files.content(file.id).read() == b"{}\n"


def test_a_background_response_of_a_model_that_loads_waits_for_it(bench: Bench, openai: OpenAI) -> None:
    bench.loader.held.add("big")
    found: list[Any] = []

    def ask() -> None:
        found.append(openai.responses.create(model="big", input="late", background=True, temperature=0))

    thread = threading.Thread(target=ask)
    thread.start()
    assert wait_until(lambda: phase(bench, "big") == "loading")
    bench.loader.held.clear()
    thread.join(PATIENCE_S)
    assert ended(openai, found[0].id).output_text == "late"
