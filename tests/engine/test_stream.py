"""Text from events: stop strings, half characters, log-probabilities, and leaving early."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from plait.engine.stream import Choice, Delta, Stream
from plait.request import Event, Request, SamplingParams, TokenLogprobs
from plait.text.builtin_tokenizer import builtin_tokenizer
from plait.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return builtin_tokenizer("cl100k_base")


def request(**params: object) -> Request:
    settings = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, **params)  # type: ignore[arg-type]
    return Request("r", (1,), settings)


def events(ids: Sequence[int], finish: str | None = "length", logprobs: bool = False) -> list[Event]:
    made = [Event("r", 0, (i,), (TokenLogprobs(i, -0.5, ((i, -0.5),)),) if logprobs else None) for i in ids]
    return [*made, Event("r", 0, finish_reason=finish)]  # type: ignore[arg-type]


def run(choice: Choice, happening: Sequence[Event]) -> list[Delta]:
    return [delta for event in happening if (delta := choice.push(event))]


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    text = "a 🦜 b 文字"
    ids = tokenizer.encode(text)
    deltas = run(Choice(0, request(), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == text
    assert all("\ufffd" not in d.text for d in deltas)
    assert [i for d in deltas for i in d.token_ids] == ids
    assert deltas[-1].num_tokens == len(ids)


def test_a_cut_character_shows_as_replacement_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜")[:-1]
    deltas = run(Choice(0, request(), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == "\ufffd"


def test_stop_string_over_token_borders(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three END four")
    deltas = run(Choice(0, request(stop=("ree EN",)), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == "one two th"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "ree EN")


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("wait for EN")
    deltas = run(Choice(0, request(stop=("END",)), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == "wait for EN"
    assert deltas[-1].finish_reason == "length"


def test_min_tokens_keeps_stop_strings_away(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b a b a b")
    deltas = run(Choice(0, request(stop=("b",), min_tokens=3), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == "a b a "


def test_logprobs_belong_to_the_text_they_come_with(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi 🦜 there")
    deltas = run(Choice(0, request(logprobs=1), tokenizer), events(ids, logprobs=True))
    shown = told = b""
    for delta in deltas:
        shown += delta.text.encode()
        told += b"".join(lp.bytes for lp in delta.logprobs or ())
        assert told.startswith(shown)  # a token may bring a character's first bytes along
        assert len(told) - len(shown) < 4
    assert told.decode() == "hi 🦜 there"
    assert sum(len(d.logprobs or ()) for d in deltas) == len(ids)


def test_without_a_tokenizer_there_are_token_ids() -> None:
    deltas = run(Choice(0, request(logprobs=0), None), events([5, 6, 7], logprobs=True))
    assert [i for d in deltas for i in d.token_ids] == [5, 6, 7]
    assert all(d.text == "" for d in deltas)


def test_a_stop_string_cancels_its_choice_only(tokenizer: Tokenizer) -> None:
    cancelled: list[tuple[str, int | None]] = []
    stream = Stream(request(n=2, stop=(".",)), tokenizer, lambda *who: cancelled.append(who))
    ids = tokenizer.encode("one. two")
    for token_id in ids:
        stream.on_event(Event("r", 1, (token_id,)))
    stream.on_event(Event("r", 1, finish_reason="cancelled"))
    stream.on_event(Event("r", 0, tuple(tokenizer.encode("fine"))))
    stream.on_event(Event("r", 0, finish_reason="length"))
    deltas = list(stream)
    assert cancelled == [("r", 1)]
    assert "".join(d.text for d in deltas if d.index == 1) == "one"
    assert "".join(d.text for d in deltas if d.index == 0) == "fine"
    assert [d.finish_reason for d in deltas if d.finish_reason] == ["stop", "length"]


def test_leaving_early_cancels(tokenizer: Tokenizer) -> None:
    cancelled: list[tuple[str, int | None]] = []
    stream = Stream(request(), tokenizer, lambda *who: cancelled.append(who))
    stream.on_event(Event("r", 0, tuple(tokenizer.encode("hello"))))
    for _ in stream:
        break
    assert cancelled == [("r", None)]


def test_async_reading_gives_the_same(tokenizer: Tokenizer) -> None:
    async def read() -> str:
        stream = Stream(request(), tokenizer, lambda *_: None)
        for event in events(tokenizer.encode("async text")):
            stream.on_event(event)
        return "".join([delta.text async for delta in stream])

    assert asyncio.run(read()) == "async text"
