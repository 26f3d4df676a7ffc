"""`--stream-interval`: fewer events that say the same, in every API that streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.conftest import Client, serving
from tests.server.fake import EchoLoop, fake_front
from tests.server.openai.speaking import TOOLS, SpeakingTemplate, said_call
from tests.server.real_engine import engine_front

TEXT = "Hello, reader"
USAGE = {"include_usage": True}
SAID = f"<think>\nFirst, hm.\n</think>\n\nThe answer {said_call('clock', '{}')}"


@pytest.fixture(scope="module")
def both() -> Iterator[tuple[Client, Client]]:
    """Servers that send every token, and every fourth."""
    with serving(fake_front()) as each, serving(fake_front(), stream_interval=4) as fourth:
        yield each, fourth


@pytest.fixture(scope="module")
def speaking() -> Iterator[tuple[Client, Client]]:
    fronts = [fake_front(template=SpeakingTemplate()) for _ in range(2)]
    with serving(fronts[0]) as each, serving(fronts[1], stream_interval=4) as fourth:
        yield each, fourth


def choices(client: Client, path: str, **asked: Any) -> list[dict[str, Any]]:
    answer = client.post(path, {"model": client.model, "stream": True, "temperature": 0, **asked})
    assert answer.status == 200, answer.body
    return [choice for event in answer.events for choice in event["choices"]]


def completion(client: Client, text: str = TEXT, **asked: Any) -> list[dict[str, Any]]:
    return choices(client, "/v1/completions", **{"prompt": text, "max_tokens": 40, **asked})


def chat(client: Client, text: str = TEXT, **asked: Any) -> list[dict[str, Any]]:
    return choices(client, "/v1/chat/completions", messages=[{"role": "user", "content": text}], **asked)


def texts(found: list[dict[str, Any]], index: int = 0) -> list[str]:
    return [choice["text"] for choice in found if choice["index"] == index]


def joined(found: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of the chunks of a completion's one choice."""
    made: dict[str, Any] = {"text": "", "token_ids": []}
    for choice in found:
        made["text"] += choice["text"]
        made["token_ids"] += choice.get("token_ids") or []
        for name, values in (choice["logprobs"] or {}).items():
            made.setdefault(name, []).extend(values)
    return {**made, "finish": found[-1]["finish_reason"], "stop": found[-1].get("stop_reason")}


def test_the_first_token_goes_out_at_once_and_the_rest_by_fours(both: tuple[Client, Client]) -> None:
    each, fourth = (completion(client) for client in both)
    assert texts(each) == [*TEXT, ""]
    assert texts(fourth) == ["H", "ello", ", re", "ader", ""]
    for choice in each, fourth:
        assert [one["finish_reason"] for one in choice] == [None] * (len(choice) - 1) + ["stop"]
    assert texts(completion(both[1], max_tokens=11)) == ["H", "ello", ", re", "ad"]
    assert texts(completion(both[1], max_tokens=1)) == ["H"]


@pytest.mark.parametrize(
    "asked",
    [
        {"logprobs": 2, "return_token_ids": True},
        {"logprobs": 1, "echo": True},
        {"echo": True, "max_tokens": 6},
        {"stop": ["llo"], "return_token_ids": True},
        {"stop": ["o, r"], "include_stop_str_in_output": True, "logprobs": 0},
        {"stop": ["reader!"]},
        {"prompt": "é文🦜 half", "return_token_ids": True, "logprobs": 0},
    ],
)
def test_the_text_is_the_same(both: tuple[Client, Client], asked: dict[str, Any]) -> None:
    each, fourth = (completion(client, **asked) for client in both)
    assert joined(fourth) == joined(each)
    assert len(fourth) < len(each)


def test_usage_is_the_same_and_comes_with_every_chunk_if_requested(both: tuple[Client, Client]) -> None:
    asked = {"prompt": TEXT, "max_tokens": 11, "stream": True}
    last = []
    for client, counts in zip(both, ([*range(1, 12)], [1, 5, 9, 11]), strict=True):
        options = {**USAGE, "continuous_usage_stats": True}
        *chunks, end = client.post("/v1/completions", {**asked, "stream_options": options}).events
        assert [chunk["usage"]["completion_tokens"] for chunk in chunks] == counts
        last.append(end["usage"])
    assert last[0] == last[1]


