"""How a model's reply format changes a request: switches, grammars with thinking, budgets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from plait.engine.grammar_guide import ThinkingWatch
from plait.errors import BadTemplate, ConfigError, InvalidField
from plait.request import USUAL_STYLE, Grammar, JsonStyle, ReplyShape
from plait.text.chat.jinja import JinjaTemplate
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.output import Content
from plait.text.reply_format import ReplyFormat
from plait.text.tokenizers.builtin import builtin_tokenizer
from tests.text.accepting import accepts

TOKENIZER = builtin_tokenizer("cl100k_base", True)
THINKS = (
    "{% if tools %}<tool_call>{{ tools }}{% endif %}{{ messages }}</think>{% if enable_thinking %}{% endif %}"
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"n": {"type": "integer"}}}},
}


def reply_format(source: str = THINKS, style: JsonStyle = USUAL_STYLE) -> ReplyFormat:
    template = JinjaTemplate("test", {"default": source}, TOKENIZER, {})
    return ReplyFormat(TOKENIZER, template, style=style)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(TOKENIZER)
    yield found
    found.close()


@pytest.mark.parametrize(
    ("kwargs", "effort", "wanted"),
    [
        ({}, None, ({}, True, ())),
        ({"x": 1}, None, ({"x": 1}, True, ())),
        ({"enable_thinking": False}, None, ({"enable_thinking": False}, False, ())),
        ({"thinking": True}, None, ({"enable_thinking": True}, True, ())),
        ({}, "none", ({"enable_thinking": False}, False, ())),
        ({}, "low", ({}, True, ("reasoning_effort",))),
        ({"thinking": True}, "low", ({"enable_thinking": True}, True, ("reasoning_effort",))),
    ],
)
def test_a_switch_reaches_the_template_under_its_own_name(
    kwargs: dict[str, Any], effort: str | None, wanted: tuple[dict[str, Any], bool, tuple[str, ...]]
) -> None:
    assert reply_format().translate_switches(kwargs, effort) == wanted


def test_a_format_that_is_not_known_is_refused_without_a_template_too() -> None:
    for names in ({"tools": "xml"}, {"reasoning": "deep"}):
        with pytest.raises(ConfigError, match="is not known; there are"):
            ReplyFormat(TOKENIZER, None, **names)
    assert ReplyFormat(TOKENIZER, None, tools="hermes").tools is None


def test_a_template_without_a_switch_gets_none() -> None:
    plain = reply_format("{{ messages }}</think> about thinking")
    assert plain.translate_switches({"enable_thinking": False}) == ({}, False, ())
    assert plain.budget(None, ReplyShape(thinks=False)) is not None


def test_levels_are_for_templates_that_know_them() -> None:
    knows = reply_format("{{ messages }}{{ reasoning_effort }}")
    assert knows.translate_switches({}, "low") == ({"reasoning_effort": "low"}, True, ())


def test_hints_of_no_use_to_a_model_are_named() -> None:
    plain = ReplyFormat(
        TOKENIZER, JinjaTemplate("test", {"default": "{{ messages }}"}, TOKENIZER, {}), reasoning="none"
    )
    unread = ("reasoning_effort", "chat_template_kwargs.enable_thinking")
    assert plain.translate_switches({"enable_thinking": True}, "high") == ({}, True, unread)
    with pytest.raises(InvalidField, match="true or false"):
        plain.translate_switches({"enable_thinking": "no"})


def test_a_broken_template_is_reported_as_one() -> None:
    with pytest.raises(BadTemplate, match="no Jinja"):
        reply_format("{{ messages </think>").translate_switches({})


@pytest.mark.parametrize(
    ("tail", "is_open"), [("<think>\n", True), ("<think>\n\n</think>\n\n", False), ("a", False)]
)
def test_a_prompt_may_end_inside_of_thinking(tail: str, is_open: bool) -> None:
    assert reply_format().is_open(TOKENIZER.encode("q" * 500 + tail, allow_special=True)) is is_open


@pytest.mark.parametrize(
    ("words", "is_open"),
    [
        ("<think>\nLet me", True),
        ([{"type": "text", "text": "<think>hm"}], True),
        ("<think>hm</think>\n\nSo", False),
        ("So", False),
        (None, False),
    ],
)
def test_words_that_a_reply_goes_on_from_may_be_thinking(words: Any, is_open: bool) -> None:
    ids = TOKENIZER.encode("<think>\nLet me")
    assert not reply_format().is_open(ids)
    assert reply_format().is_open(ids, {"role": "assistant", "content": words}) is is_open


WISH = Grammar("choice", '["yes", "no"]', "guided_choice")


@pytest.mark.parametrize(
    ("shape", "good", "bad"),
    [
        (
            ReplyShape(),
            ["yes", "<think>hm</think>\n\nno", "<think></think>yes"],
            ["maybe", "<think>hm", "hm</think>yes"],
        ),
        (ReplyShape(is_open=True), ["hm</think>\n\nyes", "</think>no"], ["yes", "<think>hm</think>"]),
        (ReplyShape(thinks=False), ["yes"], ["<think>hm</think>yes"]),
        (ReplyShape(thinks=False, is_open=True), ["hm</think>yes"], ["yes"]),
    ],
)
def test_a_requested_grammar_is_about_what_follows_the_thinking(
    compiler: GrammarCompiler, shape: ReplyShape, good: list[str], bad: list[str]
) -> None:
    grammar = reply_format().grammar(WISH, shape)
    assert [accepts(compiler, grammar, text) for text in good] == [True] * len(good)
    assert [accepts(compiler, grammar, text) for text in bad] == [False] * len(bad)


CALL = '<tool_call>\n{"name": "f", "arguments": {"n": 5}}\n</tool_call>'


def test_a_call_may_come_in_place_of_requested_content(compiler: GrammarCompiler) -> None:
    grammar = reply_format().grammar(WISH, ReplyShape(tools=(TOOL,)))
    for text in ("yes", CALL, f"<think>hm</think>\n\n{CALL}", f"{CALL}\n{CALL}"):
        assert accepts(compiler, grammar, text), text
    for text in ("hm", f"yes{CALL}", CALL.replace("5", '"x"'), CALL.replace('"f"', '"g"')):
        assert not accepts(compiler, grammar, text), text
    assert not accepts(compiler, reply_format().grammar(WISH, ReplyShape(tools=(TOOL,), choice="none")), CALL)


def test_a_demanded_call_takes_the_place_of_requested_content(compiler: GrammarCompiler) -> None:
    grammar = reply_format().grammar(WISH, ReplyShape(tools=(TOOL,), choice="required"))
    assert accepts(compiler, grammar, CALL)
    assert not accepts(compiler, grammar, "yes")
    alone = reply_format().grammar(None, ReplyShape(tools=(TOOL,), choice="required", parallel=False))
    assert accepts(compiler, alone, f"<think>hm</think>{CALL}")
    assert not accepts(compiler, alone, f"{CALL}\n{CALL}")


def test_white_space_in_a_demanded_call_is_one_space_unless_any_may_be(compiler: GrammarCompiler) -> None:
    shape = ReplyShape(tools=(TOOL,), choice="required")
    usual, free = (
        reply_format().grammar(None, shape),
        reply_format(style=JsonStyle(space="any")).grammar(None, shape),
    )
    for grammar, text, good in (
        (usual, CALL, True),
        (usual, CALL.replace(" 5", "  5"), False),
        (free, CALL.replace(" 5", "  5"), True),
        (free, CALL.replace(" 5", " " * 200 + "5"), False),
    ):
        assert accepts(compiler, grammar, text) is good, text


def test_a_call_has_no_other_arguments_than_its_tool_names_unless_objects_are_open(
    compiler: GrammarCompiler,
) -> None:
    shape = ReplyShape(tools=(TOOL,), choice="required")
    more = CALL.replace(" 5", ' 5, "more": 1')
    assert not accepts(compiler, reply_format().grammar(None, shape), more)
    assert accepts(compiler, reply_format(style=JsonStyle(open_objects=True)).grammar(None, shape), more)


def test_without_a_request_or_a_demand_there_is_no_grammar() -> None:
    assert reply_format().grammar(None, ReplyShape(tools=(TOOL,))) is None
    assert reply_format().grammar(None, ReplyShape()) is None


def test_a_model_that_calls_nothing_says_so() -> None:
    template = JinjaTemplate("test", {"default": "{{ messages }}"}, TOKENIZER, {})
    silent = ReplyFormat(TOKENIZER, template, tools="none", reasoning="none")
    with pytest.raises(InvalidField) as refused:
        silent.reader(ReplyShape(tools=(TOOL,)))
    assert refused.value.param == "tools"
    assert silent.reader(ReplyShape()) is None


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
def test_a_budget_is_spent_by_thinking_alone(num_tokens: int) -> None:
    budget = reply_format().budget(num_tokens, ReplyShape())
    assert budget is not None
    watch = ThinkingWatch(budget, TOKENIZER.token_bytes)
    for token_id in TOKENIZER.encode(" \n\n\n", add_special=False):
        watch.push(token_id)
        assert watch.due == ()
    thought = TOKENIZER.encode("<think>", add_special=False, allow_special=True)
    thought += TOKENIZER.encode(" one two three four", add_special=False)
    so_far: list[int] = []
    for token_id in thought:
        if watch.due:
            break
        watch.push(token_id)
        so_far.append(token_id)
    assert watch.due == budget.closing_ids
    assert TOKENIZER.decode(so_far).count(" ") == num_tokens
    for token_id in budget.closing_ids:
        watch.push(token_id)
    assert watch.due == ()
    for token_id in TOKENIZER.encode("done <think> one two three four", allow_special=True):
        watch.push(token_id)
        assert watch.due == (), "thinking begins only where a reply begins"


STRICT = {**TOOL, "function": {**TOOL["function"], "strict": True}}


def test_calls_of_a_strict_tool_are_held_to_their_schema_once_they_begin(compiler: GrammarCompiler) -> None:
    grammar = reply_format().grammar(None, ReplyShape(tools=(STRICT,)))
    for text in ("", "yes", "a < b", CALL, f"I look.\n{CALL}", f"{CALL}\n{CALL}", f"<think>hm</think>{CALL}"):
        assert accepts(compiler, grammar, text), text
    for text in (CALL.replace("5", '"x"'), CALL.replace('"f"', '"g"'), "<tool_call>", f"{CALL} and more"):
        assert not accepts(compiler, grammar, text), text
    alone = reply_format().grammar(None, ReplyShape(tools=(STRICT,), parallel=False))
    assert not accepts(compiler, alone, f"{CALL}\n{CALL}")
    assert reply_format().grammar(None, ReplyShape(tools=(STRICT,), choice="none")) is None


@pytest.mark.parametrize("body", ["yes", CALL])
def test_a_model_may_think_again_before_requested_content_and_not_behind_it(
    compiler: GrammarCompiler, body: str
) -> None:
    grammar = reply_format().grammar(WISH, ReplyShape(tools=(TOOL,)))
    opened = reply_format().grammar(WISH, ReplyShape(tools=(TOOL,), is_open=True))
    again = "<think>and</think>\n\n"
    assert accepts(compiler, grammar, f"<think>hm</think>\n\n{again}{again}{body}")
    assert accepts(compiler, opened, f"hm</think>\n\n{again}{body}")
    endless = "<think>hm</think>\n\n" * 4 + again + body
    for text in (
        endless,
        f"<think>hm</think><think>{body}",
        f"{body}<think>hm</think>",
        f"{body}{again}{body}",
    ):
        assert not accepts(compiler, grammar, text), text


@pytest.mark.parametrize("tools", ["hermes", "json", "phi", "qwen_xml"])
def test_no_thinking_begins_in_the_text_around_calls_that_are_held(
    compiler: GrammarCompiler, tools: str
) -> None:
    """What would be read as a thought is no text: a call in it would be lost."""
    template = JinjaTemplate("test", {"default": THINKS}, TOKENIZER, {})
    model = ReplyFormat(TOKENIZER, template, tools=tools)
    grammar = model.grammar(None, ReplyShape(tools=(STRICT,)))
    for text in ("So < that", "<think>a</think>\n\nSo", "<think>a</think>I think>"):
        assert accepts(compiler, grammar, text), text
    for text in ("So<think>", "So <think>b</think> it is", f"So <think>{CALL}", f"So <think>b</think>{CALL}"):
        assert not accepts(compiler, grammar, text), text


@pytest.mark.parametrize("text", ["<think>hm</think>a<think>b", "{<think>", "a <think>"])
def test_a_budget_does_not_end_thinking_that_never_began(text: str) -> None:
    """The text of a string in a JSON reply may name the marker: nothing must be written into it."""
    budget = reply_format().budget(0 if not text.startswith("<think>") else 100, ReplyShape())
    assert budget is not None
    watch = ThinkingWatch(budget, TOKENIZER.token_bytes)
    for token_id in TOKENIZER.encode(text, add_special=False, allow_special=True):
        watch.push(token_id)
    assert not watch._is_open
    assert watch.due == ()


def test_there_is_no_budget_where_no_thinking_can_begin() -> None:
    assert reply_format().budget(5, ReplyShape(may_think=False)) is None
    assert reply_format().budget(5, ReplyShape(may_think=False, is_open=True)) is not None


def test_a_reply_that_cannot_think_is_content_in_full() -> None:
    reader = reply_format().reader(ReplyShape(may_think=False))
    assert reader is not None
    parser = reader.parser()
    assert [*parser.push("<think>a</think>b"), *parser.finish()] == [Content("<think>a</think>b")]


@pytest.mark.parametrize("effort", ["", "_fast", "_faster"])
def test_thinking_of_k2_horizon_ends_for_grammars_and_budgets_where_it_ends_for_readers(
    compiler: GrammarCompiler, effort: str
) -> None:
    template = JinjaTemplate("test", {"default": "{{ tools }}{{ messages }}"}, TOKENIZER, {})
    model = ReplyFormat(TOKENIZER, template, tools="ifm", reasoning="ifm")
    opened, end, call = ReplyShape(is_open=True), f"</ifm|think{effort}>", "<ifm|tool_calls>"
    grammar = model.grammar(WISH, opened)
    assert accepts(compiler, grammar, f"hm{end}yes")
    for text in (f"hm{call}{end}yes", f"hm{end}hm{end}yes", "hm"):
        assert not accepts(compiler, grammar, text), text
    budget = model.budget(30, opened)
    assert budget is not None
    for text in (f"hm{end} a", f"hm{call}"):
        watch = ThinkingWatch(budget, TOKENIZER.token_bytes)
        assert watch._is_open
        for token_id in TOKENIZER.encode(text + " word" * 40, add_special=False, allow_special=True):
            watch.push(token_id)
            assert watch.due == (), text
        assert not watch._is_open
