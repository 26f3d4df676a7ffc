"""Stored chats, for OpenAI's own client."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from tests.contract.wire import Client

ASK: Any = {"model": "default", "messages": [{"role": "user", "content": "Good morning"}], "temperature": 0}


def test_a_stored_chat_is_what_was_answered(alice: OpenAI, server: Client) -> None:
    made = alice.chat.completions.create(**ASK, store=True, metadata={"topic": "greeting"})
    found = alice.chat.completions.retrieve(made.id)
    assert found.to_dict() == {**made.to_dict(), "metadata": {"topic": "greeting"}}
    # The client's type has assistants alone, so a strict client cannot read what its own API sends.
    path = f"/v1/chat/completions/{made.id}/messages"
    (message,) = server.request("GET", path, headers={"x-api-key": "key-of-alice"}).json["data"]
    assert message == {"id": f"{made.id}-0", "role": "user", "content": "Good morning"}


def test_a_streamed_chat_is_stored_as_a_whole(alice: OpenAI) -> None:
    chunks = [*alice.chat.completions.create(**ASK, store=True, stream=True, n=2)]
    found = alice.chat.completions.retrieve(chunks[0].id)
    assert found.object == "chat.completion"
    said = {0: "", 1: ""}
    for choice in (chunk.choices[0] for chunk in chunks):
        said[choice.index] += choice.delta.content or ""
    assert {choice.index: choice.message.content for choice in found.choices} == said
    assert found.usage is not None
    assert found.usage.completion_tokens == 2 * len("Good morning")


def test_a_chat_is_not_stored_unless_it_says_so(alice: OpenAI) -> None:
    made = alice.chat.completions.create(**ASK)
    with pytest.raises(NotFoundError, match="there is no chat completion"):
        alice.chat.completions.retrieve(made.id)


def test_lists_are_filtered_by_metadata_and_have_pages(alice: OpenAI, bob: OpenAI) -> None:
    made = [
        alice.chat.completions.create(**ASK, store=True, metadata={"run": "7", "i": str(i)}) for i in range(3)
    ]
    ids = [chat.id for chat in made]
    found = alice.chat.completions.list(metadata={"run": "7"}, limit=2)
    assert found.has_more  # type: ignore[attr-defined]
    assert [chat.id for chat in found] == ids, "all pages, the oldest first"
    newest = alice.chat.completions.list(metadata={"run": "7"}, order="desc", limit=1)
    assert newest.data[0].id == ids[-1]
    assert [c.id for c in alice.chat.completions.list(metadata={"run": "7", "i": "1"})] == [ids[1]]
    assert [c.id for c in alice.chat.completions.list(model=made[0].model, after=ids[1])] == [ids[2]]
    assert [*alice.chat.completions.list(model="another")] == []
    assert [*bob.chat.completions.list()] == []


def test_metadata_changes_and_the_chat_goes(alice: OpenAI, bob: OpenAI) -> None:
    made = alice.chat.completions.create(**ASK, store=True, metadata={"a": "1"})
    changed = alice.chat.completions.update(made.id, metadata={"b": "2"})
    assert changed.to_dict()["metadata"] == {"b": "2"}
    for call in (
        bob.chat.completions.retrieve,
        bob.chat.completions.delete,
        bob.chat.completions.messages.list,
    ):
        with pytest.raises(NotFoundError):
            call(made.id)
    with pytest.raises(NotFoundError):
        bob.chat.completions.update(made.id, metadata={})
    gone = alice.chat.completions.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "chat.completion.deleted")
    with pytest.raises(NotFoundError):
        alice.chat.completions.messages.list(made.id)


@pytest.mark.parametrize(
    "metadata", [{"a": 1}, {"a" * 65: "x"}, {"a": "x" * 513}, {str(i): "x" for i in range(17)}, ["a"], "a"]
)
def test_metadata_out_of_bounds_is_refused(alice: OpenAI, metadata: Any) -> None:
    with pytest.raises(BadRequestError) as caught:
        alice.chat.completions.create(**ASK, store=True, metadata=metadata)
    assert str(caught.value.param).split(".")[0] == "metadata"


def test_only_metadata_can_change(server: Client, alice: OpenAI) -> None:
    made = alice.chat.completions.create(**ASK, store=True)
    path, key = f"/v1/chat/completions/{made.id}", "key-of-alice"
    answer = server.post(path, {"model": "x"}, x_api_key=key)
    assert (answer.status, answer.error["param"]) == (400, "metadata")
    answer = server.post("/v1/chat/completions", {**ASK, "store": "yes"}, x_api_key=key)
    assert (answer.status, answer.error["param"]) == (400, "store")
