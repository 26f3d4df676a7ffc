"""Text from events: stop strings, half characters, log-probabilities, and leaving early."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from plait.frontend.deltas import AT_ONCE, Delta, join_events
from plait.frontend.output_stream import ChoiceText, OutputStream
from plait.request import Event, FinishReason, Request, RequestTrace, SamplingParams, TokenLogprobs
from plait.text.tokenizers.builtin import builtin_tokenizer
from plait.text.tokenizers.tokenizer import Tokenizer
from tests.patience import PATIENCE_S


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return builtin_tokenizer("cl100k_base")


def request(**params: object) -> Request:
    settings = SamplingParams(temperature=0.0, top_p=1.0, top_k=0, **params)  # type: ignore[arg-type]
    return Request("r", (1,), settings)


def events(ids: Sequence[int], finish: str | None = "length", logprobs: bool = False) -> list[Event]:
    made = [Event("r", 0, (i,), (TokenLogprobs(i, -0.5, ((i, -0.5),)),) if logprobs else None) for i in ids]
    return [*made, Event("r", 0, finish_reason=finish)]  # type: ignore[arg-type]


def ended_trace(index: int, finish: FinishReason, num_output_tokens: int = 0) -> RequestTrace:
    return RequestTrace(
        request_id="r",
        index=index,
        arrival_s=0.0,
        first_scheduled_s=None,
        first_token_s=None,
        finish_s=1.0,
        finish_reason=finish,
        num_prompt_tokens=1,
        num_output_tokens=num_output_tokens,
    )


def run(choice: ChoiceText, happening: Sequence[Event]) -> list[Delta]:
    return [delta for event in happening if (delta := choice.push(event))]


def test_half_a_character_is_never_shown(tokenizer: Tokenizer) -> None:
    text = "a 🦜 b 文字"
    ids = tokenizer.encode(text)
    deltas = run(ChoiceText(0, request(), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == text
    assert all("\ufffd" not in d.text for d in deltas)
    assert [i for d in deltas for i in d.token_ids] == ids
    assert deltas[-1].num_tokens == len(ids)


def test_a_cut_character_shows_as_replacement_at_the_end_only(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🦜")[:-1]
    deltas = run(ChoiceText(0, request(), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == "\ufffd"


def test_stop_string_over_token_borders(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one two three END four")
    deltas = run(ChoiceText(0, request(stop=("ree EN",)), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == "one two th"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "ree EN")


def test_text_held_back_for_a_stop_string_comes_out_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("wait for EN")
    deltas = run(ChoiceText(0, request(stop=("END",)), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == "wait for EN"
    assert deltas[-1].finish_reason == "length"


def test_min_tokens_keeps_stop_strings_away(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a b a b a b")
    deltas = run(ChoiceText(0, request(stop=("b",), min_tokens=3), tokenizer), events(ids))
    assert "".join(d.text for d in deltas) == "a b a "


def test_logprobs_belong_to_the_text_they_come_with(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("hi 🦜 there")
    deltas = run(ChoiceText(0, request(logprobs=1), tokenizer), events(ids, logprobs=True))
    shown = told = b""
    for delta in deltas:
        shown += delta.text.encode()
        told += b"".join(lp.bytes for lp in delta.logprobs or ())
        assert told.startswith(shown)  # a token may bring a character's first bytes along
        assert len(told) - len(shown) < 4
    assert told.decode() == "hi 🦜 there"
    assert sum(len(d.logprobs or ()) for d in deltas) == len(ids)


def test_without_a_tokenizer_there_are_token_ids() -> None:
    deltas = run(ChoiceText(0, request(logprobs=0), None), events([5, 6, 7], logprobs=True))
    assert [i for d in deltas for i in d.token_ids] == [5, 6, 7]
    assert all(d.text == "" for d in deltas)


def test_a_stop_string_cancels_its_choice_only(tokenizer: Tokenizer) -> None:
    cancelled: list[tuple[str, int | None]] = []
    stream = OutputStream(request(n=2, stop=(".",)), tokenizer, lambda *who: cancelled.append(who))
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


def test_a_trace_has_no_tokens_behind_a_stop_string(tokenizer: Tokenizer) -> None:
    stream = OutputStream(request(n=2, stop=(".",)), tokenizer, lambda *_: None)
    ids, fine = tokenizer.encode("one. two three"), tokenizer.encode("fine")
    for index, made in enumerate((ids, fine)):
        stream.on_event(Event("r", index, tuple(made)))
        end = ended_trace(index, "length", num_output_tokens=len(made))
        stream.on_event(Event("r", index, finish_reason="length", trace=end))
    last = {delta.index: delta for delta in stream if delta.finish_reason}
    assert last[0].num_tokens < len(ids)
    for index in (0, 1):
        trace, listed = stream.trace(index), stream.traces[index]
        assert trace == listed
        assert trace is not None
        assert trace.num_output_tokens == last[index].num_tokens


def test_leaving_early_cancels(tokenizer: Tokenizer) -> None:
    cancelled: list[tuple[str, int | None]] = []
    stream = OutputStream(request(), tokenizer, lambda *who: cancelled.append(who))
    stream.on_event(Event("r", 0, tuple(tokenizer.encode("hello"))))
    for _ in stream:
        break
    assert cancelled == [("r", None)]


def test_async_reading_gives_the_same(tokenizer: Tokenizer) -> None:
    async def read() -> str:
        stream = OutputStream(request(), tokenizer, lambda *_: None)
        for event in events(tokenizer.encode("async text")):
            stream.on_event(event)
        return "".join([delta.text async for delta in stream])

    assert asyncio.run(read()) == "async text"


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.lists(st.integers(0, 9), max_size=3), st.booleans()), max_size=12
    )
)
def test_joined_events_say_the_same_in_fewer(made: list[tuple[int, list[int], bool]]) -> None:
    ended: set[int] = set()
    given_events = []
    for index, ids, is_end in made:
        if index not in ended:
            scores = tuple(TokenLogprobs(i, -1.0, ()) for i in ids)
            finish = "length" if is_end else None
            given_events.append(Event("r", index, tuple(ids), scores, finish_reason=finish))  # type: ignore[arg-type]
            ended |= {index} if is_end else set()
    told = join_events(given_events)
    for index in (0, 1):
        own = [e for e in told if e.index == index]
        assert all(b.finish_reason for _, b in pairwise(own)), "two that could be one"
    for index in (0, 1):
        before, after = ([e for e in some if e.index == index] for some in (given_events, told))
        for field in ("token_ids", "logprobs"):
            assert sum((getattr(e, field) for e in before), ()) == sum((getattr(e, field) for e in after), ())
        assert [e.finish_reason for e in before][-1:] == [e.finish_reason for e in after][-1:]


def test_long_texts_are_read_in_chunks() -> None:
    told = join_events([Event("r", 0, (i,)) for i in range(2 * AT_ONCE + 1)])
    assert [len(e.token_ids) for e in told] == [AT_ONCE, AT_ONCE, 1]
    assert [i for e in told for i in e.token_ids] == list(range(2 * AT_ONCE + 1))


def test_events_that_cannot_be_one_stay_apart() -> None:
    scored = Event("r", 0, (1,), (TokenLogprobs(1, -1.0, ()),), prompt_logprobs=())
    plain = Event("r", 0, (2,))
    assert join_events([scored, plain]) == [scored, plain]
    assert join_events([plain, scored]) == [plain, scored]
    assert join_events([replace(plain, prompt_logprobs=()), plain]) == [
        Event("r", 0, (2, 2), prompt_logprobs=())
    ]


@pytest.mark.parametrize("stop", [(), ("never",)])
def test_a_patient_reader_is_woken_at_the_end_unless_text_may_end_it(
    tokenizer: Tokenizer, stop: tuple[str, ...]
) -> None:
    stream, told = OutputStream(request(stop=stop), tokenizer, lambda *_: None), list[Delta]()
    first, *rest = tokenizer.encode("one two three")
    stream.be_patient()
    some = threading.Event()

    def read() -> None:
        for delta in stream:
            told.append(delta)
            some.set()

    reader = threading.Thread(target=read)
    reader.start()
    stream.on_event(Event("r", 0, (first,)))
    assert some.wait(PATIENCE_S if stop else 0.1) == bool(stop)
    for token_id in rest:
        stream.on_event(Event("r", 0, (token_id,)))
    stream.on_event(Event("r", 0, finish_reason="length"))
    reader.join(PATIENCE_S)
    assert "".join(delta.text for delta in told) == "one two three"
    assert stop or len(told) == 2  # its text, and its end


PIECES = (b"a", b"b", b"ab", b"ba", b" aab", "é".encode()[:1], "é".encode()[1:], "文".encode(), b"", b"<end>")


class Pieces:
    """A vocabulary of pieces: several characters, half a character, nothing, and a control token."""

    name, vocab_size, bos_token_id = "pieces", len(PIECES), None
    eos_token_ids, special_ids = frozenset({9}), frozenset({9})
    add_bos, strips_first_space = False, True

    def token_bytes(self, token_id: int) -> bytes:
        return PIECES[token_id]

    def token_text(self, token_id: int) -> str:
        return PIECES[token_id].decode(errors="replace")


@dataclass
class Told:
    """Everything that a reader gets of a choice, however it was cut."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[object, ...] = ()
    prompt_logprobs: tuple[object, ...] = ()
    end: tuple[object, ...] = ()


