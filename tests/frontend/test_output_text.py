"""Content, thinking and calls out of tokens: the same however they come, with stop strings and scores."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.frontend.deltas import Delta
from plait.frontend.output_stream import ChoiceText
from plait.request import Event, ReplyShape, Request, SamplingParams, TokenLogprobs
from plait.text.chat.markers import MarkerTemplate
from plait.text.output import Arguments, CallEnd, CallStart, Content, Reasoning
from plait.text.reply_format import ReplyFormat, ReplyReader
from plait.text.tokenizers.builtin import builtin_tokenizer

TOOLS = ({"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}},)
TOKENIZER = builtin_tokenizer("cl100k_base", True)
SPEECH = ReplyFormat(TOKENIZER, MarkerTemplate("oxidizr", TOKENIZER), tools="agent", reasoning="agent")
CALL = '<|function|>{"name": "f", "arguments": {"a": "b"}}<|/function|>'
THOUGHT = "<|think|>because<|/think|>"
PIECES = (
    "Hi",
    " there",
    "\n",
    " ",
    "é🦜",
    CALL,
    THOUGHT,
    "<|function|>",
    "<|/think|>",
    "END",
    "<|think|>",
    "{",
)


def reader(**shape: object) -> ReplyReader:
    found = SPEECH.reader(ReplyShape(**{"tools": TOOLS, **shape}))  # type: ignore[arg-type]
    assert found is not None
    return found


def ids_of(text: str) -> list[int]:
    """The text's tokens, its markers as the control tokens that they are."""
    return TOKENIZER.encode(text, add_special=False, allow_special=True)


def request(**params: object) -> Request:
    return Request("r", (1,), SamplingParams(temperature=0.0, logprobs=0, **params))  # type: ignore[arg-type]


def told(asked: Request, ids: Sequence[int], cuts: Sequence[bool], shape: ReplyReader) -> list[Delta]:
    """The deltas of a choice when its tokens come in events that end where `cuts` is true."""
    choice = ChoiceText(0, asked, TOKENIZER, shape)
    groups: list[list[int]] = [[]]
    for token_id, ends in zip(ids, [*cuts, False], strict=True):
        groups[-1].append(token_id)
        if ends:
            groups.append([])
    events = [Event("r", 0, tuple(g), tuple(TokenLogprobs(i, -i / 8) for i in g)) for g in groups]
    return [d for e in [*events, Event("r", 0, finish_reason="length")] if (d := choice.push(e))]


def summed(deltas: Sequence[Delta]) -> tuple[object, ...]:
    content = "".join(d.text for d in deltas)
    assert content == "".join(p.text for d in deltas for p in d.parts if isinstance(p, Content))
    parts = [p for d in deltas for p in d.parts]
    thought = "".join(p.text for p in parts if isinstance(p, Reasoning))
    calls = [(p.index, p.name) for p in parts if isinstance(p, CallStart)]
    arguments = [
        "".join(p.text for p in parts if isinstance(p, Arguments) and p.index == n) for n, _ in calls
    ]
    ends = [p for p in parts if isinstance(p, CallEnd)]
    ids = [i for d in deltas for i in d.token_ids]
    scored = [lp.token_id for d in deltas for lp in d.logprobs or ()]
    assert ids == scored
    last = deltas[-1]
    end = (last.finish_reason, last.stop_reason, last.num_tokens, last.num_reasoning_tokens)
    return content, thought, calls, arguments, ends, ids, end


@settings(deadline=None, max_examples=200)
@given(
    pieces=st.lists(st.sampled_from(PIECES), min_size=1, max_size=6),
    stop=st.sampled_from([(), ("END",), ("there", "\n ")]),
    parallel=st.booleans(),
    how=st.data(),
)
def test_however_tokens_are_cut_into_events_the_text_is_the_same(
    pieces: list[str], stop: tuple[str, ...], parallel: bool, how: st.DataObject
) -> None:
    ids = ids_of("".join(pieces))
    cuts = how.draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))
    asked, shape = request(stop=stop), reader(parallel=parallel)
    one_by_one = [True] * (len(ids) - 1)
    assert summed(told(asked, ids, cuts, shape)) == summed(told(asked, ids, one_by_one, shape))


@pytest.mark.parametrize("text", [f"{THOUGHT}So {CALL}", f"{CALL}\n{CALL}", "Hi END", f"a{THOUGHT}b"])
def test_every_cut_of_a_reply_emits_the_same(text: str) -> None:
    ids = ids_of(text)[:12]
    shape = reader()
    for stop in ((), ("END", "So")):
        wanted = summed(told(request(stop=stop), ids, [True] * (len(ids) - 1), shape))
        for cuts in product([False, True], repeat=min(len(ids) - 1, 9)):
            rest = [True] * (len(ids) - 1 - len(cuts))
            assert summed(told(request(stop=stop), ids, [*cuts, *rest], shape)) == wanted


def test_markers_that_are_control_tokens_reach_the_parser_and_no_reader() -> None:
    ids = ids_of(f"{THOUGHT}Let me see. {CALL}")
    content, thought, calls, arguments, _, _, _ = summed(
        told(request(), ids, [True] * (len(ids) - 1), reader())
    )
    assert (content, thought) == ("Let me see.", "because")
    assert (calls, arguments) == ([(0, "f")], ['{"a": "b"}'])


def test_other_control_tokens_stay_hidden() -> None:
    ids = ids_of("a<|user|>b")
    assert summed(told(request(), ids, [True] * (len(ids) - 1), reader()))[0] == "ab"


def test_a_reply_that_begins_inside_of_thinking() -> None:
    ids = ids_of("because<|/think|>So")
    content, thought, *_ = summed(told(request(), ids, [True] * (len(ids) - 1), reader(is_open=True)))
    assert (content, thought) == ("So", "because")


def test_a_stop_string_ends_content_alone() -> None:
    thought, call = "<|think|>END<|/think|>", CALL.replace("b", "END")
    for text in (f"{thought}go on", call):
        ids = ids_of(text)
        assert (
            told(request(stop=("END",)), ids, [True] * (len(ids) - 1), reader())[-1].finish_reason == "length"
        )
    ids = ids_of(f"{thought}go END on{CALL}")
    deltas = told(request(stop=("END",)), ids, [True] * (len(ids) - 1), reader())
    assert summed(deltas)[:3] == ("go ", "END", [])
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "END")


def test_scores_of_plain_content_come_with_its_text() -> None:
    ids = ids_of("one two  three\n\n four")
    shown = told_of = ""
    for delta in told(request(), ids, [True] * (len(ids) - 1), reader()):
        shown += delta.text
        told_of += "".join(lp.token for lp in delta.logprobs or ())
        assert told_of.startswith(shown)
    assert shown == told_of == "one two  three\n\n four"


def test_a_second_call_is_not_waited_for_where_one_is_allowed() -> None:
    ids = ids_of(f"{CALL}\n{CALL}")
    deltas = told(request(), ids, [True] * (len(ids) - 1), reader(parallel=False))
    assert deltas[-1].finish_reason == "stop"
    assert deltas[-1].num_tokens < len(ids)
