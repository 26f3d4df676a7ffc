"""Stored responses, for OpenAI's own client: conversations, the background, streams that are read again."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI, RateLimitError

from plait.server.stored import background
from tests.contract.wire import Client
from tests.server.conftest import wait_until
from tests.server.fake import EchoLoop

MODEL = "default"


def ended(openai: OpenAI, response_id: str) -> Any:
    """The response, once it is no longer in work."""
    working = ("queued", "in_progress")
    assert wait_until(lambda: openai.responses.retrieve(response_id).status not in working)
    return openai.responses.retrieve(response_id)


def test_a_conversation_goes_on_with_its_items(alice: OpenAI, echo: Any) -> None:
    engine: EchoLoop = echo.loop
    first = alice.responses.create(model=MODEL, input="one", instructions="be brief", temperature=0)
    assert first.store is True  # type: ignore[attr-defined]
    second = alice.responses.create(model=MODEL, input="two", previous_response_id=first.id, temperature=0)
    assert second.previous_response_id == first.id
    messages: Any = [("user", "one"), ("assistant", "one"), ("user", "two")]
    asked = [{"role": role, "content": text} for role, text in messages]
    alice.chat.completions.create(model=MODEL, messages=asked, temperature=0)  # type: ignore[arg-type]
    assert engine.requests[-2].prompt_token_ids == engine.requests[-1].prompt_token_ids
    items = alice.responses.input_items.list(second.id, order="asc")
    assert [(item.type, item.role, item.content[0].text) for item in items] == [  # type: ignore[union-attr]
        ("message", role, text) for role, text in messages
    ]
    assert alice.responses.retrieve(second.id).to_dict() == second.to_dict()


def test_a_streamed_response_goes_on_and_is_stored_before_its_last_event(alice: OpenAI) -> None:
    first = alice.responses.create(model=MODEL, input="one", temperature=0)
    asked: Any = {"model": MODEL, "input": "two", "temperature": 0}
    with alice.responses.stream(previous_response_id=first.id, **asked) as stream:
        final = stream.get_final_response()
    assert final.output_text == "two"
    third = alice.responses.create(model=MODEL, input="three", previous_response_id=final.id)
    assert len([*alice.responses.input_items.list(third.id)]) == 5


def test_lists_of_items_have_pages(alice: OpenAI) -> None:
    items: Any = [{"role": "user", "content": f"m{i}"} for i in range(5)]
    found = alice.responses.create(model=MODEL, input=items)
    page = alice.responses.input_items.list(found.id, limit=2)
    assert page.has_more
    texts = [item.content[0].text for item in page]  # type: ignore[union-attr]
    assert texts == ["m4", "m3", "m2", "m1", "m0"], "all pages, the newest first"
    with pytest.raises(NotFoundError, match="no item 'msg_x'"):
        alice.responses.input_items.list(found.id, after="msg_x")


def test_calls_and_their_results_go_on(alice: OpenAI) -> None:
    call: Any = {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"}
    first = alice.responses.create(model=MODEL, input=[{"role": "user", "content": "look"}, call])
    result: Any = {"type": "function_call_output", "call_id": "c1", "output": "rain"}
    second = alice.responses.create(model=MODEL, input=[result], previous_response_id=first.id)
    kinds = [item.type for item in alice.responses.input_items.list(second.id, order="asc")]
    assert kinds == ["message", "function_call", "message", "function_call_output"]


def test_items_are_referred_to_by_their_ids(alice: OpenAI, bob: OpenAI) -> None:
    first = alice.responses.create(model=MODEL, input="one", temperature=0)
    hidden = alice.responses.create(model=MODEL, input="two", background=True, temperature=0)
    other = ended(alice, hidden.id).output[0].id
    asked: Any = [{"role": "user", "content": "one"}, {"type": "item_reference", "id": first.output[0].id}]
    asked += [{"type": "item_reference", "id": other}, {"role": "user", "content": "three"}]
    found = alice.responses.create(model=MODEL, input=asked, temperature=0)
    items = alice.responses.input_items.list(found.id, order="asc")
    texts = [item.content[0].text for item in items]  # type: ignore[union-attr]
    assert texts == ["one", "one", "two", "three"]
    with pytest.raises(
        BadRequestError, match=r"input\[1\]: there is no item 'msg_.*' that this key"
    ) as caught:
        bob.responses.create(model=MODEL, input=asked)
    assert caught.value.param == "input[1]"
    alice.responses.delete(first.id)
    alice.responses.delete(found.id)  # which was given the same item
    with pytest.raises(BadRequestError, match="there is no item"):
        alice.responses.create(model=MODEL, input=asked)


def test_items_that_a_response_was_given_are_referred_to(alice: OpenAI, echo: Any) -> None:
    engine: EchoLoop = echo.loop
    first = alice.responses.create(model=MODEL, input="one", temperature=0)
    (given,) = alice.responses.input_items.list(first.id)
    again: Any = [{"type": "item_reference", "id": given.id}, {"role": "user", "content": "two"}]
    second = alice.responses.create(model=MODEL, input=again, temperature=0)
    plain: Any = [{"role": "user", "content": text} for text in ("one", "two")]
    alice.responses.create(model=MODEL, input=plain, temperature=0)
    assert engine.requests[-2].prompt_token_ids == engine.requests[-1].prompt_token_ids
    alice.responses.delete(first.id)
    third = alice.responses.create(model=MODEL, input=again, temperature=0)
    assert third.output_text == second.output_text, "the second response was given it, too"


def test_store_false_stores_nothing(alice: OpenAI) -> None:
    found = alice.responses.create(model=MODEL, input="secret", store=False)
    assert found.store is False  # type: ignore[attr-defined]
    with pytest.raises(NotFoundError):
        alice.responses.retrieve(found.id)
    with pytest.raises(BadRequestError, match="background: a reply in the background must be stored"):
        alice.responses.create(model=MODEL, input="x", store=False, background=True)


def test_a_deleted_response_is_gone_and_ends_its_conversation(alice: OpenAI) -> None:
    first = alice.responses.create(model=MODEL, input="one")
    second = alice.responses.create(model=MODEL, input="two", previous_response_id=first.id)
    alice.responses.delete(first.id)
    for call in (alice.responses.retrieve, alice.responses.delete, alice.responses.cancel):
        with pytest.raises(NotFoundError, match="there is no response"):
            call(first.id)
    with pytest.raises(BadRequestError) as caught:
        alice.responses.create(model=MODEL, input="three", previous_response_id=second.id)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


@pytest.mark.parametrize("name", ["", "resp_x", "a\0b", "x" * 5000])
def test_a_previous_response_that_is_not_there_is_refused(alice: OpenAI, name: str) -> None:
    with pytest.raises(BadRequestError, match="there is no response") as caught:
        alice.responses.create(model=MODEL, input="two", previous_response_id=name)
    assert (caught.value.code, caught.value.param) == ("previous_response_not_found", "previous_response_id")


def test_another_key_cannot_read_go_on_list_cancel_or_delete(alice: OpenAI, bob: OpenAI) -> None:
    mine = alice.responses.create(model=MODEL, input="SLOW mine", background=True, stream=False)
    calls: list[Callable[[str], Any]] = [bob.responses.retrieve, bob.responses.delete, bob.responses.cancel]
    calls += [bob.responses.input_items.list, lambda found: bob.responses.retrieve(found, stream=True)]
    for call in calls:
        with pytest.raises(NotFoundError, match="there is no response"):
            call(mine.id)
    with pytest.raises(BadRequestError, match="previous_response_id: there is no response"):
        bob.responses.create(model=MODEL, input="x", previous_response_id=mine.id)
    assert ended(alice, mine.id).status == "completed"


def test_a_background_response_survives_its_client(alice: OpenAI) -> None:
    begun = alice.responses.create(model=MODEL, input="SLOW and sure", background=True, temperature=0)
    assert (begun.status, begun.background, begun.output) == ("queued", True, [])
    with pytest.raises(BadRequestError, match=r"is (queued|in_progress); wait until it is done"):
        alice.responses.create(model=MODEL, input="x", previous_response_id=begun.id)
    found = ended(alice, begun.id)
    assert (found.status, found.output_text) == ("completed", "SLOW and sure")
    assert found.usage.output_tokens == len("SLOW and sure")
    with pytest.raises(BadRequestError, match="only a response that was made with background"):
        alice.responses.retrieve(found.id, stream=True)


def test_the_stream_of_a_background_response_is_read_again_from_any_number(alice: OpenAI) -> None:
    asked: Any = {"model": MODEL, "input": "SLOW text", "background": True, "temperature": 0}
    stream = alice.responses.create(stream=True, **asked)
    first = [next(iter(stream)) for _ in range(5)]
    assert [event.type for event in first[:3]] == [
        "response.created",
        "response.queued",
        "response.in_progress",
    ]
    stream.close()
    name = first[0].response.id  # type: ignore[union-attr]
    rest = [*alice.responses.retrieve(name, stream=True, starting_after=first[-1].sequence_number)]
    numbers = [event.sequence_number for event in [*first, *rest]]
    assert numbers == [*range(len(numbers))]
    assert rest[-1].type == "response.completed"
    assert wait_until(lambda: ended(alice, name).status == "completed")
    again = [*alice.responses.retrieve(name, stream=True)]  # from the store now
    assert [event.to_dict() for event in again] == [event.to_dict() for event in [*first, *rest]]
    assert [*alice.responses.retrieve(name, stream=True, starting_after=numbers[-1])] == []


def test_a_background_response_can_be_cancelled_and_deleted(alice: OpenAI, echo: Any) -> None:
    begun = alice.responses.create(model=MODEL, input="HANG", background=True)
    assert wait_until(lambda: alice.responses.retrieve(begun.id).status == "in_progress")
    assert alice.responses.cancel(begun.id).status == "cancelled"
    assert alice.responses.cancel(begun.id).status == "cancelled"
    assert wait_until(lambda: not echo.loop.stats()["running"])
    other = alice.responses.create(model=MODEL, input="HANG", background=True)
    alice.responses.delete(other.id)
    assert wait_until(lambda: not echo.loop.stats()["running"])
    with pytest.raises(NotFoundError):
        alice.responses.retrieve(other.id)
    whole = alice.responses.create(model=MODEL, input="one")
    with pytest.raises(BadRequestError, match="only a response with background: true"):
        alice.responses.cancel(whole.id)


def test_a_background_response_that_fails_says_why(alice: OpenAI) -> None:
    begun = alice.responses.create(model=MODEL, input="BOOM", background=True, stream=True)
    events = [*begun]
    assert [event.type for event in events[-2:]] == ["error", "response.failed"]
    found = ended(alice, events[0].response.id)  # type: ignore[union-attr]
    assert (found.status, found.error.code) == ("failed", "server_error")
    assert found.error.message


def test_the_background_of_a_key_is_bounded(
    alice: OpenAI, bob: OpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "MAX_PER_KEY", 1)
    begun = alice.responses.create(model=MODEL, input="HANG", background=True)
    with pytest.raises(RateLimitError, match="1 responses of this key are in work already"):
        alice.responses.create(model=MODEL, input="HANG", background=True)
    theirs = bob.responses.create(model=MODEL, input="hi", background=True)
    assert ended(bob, theirs.id).status == "completed"
    alice.responses.cancel(begun.id)


@pytest.mark.parametrize("query", ["limit=0", "limit=101", "limit=x", "order=up", "limit=1e3"])
def test_a_wrong_query_is_refused_by_name(server: Client, query: str) -> None:
    headers = {"Authorization": "Bearer key-of-alice"}
    answer = server.request("GET", f"/v1/responses/resp_x/input_items?{query}", headers=headers)
    assert (answer.status, answer.error["param"]) == (400, query.partition("=")[0])


def test_a_wrong_key_sees_nothing(server: Client) -> None:
    for method, path in (("GET", "/v1/responses/x"), ("DELETE", "/v1/files/x"), ("POST", "/v1/batches")):
        assert server.request(method, path).status == 401


def test_paths_work_without_their_prefix(server: Client, alice: OpenAI) -> None:
    found = alice.responses.create(model=MODEL, input="one")
    answer = server.request("GET", f"/responses/{found.id}", headers={"x-api-key": "key-of-alice"})
    assert json.loads(answer.body)["id"] == found.id


class TestWithoutAStore:
    """A server without --store says what to start it with, and serves everything else."""

    def test_what_needs_a_store_is_refused_and_says_how(self, client: Client) -> None:
        for body in ({"previous_response_id": "resp_1"}, {"background": True}):
            answer = client.post("/v1/responses", {"input": "Hi", **body})
            assert (answer.status, answer.error["param"]) == (400, next(iter(body)))
            assert "start the server with --store PATH" in answer.error["message"]
        answer = client.post("/v1/responses", {"input": [{"type": "item_reference", "id": "msg_1"}]})
        assert (answer.status, answer.error["param"]) == (400, "input[0]")
        for method, path in (
            ("GET", "/v1/responses/resp_1"),
            ("DELETE", "/v1/responses/resp_1"),
            ("GET", "/v1/chat/completions"),
            ("POST", "/v1/files"),
            ("POST", "/v1/batches"),
        ):
            answer = client.request(method, path, headers={"Content-Type": "application/json"})
            assert (answer.status, answer.error["code"]) == (400, "store_off"), path

    def test_store_false_and_true_are_answered_and_nothing_is_stored(self, client: Client) -> None:
        for value, ignored in ((False, None), (None, None), (True, "store")):
            answer = client.post("/v1/responses", {"input": "Hi", "store": value})
            assert (answer.status, answer.json["store"]) == (200, False)
            assert answer.headers.get("x-plait-ignored") == ignored
        chat = client.chat("Hi", store=True, metadata={"a": "b"})
        assert (chat.status, chat.headers["x-plait-ignored"]) == (200, "store,metadata")
