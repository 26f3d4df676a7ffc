"""An event for every so many tokens: the same tokens in each, whichever reader is late, and nothing lost."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.frontend.deltas import Delta, Gathered, TokenInterval
from plait.frontend.output_stream import OutputStream
from plait.request import Event, FinishReason, Request, SamplingParams
from plait.text.output import Arguments, CallEnd, CallStart, Content, OutputDelta, Reasoning
from tests.patience import PATIENCE_S
from tests.server.fake import ByteTokenizer

TEXT = "Hello, reader"


class Desk:
    """Takes the place of the event-loop bridge: records each event, and delivers it at once."""

    def __init__(self) -> None:
        self.brought: list[Event] = []

    def of(self, loop: object) -> Desk:
        return self

    def put(self, inbox: asyncio.Queue[Event], event: Event) -> None:
        self.brought.append(event)
        inbox.put_nowait(event)


def event(text: str = "", finish: FinishReason | None = None, index: int = 0) -> Event:
    return Event("r", index, tuple(text.encode()), finish_reason=finish)


def events(text: str, n: int = 1) -> list[Event]:
    spoken = [event(one, index=index) for one in text for index in range(n)]
    return [*spoken, *(event(finish="stop", index=index) for index in range(n))]


def stream(interval: int, desk: Desk | None = None, n: int = 1, stop: tuple[str, ...] = ()) -> OutputStream:
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, n=n, stop=stop)
    made = OutputStream(Request("r", (1,), params), ByteTokenizer(), lambda *_: None, bridges=desk)  # type: ignore[arg-type]
    made.gather(interval)
    return made


def told(asked: OutputStream, happening: Sequence[Event], num_early: int) -> list[Delta]:
    """The deltas of a reader that gets `num_early` of the events together, and the others one by one."""

    async def tell() -> list[Delta]:
        for one in happening[:num_early]:
            asked.on_event(one)
        found: list[Delta] = []

        async def read() -> None:
            async for delta in asked:
                found.append(delta)

        reading = asyncio.ensure_future(read())
        for one in happening[num_early:]:
            await asyncio.sleep(0)
            asked.on_event(one)
        await asyncio.wait_for(reading, PATIENCE_S)
        return found

    return asyncio.run(tell())


@pytest.mark.parametrize("num_early", [0, 1, 3, 6, 13])
def test_a_delta_has_the_same_tokens_however_late_its_reader_comes(num_early: int) -> None:
    found = told(stream(4, Desk()), events(TEXT), num_early)
    assert [delta.text for delta in found] == ["H", "ello", ", re", "ader", ""]
    assert [delta.num_tokens for delta in found] == [1, 5, 9, 13, 13]
    found = told(stream(5, Desk()), events(TEXT), num_early)
    assert [delta.text for delta in found] == ["H", "ello,", " read", "er"]  # the end waits for nothing


def test_a_reader_is_woken_for_what_is_due_and_no_earlier() -> None:
    desk = Desk()
    asked, counts = stream(4, desk), list[int]()

    async def tell() -> None:
        reading = asyncio.ensure_future(anext(aiter(asked)))
        await asyncio.sleep(0)
        for one in events(TEXT):
            asked.on_event(one)
            counts.append(len(desk.brought))
            await asyncio.sleep(0)  # the first is read: until a delta was emitted, every token wakes
        await reading

    asyncio.run(tell())
    assert counts == [1, 1, 1, 1, 5, 5, 5, 5, 9, 9, 9, 9, 13, 14]


def test_where_text_may_end_a_choice_its_reader_is_woken_for_every_token() -> None:
    desk, cancelled = Desk(), list[tuple[str, int | None]]()
    params = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, stop=("o, r",))
    asked = OutputStream(
        Request("r", (1,), params),
        ByteTokenizer(),  # type: ignore[arg-type]
        lambda *who: cancelled.append(who),
        bridges=desk,  # type: ignore[arg-type]
    )
    asked.gather(4)
    spoken = [event(one) for one in "Hello, r"]  # no more: had it waited for another token, it would hang
    found = told(asked, spoken, 0)
    assert [delta.text for delta in found] == ["H", "ell", ""]
    assert (found[-1].finish_reason, found[-1].stop_reason) == ("stop", "o, r")
    assert cancelled == [("r", 0)]
    assert len(desk.brought) == 8


def test_each_choice_has_a_pace_of_its_own() -> None:
    happening = [event("a"), event("b", index=1), event("aa"), event("bbbb", index=1)]
    happening += [event("aa"), event(finish="stop", index=1), event("a", "length")]
    found = told(stream(4, Desk(), n=2), happening, 0)
    assert [d.text for d in found if d.index == 0] == ["a", "aaaa", "a"]
    assert [d.text for d in found if d.index == 1] == ["b", "bbbb", ""]


def test_several_tokens_of_a_step_count_as_several() -> None:
    pace = TokenInterval(4)
    assert [pace.is_due(event("x" * count)) for count in (3, 1, 2, 3, 3, 1)] == [
        *(True, False, False, True),
        *(False, True),
    ]


def test_text_so_far_is_emitted_before_a_failure_is() -> None:
    failure = event(finish="error")
    found = told(stream(8, Desk()), [*events("abcd")[:-1], failure], 0)
    assert [(d.text, d.finish_reason) for d in found] == [("a", None), ("bcd", None), ("", "error")]


PARTS: list[tuple[OutputDelta, ...]] = [
    (Reasoning("hm"),),
    (Content("so"),),
    (CallStart(0, "id", "f"),),
    (Arguments(0, "{}"),),
    (CallEnd(0, True),),
    (Reasoning("."), Content("!")),
    (),
]


@given(st.lists(st.tuples(st.sampled_from(PARTS), st.integers(1, 3)), max_size=12), st.integers(2, 5))
def test_thinking_content_and_calls_are_distinguished(
    made: list[tuple[tuple[OutputDelta, ...], int]], interval: int
) -> None:
    gathered, found, single = Gathered(interval), list[Delta](), list[Delta]()
    for i, (parts, count) in enumerate(made):
        ids = tuple(range(i, i + count))
        text = "".join(part.text for part in parts if isinstance(part, Content))
        single.append(Delta(0, text, ids, parts=parts, num_cached_tokens=i % 2))
        found += gathered.push(Event("r", 0, ids), single[-1])
    single.append(Delta(0, "", finish_reason="stop"))
    found += gathered.push(Event("r", 0, finish_reason="stop"), single[-1])
    for field in ("text", "token_ids"):
        before, after = ([x for d in some for x in getattr(d, field)] for some in (single, found))
        assert before == after
    by_token = {
        i: _kinds(delta) for delta in single for i in delta.token_ids if len(set(delta.token_ids)) == 1
    }
    assert all(
        by_token.get(i, _kinds(delta)) == _kinds(delta) for delta in found for i in delta.token_ids[:1]
    )
    assert len(found) <= len(single)
    assert found[-1].finish_reason == "stop"


def _kinds(delta: Delta) -> set[str]:
    names = {Content: "content", Reasoning: "thinking"}
    return {names.get(type(part), "call") for part in delta.parts} or {"content"}


def test_the_first_text_does_not_wait_for_tokens_that_say_nothing() -> None:
    """Half a character, a marker of thinking: the first token may bring no delta."""
    held = Gathered(8)
    silent = [held.push(event("x"), None) for _ in range(3)]
    assert silent == [[], [], []]
    assert [d.text for d in held.push(event("x"), Delta(0, "first"))] == ["first"]
    later = [held.push(event("x"), Delta(0, str(i))) for i in range(8)]
    assert [[d.text for d in found] for found in later if found] == [
        ["01234"]
    ]  # as the side that wakes counts


def test_a_reader_is_woken_for_every_token_until_something_was_emitted() -> None:
    desk = Desk()
    asked = stream(8, desk)

    async def read() -> list[str]:
        deltas = aiter(asked)
        half = "é".encode()
        reading = asyncio.ensure_future(anext(deltas))
        await asyncio.sleep(0)
        asked.on_event(Event("r", 0, (half[0],)))
        asked.on_event(Event("r", 0, (half[1],)))
        first = (await reading).text
        for one in events("12345678"):
            asked.on_event(one)
        return [first, *[d.text async for d in deltas]]

    assert "".join(asyncio.run(read())) == "é12345678"
    assert [len(e.token_ids) for e in desk.brought[:2]] == [1, 1]
