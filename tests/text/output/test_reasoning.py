"""Thinking is separated from content however the text is cut, and calls inside it are thinking too."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plait.errors import ConfigError
from plait.text.output import OutputParser, Reasoning
from plait.text.output.reasoning import REASONING, reasoning_format
from tests.text.replies import Read, gathered, parser, pieces, read_every_way

CALL = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
THOUGHT = st.text(alphabet="ab <>/\nthink", max_size=20).filter(lambda t: "</think>" not in t)
CUTS = st.lists(st.integers(0, 100), max_size=6)


def think(text: str, *, starts_open: bool = False) -> Read:
    return read_every_way("hermes", text, reasoning=REASONING["think"], starts_open=starts_open)


@settings(deadline=None)
@given(THOUGHT, st.sampled_from(["", "Hi.", "a < b"]), CUTS, st.booleans())
def test_thinking_and_content_are_apart_however_they_are_cut(
    thought: str, answer: str, cuts: list[int], starts_open: bool
) -> None:
    reader = OutputParser(reasoning=REASONING["think"], starts_open=starts_open)
    text = f"{'' if starts_open else '<think>'}\n{thought}\n</think>\n\n{answer}"
    found = gathered([*(d for part in pieces(text, cuts) for d in reader.push(part)), *reader.finish()])
    assert found.reasoning == thought.strip(" \t\r\n")
    assert found.content == answer
    assert reader.num_reasoning_chars == len(found.reasoning)


@pytest.mark.parametrize("name", REASONING)
def test_every_family_has_its_markers(name: str) -> None:
    for pair in REASONING[name].pairs:
        assert {pair.opening, pair.closing} <= REASONING[name].markers
        reader = OutputParser(reasoning=REASONING[name])
        found = gathered([*reader.push(f"{pair.opening}why{pair.closing}so"), *reader.finish()])
        assert (found.reasoning, found.content) == ("why", "so")
        assert reader.markers == REASONING[name].markers


def test_a_call_after_thinking_is_a_call_and_one_inside_it_is_thinking() -> None:
    found = think(f"<think>maybe {CALL}?</think>\n{CALL}")
    assert found.reasoning == f"maybe {CALL}?"
    assert (found.calls, found.content) == ([("f", {})], "")


def test_markers_of_thinking_inside_arguments_stay_there() -> None:
    found = think('<tool_call>{"name": "f", "arguments": {"a": "<think>x</think>"}}</tool_call>')
    assert found.calls == [("f", {"a": "<think>x</think>"})]
    assert found.reasoning == ""


def test_a_bare_call_may_follow_thinking() -> None:
    text = '<think>x</think>\n\n{"name": "f", "parameters": {}}'
    assert read_every_way("llama_json", text, reasoning=REASONING["think"]).calls == [("f", {})]


def test_thinking_that_the_token_limit_cuts_is_thinking_to_its_end() -> None:
    found = think("still at </thi", starts_open=True)
    assert (found.reasoning, found.content) == ("still at </thi", "")
    assert think("<think>word ").reasoning == "word "


@pytest.mark.parametrize(
    "text",
    ["So <think>b</think> it is", '{"a": "<think>"}', "x\n<think>", "<thin<think>a</think>", "- <think>\n"],
)
@pytest.mark.parametrize("before", ["", "<think>a</think>\n\n", " \n<think>a</think><think>b</think>"])
def test_thinking_begins_only_where_a_reply_begins(text: str, before: str) -> None:
    found = think(before + text)
    assert found.content == text.rstrip() or found.content == text
    assert found.reasoning == {"": "", "<": "a", " ": "ab"}[before[:1]]


def test_no_thinking_begins_behind_a_call() -> None:
    found = think(f"{CALL}\n<think>why</think>")
    assert (found.reasoning, found.content) == ("", "<think>why</think>")


def test_a_reply_that_goes_on_from_content_has_no_thinking() -> None:
    found = read_every_way("hermes", "<think>a</think>", reasoning=REASONING["think"], may_think=False)
    assert (found.reasoning, found.content) == ("", "<think>a</think>")


def test_a_closing_marker_without_an_opening_one_is_content() -> None:
    assert think("a </think> b").content == "a </think> b"


def test_wrappers_of_content_are_passed_over() -> None:
    text = "<think>why</think><response>so </response>"
    found = read_every_way("hermes", text, reasoning=REASONING["granite"])
    assert (found.reasoning, found.content) == ("why", "so")


@settings(max_examples=20, deadline=None)
@given(CUTS)
def test_the_channels_of_a_harmony_reply(cuts: list[int]) -> None:
    text = (
        "<|channel|>analysis<|message|>Let me see.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I look it up.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"city": "Rome"}<|call|>'
        "<|start|>assistant to=functions.search<|channel|>commentary json<|message|>{}<|call|>"
        "<|start|>assistant<|channel|>final<|message|>Done.<|return|>"
    )
    found = read_every_way("harmony", text, cuts, reasoning=REASONING["harmony"])
    assert (found.reasoning, found.content) == ("Let me see.", "I look it up.Done.")
    assert found.calls == [("f", {"city": "Rome"}), ("search", {})]


def test_the_control_tokens_to_show_are_those_inside_markers() -> None:
    reader = parser("harmony", reasoning=REASONING["harmony"])
    vocabulary = {"<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|endoftext|>", "<|untrusted|>"}
    assert reader.find_shown(vocabulary) == {"<|start|>", "<|channel|>", "<|message|>", "<|call|>"}


def test_blocks_of_thinking_are_numbered() -> None:
    reader = OutputParser(reasoning=REASONING["agent"])
    told = [*reader.push("<|think|>a<|/think|>b<|plan|>c<|/plan|>"), *reader.finish()]
    assert [d for d in told if isinstance(d, Reasoning)] == [Reasoning("a", 0), Reasoning("c", 1)]


def test_tokens_and_characters_of_thinking_are_counted_for_a_budget() -> None:
    reader = parser("hermes", reasoning=REASONING["think"])
    for token in ("<think>", "one", " two", " ", "</think>", "three"):
        reader.push(token)
    assert (reader.num_reasoning_tokens, reader.num_reasoning_chars) == (4, len("one two"))
    assert not reader.is_reasoning
    reader = OutputParser(reasoning=REASONING["think"], starts_open=True)
    assert reader.is_reasoning
    reader.push("a b", num_tokens=2)
    assert reader.num_reasoning_tokens == 2


@pytest.mark.parametrize(
    ("template", "tokens", "name"),
    [
        ("{% if '</think>' in content %}", (), "think"),
        ("[THINK]...[/THINK]", (), "mistral"),
        ("{{ messages }}", ("<think>", "</think>"), "think"),
        ("{{ messages }}", ("<think>",), None),
        ("<think></think><response>", (), "granite"),
        ("", ("<|channel|>", "<|message|>", "<|constrain|>", "<|call|>"), "harmony"),
        ("", ("<think>", "</think>", "<|think|>", "<|/think|>", "<|plan|>", "<|/plan|>"), "agent"),
        ("{{ messages }}", (), None),
    ],
)
def test_the_markers_are_found_in_the_template_then_in_the_vocabulary(
    template: str, tokens: tuple[str, ...], name: str | None
) -> None:
    found = reasoning_format(template, tokens)
    assert (found and found.name) == name


def test_a_reasoning_format_can_be_named_or_refused() -> None:
    assert reasoning_format("<think></think>", (), "mistral") is REASONING["mistral"]
    assert reasoning_format("<think></think>", (), "none") is None
    with pytest.raises(ConfigError, match="'deep' is not known; there are agent, kimi_k3, solar_open"):
        reasoning_format("", (), "deep")


@pytest.mark.parametrize(
    ("prompt", "is_open"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n", False),
        ("what is <think>?<|im_start|>assistant\n", False),
        ("", False),
    ],
)
def test_a_prompt_that_ends_with_an_opening_marker_starts_open(prompt: str, is_open: bool) -> None:
    assert REASONING["think"].starts_open(prompt) is is_open