def test_each_choice_of_each_prompt_is_counted_by_itself(both: tuple[Client, Client]) -> None:
    each, fourth = (completion(client, prompt=["abcdefg", "xyz"], n=2) for client in both)
    for index in range(4):
        assert "".join(texts(each, index)) == "".join(texts(fourth, index))
    assert texts(fourth, 0) == ["a", "bcde", "fg"]
    assert texts(fourth, 1) == ["b", "cdef", "ga"]
    assert texts(fourth, 2) == ["x", "yz"]


def test_a_stop_string_ends_the_generation_at_once() -> None:
    front = fake_front()
    assert isinstance(front.loop, EchoLoop)
    with serving(front, stream_interval=256) as client:
        found = completion(client, "SLOW and steady", stop=["an"], max_tokens=2000, ignore_eos=True)
        assert texts(found) == ["S", "LOW "]
        assert client.get("/health").json["engine"]["running"] == 0


def test_a_chat_that_thinks_and_calls_says_the_same(speaking: tuple[Client, Client]) -> None:
    for more in {}, {"include_reasoning": False}, {"parallel_tool_calls": False}:
        asked = {"tools": TOOLS, "logprobs": True, "return_token_ids": True, **more}
        each, fourth = (_message(chat(client, SAID, **asked)) for client in speaking)
        assert fourth.pop("count") < 0.7 * each.pop("count")
        assert fourth == each
        assert (each["content"], each["calls"]) == ("The answer", "clock{}")
        assert each["reasoning_content"] == ("" if more.get("include_reasoning") is False else "First, hm.")


def _message(found: list[dict[str, Any]]) -> dict[str, Any]:
    made: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": "", "count": len(found)}
    made |= {"ids": [], "logprobs": [], "finish": found[-1]["finish_reason"]}
    for choice in found:
        for name in ("content", "reasoning_content"):
            made[name] += choice["delta"].get(name) or ""
        for call in choice["delta"].get("tool_calls", ()):
            made["calls"] += call["function"].get("name", "") + call["function"].get("arguments", "")
        made["ids"] += choice.get("token_ids") or ()
        made["logprobs"] += (choice["logprobs"] or {}).get("content") or ()
    return made


@pytest.mark.parametrize(
    ("path", "asked", "kind", "part"),
    [
        ("/v1/responses", {"input": TEXT}, "response.output_text.delta", ("delta",)),
        (
            "/v1/messages",
            {"messages": [{"role": "user", "content": TEXT}], "max_tokens": 40},
            "content_block_delta",
            ("delta", "text"),
        ),
    ],
)
def test_other_apis_keep_the_pace(
    both: tuple[Client, Client], path: str, asked: dict[str, Any], kind: str, part: tuple[str, ...]
) -> None:
    for client, pieces in zip(both, ([*TEXT], ["H", "ello", ", re", "ader"]), strict=True):
        found = []
        for event in client.post(path, {**asked, "stream": True}).named_events:
            if event["type"] == kind:
                piece: Any = event
                for key in part:
                    piece = piece[key]
                found.append(piece)
        assert found == pieces


def test_logprobs_of_a_response_are_those_of_its_text(speaking: tuple[Client, Client]) -> None:
    asked = {"input": SAID, "include": ["message.output_text.logprobs"], "stream": True}
    done = []
    for client in speaking:
        events = client.post("/v1/responses", asked).named_events
        done.append([e["logprobs"] for e in events if e["type"] == "response.output_text.done"])
    assert done[0] == done[1]
    assert done[0][0]


def test_a_failure_comes_after_the_text_so_far(both: tuple[Client, Client]) -> None:
    answer = both[1].post("/v1/completions", {"prompt": "BOOM, it says", "stream": True})
    *chunks, error = answer.events
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "BOO"
    assert "error" in error


def test_a_reply_that_is_not_streamed_is_as_ever(both: tuple[Client, Client]) -> None:
    each, fourth = (client.complete(TEXT, max_tokens=40, logprobs=1).json["choices"] for client in both)
    assert each == fourth


def test_the_engine_as_it_is_keeps_the_pace() -> None:
    found = []
    for interval in (1, 8):
        with serving(engine_front(), stream_interval=interval) as client:
            found.append(completion(client, "Stay", max_tokens=30, ignore_eos=True, logprobs=2))
    each, eighth = found
    assert joined(each) == joined(eighth)
    assert [len(one["logprobs"]["tokens"]) for one in eighth] == [1, 8, 8, 8, 5]