def told(asked: Request, happening: Sequence[Event]) -> Told:
    found, choice = Told(), ChoiceText(0, asked, Pieces())  # type: ignore[arg-type]
    for delta in run(choice, happening):
        assert not found.end, "nothing comes after the end"
        found.text += delta.text
        found.token_ids += delta.token_ids
        found.logprobs += delta.logprobs or ()
        found.prompt_logprobs += delta.prompt_logprobs or ()
        if delta.finish_reason:
            found.end = (delta.finish_reason, delta.stop_reason, delta.num_tokens)
    return found


def cut(ids: Sequence[int], cuts: Sequence[bool], finish: str, with_tokens: bool) -> list[Event]:
    """`ids` in events that end where `cuts` says; the finish comes with the last ones, or alone."""
    groups: list[list[int]] = [[]]
    for token_id, ends in zip(ids, [*cuts, False], strict=True):
        groups[-1].append(token_id)
        if ends:
            groups.append([])
    end = {"finish_reason": finish, "stop_token_id": 9 if finish == "stop" else None}
    made = [
        Event("r", 0, tuple(group), tuple(TokenLogprobs(i, -i / 8, ((i, -i / 8),)) for i in group))
        for group in groups
    ]
    made[0] = replace(made[0], prompt_logprobs=(TokenLogprobs(1, -1.0),))
    if with_tokens:
        return [*made[:-1], replace(made[-1], **end)]  # type: ignore[arg-type]
    return [*made, Event("r", 0, **end)]  # type: ignore[arg-type]


