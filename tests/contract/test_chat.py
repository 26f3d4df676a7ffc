"""The wire contract of /v1/chat/completions."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
from openai import AsyncOpenAI, BadRequestError, NotFoundError, OpenAI

ASK: Any = [{"role": "user", "content": "Say something with é and 漢字."}]


def test_a_chat_response_has_every_required_key(client: Any) -> None:
    """Points 18, 19 and 21."""
    found = client.chat(max_tokens=5).json
    assert found["id"].startswith("chatcmpl-")
    assert found["id"].replace("-", "").isalnum()
    assert found["object"] == "chat.completion"
    assert isinstance(found["created"], int)
    assert found["model"] == client.model
    (choice,) = found["choices"]
    assert choice["index"] == 0
    assert choice["logprobs"] is None
    assert choice["finish_reason"] in {"stop", "length"}
    assert choice["message"]["role"] == "assistant"
    assert isinstance(choice["message"]["content"], str)
    assert choice["message"]["refusal"] is None
    assert "tool_calls" not in choice["message"]


def test_usage_adds_up(client: Any) -> None:
    """Point 22."""
    one, three = client.chat(max_tokens=5).json["usage"], client.chat(max_tokens=5, n=3).json["usage"]
    for usage in (one, three):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        assert 0 <= usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert one["prompt_tokens"] == three["prompt_tokens"]
    assert three["completion_tokens"] >= one["completion_tokens"]


def test_roles_come_first_and_once(client: Any) -> None:
    """Points 7, 9, 10 and 14."""
    seen: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for chunk in client.chat(stream=True, n=3, max_tokens=6, temperature=1, seed=1).events:
        (choice,) = chunk["choices"]
        assert {"index", "delta", "finish_reason"} <= set(choice)
        seen[choice["index"]].append(choice)
    assert sorted(seen) == [0, 1, 2]
    for first, *others in seen.values():
        assert first["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in others)
        assert others[-1]["delta"] == {}
        assert others[-1]["finish_reason"] in {"stop", "length"}
        assert all(choice["finish_reason"] is None for choice in [first, *others[:-1]])


@pytest.mark.parametrize("n", [1, 2])
def test_a_stream_says_what_the_whole_says(openai: OpenAI, client: Any, n: int) -> None:
    """Point 13."""
    asked: Any = {"model": client.model, "messages": ASK, "temperature": 0, "n": n, "max_tokens": 24}
    whole = openai.chat.completions.create(**asked)
    said = [""] * n
    for chunk in openai.chat.completions.create(**asked, stream=True):
        said[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
    assert said == [choice.message.content for choice in whole.choices]


async def ask_in_parallel(base_url: str, model: str) -> list[str]:
    import asyncio

    async with AsyncOpenAI(base_url=base_url + "/v1", api_key="none", max_retries=0) as openai:

        async def one() -> str:
            chunks = await openai.chat.completions.create(
                model=model, messages=ASK, temperature=0, max_tokens=12, stream=True
            )
            return "".join([c.choices[0].delta.content or "" async for c in chunks])

        return await asyncio.gather(*(one() for _ in range(8)))


def test_equal_requests_at_once_get_equal_answers(base_url: str, client: Any) -> None:
    """Point 50."""
    import asyncio

    said = asyncio.run(ask_in_parallel(base_url, client.model))
    assert len(set(said)) == 1


def test_one_token_is_role_content_end(client: Any) -> None:
    """Point 15."""
    choices = [c["choices"][0] for c in client.chat("Hi", stream=True, max_tokens=1).events]
    assert choices[0]["delta"]["role"] == "assistant"
    assert choices[-1]["finish_reason"] in {"length", "stop"}
    assert len(choices) <= 3


def test_logprobs_cover_the_content(client: Any) -> None:
    """Points 39 and 40."""
    choice = client.chat(max_tokens=6, logprobs=True, top_logprobs=4).json["choices"][0]
    content = choice["logprobs"]["content"]
    assert bytes(b for one in content for b in one["bytes"]).decode() == choice["message"]["content"]
    for one in content:
        values = [other["logprob"] for other in one["top_logprobs"]]
        assert len(values) == 4
        assert values == sorted(values, reverse=True)
        assert all(-9999.0 <= value <= 0 for value in [*values, one["logprob"]])
        assert {"token", "logprob", "bytes"} == set(one["top_logprobs"][0])


def test_logprobs_without_alternatives(client: Any) -> None:
    """Point 39."""
    content = client.chat(max_tokens=3, logprobs=True).json["choices"][0]["logprobs"]["content"]
    assert content
    assert all(one["top_logprobs"] == [] for one in content)


def test_a_streams_logprobs_are_those_of_its_text(client: Any) -> None:
    """Point 41."""
    asked: Any = {"max_tokens": 8, "logprobs": True, "top_logprobs": 2}
    whole = client.chat(**asked).json["choices"][0]
    text, content = "", []
    for chunk in client.chat(stream=True, **asked).events:
        choice = chunk["choices"][0]
        text += choice["delta"].get("content", "")
        content += (choice["logprobs"] or {"content": []})["content"]
    assert text == whole["message"]["content"]
    assert content == whole["logprobs"]["content"]


@pytest.mark.parametrize("wrong", [{"top_logprobs": 2}, {"logprobs": True, "top_logprobs": 21}])
def test_top_logprobs_are_refused_by_name(client: Any, wrong: dict[str, Any]) -> None:
    """Point 41."""
    answer = client.chat(**wrong)
    assert answer.status == 400
    assert answer.error["param"] == "top_logprobs"


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ({"content": "x"}, "messages[0].role"),
        ({"role": "wizard", "content": "x"}, "messages[0].role"),
        ({"role": 3, "content": "x"}, "messages[0].role"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url"}]}, "messages[0].content[0]"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[0].content[0].text"),
        ({"role": "user", "content": [{"type": "thinking", "thinking": "x"}]}, "messages[0].content"),
        ({"role": "assistant", "content": [{"type": "thinking"}]}, "messages[0].content[0].thinking"),
        ("hello", "messages[0]"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": 5}, "messages[0].tool_calls"),
        ({"role": "assistant", "tool_calls": [{"id": "a"}]}, "messages[0].tool_calls[0]"),
    ],
)
def test_a_wrong_message_is_named(client: Any, message: Any, param: str) -> None:
    """Point 61."""
    answer = client.post("/v1/chat/completions", {"messages": [message]})
    assert answer.status == 400
    assert answer.error["param"] == param


@pytest.mark.parametrize("body", [{}, {"messages": []}, {"messages": None}, {"messages": "hi"}])
def test_messages_are_required(client: Any, body: Any) -> None:
    """Point 61."""
    answer = client.post("/v1/chat/completions", body)
    assert answer.status == 400
    assert answer.error["param"] == "messages"


def test_one_text_block_is_as_good_as_the_text(client: Any) -> None:
    """Point 62."""
    parts = client.chat([{"type": "text", "text": "Hello there"}], max_tokens=8).json
    assert parts["choices"] == client.chat("Hello there", max_tokens=8).json["choices"]


@pytest.mark.parametrize("value", [0, -1])
def test_no_tokens_at_all_is_refused(client: Any, value: int) -> None:
    """Point 48."""
    answer = client.chat(max_completion_tokens=value)
    assert answer.status == 400
    assert answer.error["param"] == "max_completion_tokens"


def test_max_completion_tokens_wins(client: Any) -> None:
    """Point 48."""
    usage = client.chat("Hello there", max_completion_tokens=2, max_tokens=7, ignore_eos=True).json["usage"]
    assert usage["completion_tokens"] == 2


def test_too_many_tokens_are_clamped_to_the_context(client: Any) -> None:
    """Point 48."""
    assert client.chat("Hi", max_tokens=10**9, stop=["H", "h", "e", " "]).status == 200


def test_the_openai_client_raises_what_it_should(openai: OpenAI, client: Any) -> None:
    """Points 56 and 65."""
    with pytest.raises(NotFoundError) as missing:
        openai.chat.completions.create(model="nobody", messages=ASK)
    assert missing.value.code == "model_not_found"
    assert missing.value.param == "model"
    with pytest.raises(BadRequestError) as wrong:
        openai.chat.completions.create(model=client.model, messages=ASK, temperature=3)
    assert wrong.value.param == "temperature"
    assert wrong.value.request_id


@pytest.mark.parametrize(
    "extra",
    [
        {"tool_choice": "required"},
        {"functions": [{"name": "f"}]},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "sound"}},
        {"modalities": ["audio"]},
        {"moderation": {"model": "m"}},
        {"guided_json": {"if": {}}},
        {"chat_template": "{{ 1 }}"},
        {"chat_template_kwargs": {"messages": []}},
        {"num_ctx": 4},
        {"best_of": 2, "n": 3},
        {"best_of": 4, "stream": True},
        {"best_of": 4, "n": 2, "stream": True},
        {"cache_salt": ""},
        {"timeout_s": 0},
        {"add_special_tokens": True},
        {"echo": True},
        {"stream_options": {"include_usage": True, "include_obfuscation": True}, "stream": True},
        {"stream_options": {"continuous_usage_stats": True}, "stream": True},
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(client: Any, extra: dict[str, Any]) -> None:
    answer = client.chat(max_tokens=1, **extra)
    assert answer.status == 400
    assert answer.error["param"].split(".")[0] == next(iter(extra))


@pytest.mark.parametrize(
    "extra",
    [
        {"tools": [], "tool_choice": "none", "functions": []},
        {"response_format": {"type": "text"}},
        {"modalities": ["text"], "verbosity": "medium"},
        {"user": "me", "store": True, "metadata": {"a": "b"}, "service_tier": "auto"},
        {"safety_identifier": "x", "prompt_cache_key": "y", "best_of": 1},
        {"best_of": 2, "n": 2, "stream": True},
        {"cache_salt": "tenant 7", "priority": -3, "timeout_s": 900},
        {"cache_salt": None, "priority": None, "timeout_s": None, "best_of": None},
        {"tool_choice": None, "stop": None, "n": None, "stream": None, "logprobs": None, "seed": None},
        {"stream_options": None, "logit_bias": None, "top_p": None, "tools": None, "temperature": None},
        {"stop": []},
    ],
)
def test_what_changes_nothing_is_accepted(client: Any, extra: dict[str, Any]) -> None:
    """Points 63 and 64."""
    answer = client.chat(max_tokens=1, **extra)
    assert answer.status == 200, answer.body


def test_unread_fields_are_reported(client: Any) -> None:
    """Point 63."""
    answer = client.chat(max_tokens=1, **{"user": "me", "zzz\r\nSet-Cookie: é": 1, "top_k": 1})
    assert answer.headers["x-plait-ignored"] == "user,zzz??Set-Cookie???"
    assert "x-plait-ignored" not in client.chat(max_tokens=1, top_k=1).headers


def test_ids_are_unique(client: Any) -> None:
    """Point 24."""
    assert len({client.chat(max_tokens=1).json["id"] for _ in range(20)}) == 20


def test_best_of_returns_the_most_likely_reply(client: Any) -> None:
    asked: Any = {"content": "abcdefgh", "temperature": 1, "seed": 3, "max_tokens": 3}
    every = client.chat(n=5, logprobs=True, **asked).json
    found = client.chat(best_of=5, **asked).json
    lists = [[lp["logprob"] for lp in choice["logprobs"]["content"]] for choice in every["choices"]]
    means = [sum(values) / len(values) for values in lists]
    (choice,) = found["choices"]
    assert choice["message"] == every["choices"][means.index(max(means))]["message"]
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert found["usage"]["completion_tokens"] == every["usage"]["completion_tokens"]


def test_without_a_limit_a_reply_may_use_the_rest_of_the_context(client: Any) -> None:
    """Points 47 and 48. Not 16 tokens; and the end of the context is `length`."""
    room = 8
    limit = client.get("/v1/models").json["data"][0]["max_model_len"]
    ids = client.post("/tokenize", {"prompt": "Hello"}).json["tokens"][-1:]
    text = client.post("/detokenize", {"tokens": ids * (limit - 120)}).json["prompt"]
    used = client.post("/tokenize", {"messages": [{"role": "user", "content": text}]}).json["count"]
    text += client.post("/detokenize", {"tokens": ids * (limit - used - room)}).json["prompt"]
    found = client.chat(text, ignore_eos=True).json
    assert found["usage"]["total_tokens"] == limit
    assert found["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("field", ["reasoning_content", "reasoning"])
def test_a_history_may_hold_reasoning(client: Any, field: str) -> None:
    """Point 17. Under either name."""
    messages = [
        {"role": "user", "content": "Two and two?"},
        {"role": "assistant", "content": "Four.", field: "2 + 2 = 4"},
        {"role": "user", "content": "And three?"},
    ]
    answer = client.post("/v1/chat/completions", {"messages": messages, "max_tokens": 2})
    assert answer.status == 200, answer.body


def test_joined_parts_are_the_joined_text(client: Any) -> None:
    """Point 62. Each part is a line of its own, as in vLLM."""
    parts = [{"type": "text", "text": "Hello"}, {"type": "text", "text": "there"}]
    found = client.post("/tokenize", {"messages": [{"role": "user", "content": parts}]}).json
    plain = client.post("/tokenize", {"messages": [{"role": "user", "content": "Hello\nthere"}]}).json
    assert found == plain


def test_a_reply_goes_on_from_the_last_message(client: Any) -> None:
    """The words of the assistant are the end of the prompt, and the reply is what follows them."""
    asked = [{"role": "user", "content": "Say it."}, {"role": "assistant", "content": "Once upon a"}]
    more = {"messages": asked, "continue_final_message": True}
    prompt = client.post("/apply-template", more).json["prompt"]
    assert prompt.endswith("Once upon a")
    ask = {"temperature": 0, "max_tokens": 6}
    found = client.post("/v1/chat/completions", {**more, **ask}).json
    ids = client.post("/tokenize", more).json["tokens"]
    plain = client.complete(ids, max_tokens=6, add_special_tokens=False).json
    assert found["choices"][0]["message"]["content"] == plain["choices"][0]["text"]
    assert found["usage"]["prompt_tokens"] == len(ids)
    for wrong in ({"add_generation_prompt": True}, {"messages": asked[:1]}):
        assert client.post("/v1/chat/completions", {**more, **wrong}).error["param"] in {
            "add_generation_prompt",
            "messages[0]",
        }
