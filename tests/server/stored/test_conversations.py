"""Conversations, for OpenAI's own client: items, responses that go on from them, tenants, what is sealed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from plait.server.store import store
from plait.server.store.seal import Seal
from tests.contract.wire import Client
from tests.server.conftest import serving, wait_until
from tests.server.fake import EchoLoop, fake_front
from tests.server.store.test_store import Xor
from tests.server.stored.conftest import client_of

MODEL: Any = "default"


def user(text: str) -> Any:
    return {"type": "message", "role": "user", "content": text}


def texts(openai: OpenAI, conversation: str) -> list[str]:
    items: Any = openai.conversations.items.list(conversation, order="asc")
    return [item.content[0].text for item in items]


def test_a_conversation_is_made_changed_and_deleted(alice: OpenAI) -> None:
    made = alice.conversations.create(items=[user("one")], metadata={"topic": "rain"})
    assert made.id.startswith("conv_")
    assert (made.object, made.metadata) == ("conversation", {"topic": "rain"})
    assert alice.conversations.retrieve(made.id) == made
    changed = alice.conversations.update(made.id, metadata={"topic": "sun"})
    assert changed.to_dict() == {**made.to_dict(), "metadata": {"topic": "sun"}}
    assert texts(alice, made.id) == ["one"]
    gone = alice.conversations.delete(made.id)
    assert (gone.id, gone.deleted, gone.object) == (made.id, True, "conversation.deleted")
    with pytest.raises(NotFoundError, match="no conversation"):
        alice.conversations.retrieve(made.id)


def test_items_are_added_listed_read_and_deleted(alice: OpenAI) -> None:
    made = alice.conversations.create()
    added: Any = alice.conversations.items.create(made.id, items=[user("a"), user("b"), user("c")])
    ids = [item.id for item in added.data]
    assert len(set(ids)) == 3
    page = alice.conversations.items.list(made.id, limit=2)
    assert page.has_more
    assert [item.id for item in page] == ids[::-1], "all pages, the newest first"
    found: Any = alice.conversations.items.retrieve(ids[1], conversation_id=made.id)
    assert (found.id, found.role, found.status, found.content[0].text) == (ids[1], "user", "completed", "b")
    assert alice.conversations.items.delete(ids[1], conversation_id=made.id).id == made.id
    assert texts(alice, made.id) == ["a", "c"]
    for call in (alice.conversations.items.retrieve, alice.conversations.items.delete):
        with pytest.raises(NotFoundError, match="no item"):
            call(ids[1], conversation_id=made.id)
    again: Any = alice.conversations.items.create(made.id, items=[{**user("d"), "id": ids[0]}])
    assert again.data[0].id != ids[0], "an id is one item's"


def test_items_of_a_conversation_are_referred_to_as_long_as_they_are_in_it(alice: OpenAI) -> None:
    made = alice.conversations.create(items=[user("a")])
    (item,) = alice.conversations.items.list(made.id)
    asked: Any = [{"type": "item_reference", "id": item.id}]
    assert alice.responses.create(model=MODEL, input=asked, temperature=0, store=False).output_text == "a"
    alice.conversations.items.delete(str(item.id), conversation_id=made.id)
    with pytest.raises(BadRequestError, match="there is no item"):
        alice.responses.create(model=MODEL, input=asked)


def test_responses_go_on_from_a_conversation_and_are_added_to_it(alice: OpenAI, echo: Any) -> None:
    engine: EchoLoop = echo.loop
    made = alice.conversations.create(items=[user("zero")])
    asked: Any = {"model": MODEL, "temperature": 0, "conversation": made.id}
    first = alice.responses.create(input="one", **asked)
    assert first.conversation is not None
    assert first.conversation.id == made.id
    with alice.responses.stream(input="two", **asked | {"conversation": {"id": made.id}}) as stream:
        stream.get_final_response()
    messages: Any = [("user", "zero"), ("user", "one"), ("assistant", "one"), ("user", "two")]
    sent = [{"role": role, "content": text} for role, text in messages]
    alice.chat.completions.create(model=MODEL, messages=sent, temperature=0)  # type: ignore[arg-type]
    assert engine.requests[-2].prompt_token_ids == engine.requests[-1].prompt_token_ids
    assert texts(alice, made.id) == ["zero", "one", "one", "two", "two"]
    output = alice.conversations.items.retrieve(first.output[0].id, conversation_id=made.id)
    assert output.id == first.output[0].id


def test_a_response_needs_no_input_where_a_conversation_has_items(alice: OpenAI) -> None:
    made = alice.conversations.create(items=[user("zero")])
    assert alice.responses.input_tokens.count(model=MODEL, conversation=made.id).input_tokens > 0
    assert alice.responses.create(model=MODEL, temperature=0, conversation=made.id).output_text == "zero"
    assert texts(alice, made.id) == ["zero", "zero"]
    with pytest.raises(BadRequestError, match="input: it has no message"):
        alice.responses.create(model=MODEL)


def test_a_response_in_the_background_is_added_when_it_is_whole(alice: OpenAI) -> None:
    made = alice.conversations.create()
    asked: Any = {"model": MODEL, "temperature": 0, "conversation": made.id, "background": True}
    begun = alice.responses.create(input="SLOW one", **asked)
    assert texts(alice, made.id) == []
    assert wait_until(lambda: alice.responses.retrieve(begun.id).status == "completed")
    assert texts(alice, made.id) == ["SLOW one", "SLOW one"]
    hangs = alice.responses.create(input="HANG", **asked)
    alice.responses.cancel(hangs.id)
    assert len(texts(alice, made.id)) == 2, "what was cancelled is in no conversation"
    last = alice.responses.create(input="SLOW two", **asked)
    alice.conversations.delete(made.id)
    assert wait_until(lambda: alice.responses.retrieve(last.id).status == "completed")


def test_a_conversation_is_its_keys_alone(alice: OpenAI, bob: OpenAI) -> None:
    made = alice.conversations.create(items=[user("mine")])
    item = alice.conversations.items.list(made.id).data[0].id
    calls: Any = (
        lambda: bob.conversations.retrieve(made.id),
        lambda: bob.conversations.update(made.id, metadata={}),
        lambda: bob.conversations.delete(made.id),
        lambda: bob.conversations.items.list(made.id),
        lambda: bob.conversations.items.create(made.id, items=[user("b")]),
        lambda: bob.conversations.items.retrieve(item, conversation_id=made.id),
        lambda: bob.conversations.items.delete(item, conversation_id=made.id),
        lambda: bob.responses.create(model=MODEL, input="b", conversation=made.id),
    )
    for call in calls:
        with pytest.raises(NotFoundError):
            call()
    assert texts(alice, made.id) == ["mine"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"items": "x"}, "items"),
        ({"items": [{"type": "web_search_call"}]}, "items[0].type"),
        ({"items": [{"role": "user", "content": "a"}] * 21}, "items"),
        ({"items": [{"role": "king", "content": "a"}]}, "items[0].role"),
        ({"items": [3]}, "items[0]"),
        ({"metadata": {"a": 1}}, "metadata"),
    ],
)
def test_what_cannot_be_in_one_is_refused(server: Client, body: dict[str, Any], param: str) -> None:
    answer = server.post("/v1/conversations", body, Authorization="Bearer key-of-alice")
    assert (answer.status, answer.error["param"]) == (400, param), answer.body


def test_a_response_has_one_past_and_is_stored(alice: OpenAI) -> None:
    made = alice.conversations.create()
    first = alice.responses.create(model=MODEL, input="one")
    for more, text in (
        ({"previous_response_id": first.id}, "send one of them"),
        ({"store": False}, "what a conversation has is stored"),
    ):
        with pytest.raises(BadRequestError, match=text):
            alice.responses.create(model=MODEL, input="a", conversation=made.id, **more)  # type: ignore[call-overload]


def test_without_a_store_there_is_none(base_url: str) -> None:
    with OpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as openai:
        with pytest.raises(BadRequestError, match="start the server with --store PATH"):
            openai.conversations.create()
        with pytest.raises(BadRequestError, match="conversation: nothing is stored here"):
            openai.responses.create(model=MODEL, input="a", conversation="conv_x")


def test_items_are_sealed_and_still_there_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "read_seal", lambda path: Seal(Xor()))
    options: Any = {"store": str(tmp_path / "s.db"), "api_key": ("alice:key-of-alice",)}
    with serving(fake_front(), **options) as client, client_of(client, "key-of-alice") as alice:
        made = alice.conversations.create(items=[user("a secret of mine")])
        alice.responses.create(model=MODEL, input="another secret", conversation=made.id)
    whole = b"".join(file.read_bytes() for file in tmp_path.glob("s.db*"))
    assert b"secret" not in whole
    with serving(fake_front(), **options) as client, client_of(client, "key-of-alice") as alice:
        assert texts(alice, made.id) == ["a secret of mine", "another secret", "another secret"]