def one_by_one(ids: Sequence[int], finish: str) -> list[Event]:
    return cut(ids, [True] * (len(ids) - 1), finish, with_tokens=False)


@settings(deadline=None, max_examples=300)
@given(
    ids=st.lists(st.integers(0, len(PIECES) - 1), min_size=1, max_size=12),
    stops=st.lists(st.text(alphabet="ab é文", min_size=1, max_size=4), max_size=2),
    include=st.booleans(),
    min_tokens=st.integers(0, 4),
    finish=st.sampled_from(["length", "stop"]),
    how=st.data(),
)
def test_however_tokens_are_cut_into_events_the_reader_gets_the_same(
    ids: list[int], stops: list[str], include: bool, min_tokens: int, finish: str, how: st.DataObject
) -> None:
    asked = request(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens, logprobs=1)
    cuts = how.draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))
    events_of = cut(ids, cuts, finish, how.draw(st.booleans()))
    assert told(asked, events_of) == told(asked, one_by_one(ids, finish))


@pytest.mark.parametrize(
    ("stops", "without", "within"),
    [
        ((), "aabéba aab文", "aabéba aab文"),
        (("aab",), "", "aab"),
        (("ba", "é"), "aab", "aabé"),
        (("b a", "a a"), "aabéb", "aabéba a"),
        (("文",), "aabéba aab", "aabéba aab文"),
    ],
)
def test_every_split_of_a_reply_ends_at_the_same_place(
    stops: tuple[str, ...], without: str, within: str
) -> None:
    ids = [0, 2, 5, 6, 3, 4, 9, 7]
    for include, text in ((False, without), (True, within)):
        asked = request(stop=stops, include_stop_str_in_output=include, logprobs=1)
        wanted = told(asked, one_by_one(ids, "length"))
        assert wanted.text == text
        starts = [
            len(b"".join(PIECES[i] for i in ids[:at] if i != 9).decode(errors="ignore")) for at in range(8)
        ]
        begun = [i for i, start in zip(ids, starts, strict=True) if start < len(text) or not stops]
        assert list(wanted.token_ids) == begun
        assert [lp.token_id for lp in wanted.logprobs] == begun  # type: ignore[attr-defined]
        for cuts in product([False, True], repeat=len(ids) - 1):
            for with_tokens in (False, True):
                assert told(asked, cut(ids, cuts, "length", with_tokens)) == wanted


def test_tokens_after_a_stop_string_in_the_same_event_are_nowhere(tokenizer: Tokenizer) -> None:
    ids = tuple(tokenizer.encode("one two END three four"))
    until = len(tokenizer.encode("one two END"))
    logprobs = tuple(TokenLogprobs(i, -0.5) for i in ids)
    choice = ChoiceText(0, request(stop=("END",), logprobs=0), tokenizer)
    delta = choice.push(Event("r", 0, ids, logprobs))
    assert delta is not None
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one two ", "stop", "END")
    assert delta.num_tokens == until
    assert delta.token_ids == tuple(lp.token_id for lp in delta.logprobs or ())
    assert tokenizer.decode(delta.token_ids).startswith("one two")
    assert choice.push(Event("r", 0, ids)) is None


def test_a_stop_string_in_the_last_event_cancels_nothing(tokenizer: Tokenizer) -> None:
    cancelled: list[tuple[str, int | None]] = []
    stream = OutputStream(request(stop=(".",)), tokenizer, lambda *who: cancelled.append(who))
    stream.on_event(Event("r", 0, tuple(tokenizer.encode("one. two")), finish_reason="length"))
    (delta,) = stream
    assert (delta.text, delta.finish_reason, delta.stop_reason) == ("one", "stop", ".")
    assert cancelled == []


def test_the_trace_of_a_choice_that_a_stop_string_ended_comes_with_the_engines_last_word(
    tokenizer: Tokenizer,
) -> None:
    trace = ended_trace(0, "cancelled")

    def cancel(request_id: str, index: int | None) -> None:
        last = Event("r", 0, finish_reason="cancelled", trace=trace)
        threading.Timer(0.05, stream.on_event, [last]).start()

    stream = OutputStream(request(stop=(".",)), tokenizer, cancel)
    stream.on_event(Event("r", 0, tuple(tokenizer.encode("one. two"))))
    assert [delta.finish_reason for delta in stream] == ["stop"]
    assert stream.trace(0) == dataclasses.replace(trace, num_output_tokens=2)
