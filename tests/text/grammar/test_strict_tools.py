"""Strict tools with calls without a marker: a reply is free text, or a call that its schema allows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfVocabulary

from plait.errors import InvalidField
from plait.request import ReplyShape
from plait.text.chat.jinja import JinjaTemplate
from plait.text.grammar.call_lark import as_lark
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.grammar.strict_tools import hold_by_name, hold_in_turns
from plait.text.output import FORMATS, call_grammar, tool_schemas
from plait.text.reply_format import ReplyFormat
from plait.text.tokenizers.builtin import builtin_tokenizer
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from tests.text.accepting import accepts, accepts_ids
from tests.text.output.test_call_grammar import ONE, TOOLS, WRITTEN
from tests.text.output.written_calls import WRITERS
from tests.text.replies import read_every_way

BYTES = LLTokenizer("byte")
BARE = ("json", "llama_json", "pythonic", "phi", "glm4")
TOKENIZER = builtin_tokenizer("cl100k_base", True)


STRICT = [{**tool, "function": {**tool["function"], "strict": True}} for tool in TOOLS]


def reply_format(source: str, tools: str) -> ReplyFormat:
    return ReplyFormat(TOKENIZER, JinjaTemplate("test", {"default": source}, TOKENIZER, {}), tools=tools)


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(TOKENIZER)
    yield found
    found.close()


def matcher(name: str, parallel: bool = True) -> LLMatcher:
    form = FORMATS[name]
    structure = hold_by_name(form.syntax, form.frame, tool_schemas(TOOLS), (), parallel=parallel)
    found = LLMatcher(BYTES, grammar_from("lark", as_lark(structure, {})))
    assert not found.is_error(), found.get_error()
    return found


def passes(found: LLMatcher, text: str) -> bool:
    one, tokens = found.deep_copy(), BYTES.tokenize_str(text)
    return one.validate_tokens(tokens) == len(tokens) and one.consume_tokens(tokens) and one.is_accepting()


@pytest.mark.parametrize("name", BARE)
def test_text_is_free(name: str) -> None:
    found = matcher(name)
    for text in (
        "",
        "Hello",
        "[1] a source",
        '{"answer": 1}',
        '[{"answer": [1, 2]}]',
        '{"name": "Bob", "arguments": []}',
        "functools and more",
        "I could write weather(city=1)",
        '```json\n{"a": 2}\n```',
        "größer 🙂",
    ):
        assert passes(found, text), text
        assert read_every_way(name, text, tools=TOOLS).calls == []


@pytest.mark.parametrize("name", BARE)
def test_a_call_is_as_its_schema_says(name: str) -> None:
    found, written = matcher(name), WRITTEN[name]
    assert passes(found, written)
    assert read_every_way(name, written, tools=TOOLS).complete == [True]
    for other in (
        written[:-1],
        written.replace("2", '"two"'),
        written.replace("city", "town"),
        written.replace("2", '2, "more": 1') if name != "pythonic" else written.replace("2", "2, more=1"),
        f"{written} and more",
    ):
        assert not passes(found, other), other
        assert not passes(found, f"\n {other}"), other


@pytest.mark.parametrize("name", ["json", "llama_json"])
@pytest.mark.parametrize(
    "written",
    [
        f'{{"name":"weather","arguments":{ONE}}}',
        f'{{"type": "function", "name": "weather", "parameters": {ONE}}}',
        f'{{\n  "name": "weather",\n  "arguments": {ONE}\n}}',
    ],
)
def test_other_spellings_of_a_call_are_calls(name: str, written: str) -> None:
    found = matcher(name)
    assert passes(found, written)
    assert read_every_way(name, written, tools=TOOLS).calls == [("weather", {"city": 'Rom"e', "days": 2})]
    assert not passes(found, written.replace("2", "true"))


@pytest.mark.parametrize(
    "evasion",
    [
        r'{"name": "we\u0061ther", "arguments": {"days": true}}',
        '{"arguments": {"days": true}, "name": "weather"}',
        '{"id": {"x": 1}, "tool" : "weather", "input": {"days": true}}',
        '[{"name": "weather", "arguments": {"days": true}}]',
        'So: ```json\n{"name": "weather", "arguments": {"days": true}}\n```',
    ],
)
def test_no_call_goes_around_its_schema_as_text(evasion: str) -> None:
    assert read_every_way("json", evasion, tools=TOOLS).calls != []
    assert not passes(matcher("json"), evasion)


def test_calls_in_a_fence_and_in_lists_are_held() -> None:
    found = matcher("json")
    call = WRITTEN["json"]
    for text in (f"So:\n```json\n{call}\n```", f"[{call}]", f"[{call}, {call}]", f"{call}\n{call}"):
        assert passes(found, text), text
        assert not passes(found, text.replace("2", "true")), text
    assert not passes(matcher("json", parallel=False), f"{call}\n{call}")


@pytest.mark.parametrize("name", BARE)
def test_many_tools_are_held_within_the_limits_of_a_step(compiler: GrammarCompiler, name: str) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    tools = [
        {"type": "function", "function": {"name": f"weather{i}", "parameters": schema, "strict": True}}
        for i in range(100)
    ]
    grammar = reply_format("{{ tools }}{{ messages }}</think>", name).grammar(
        None, ReplyShape(tools=tuple(tools))
    )
    call = WRITTEN[name].replace("weather", "weather7")
    assert accepts(compiler, grammar, call)
    assert accepts(compiler, grammar, "Hello [x] {y}, it is sunny.")
    assert not accepts(compiler, grammar, call.replace("2", '"two"'))


def test_a_word_begins_a_call_only_with_its_bracket() -> None:
    found = matcher("phi")
    assert passes(found, f"Now {WRITTEN['phi']}")
    assert not passes(found, 'functools[{"name": "dig", "arguments": {}}]')


def test_control_tokens_around_text_and_calls_are_where_they_belong() -> None:
    form = FORMATS["harmony"]
    demanded = call_grammar(form, TOOLS, "required")
    assert demanded is not None
    structure = hold_in_turns(demanded, form.asides, "<|start|>assistant", form.final)
    found = LLMatcher(BYTES, grammar_from("lark", as_lark(structure, {})))
    think = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for text in (
        "<|channel|>final<|message|>Hello",
        f"{think}<|channel|>final<|message|>Hello",
        f"{think}{WRITTEN['harmony']}",
        f"{think}<|channel|>commentary<|message|>I look.<|end|><|start|>assistant{WRITTEN['harmony']}",
    ):
        assert passes(found, text), text
        assert not passes(found, text.replace("2", "true")) or "2" not in text
    assert not passes(found, "Hello")


# Most rows are held by the same parts; compiling a grammar takes long.
RARE = WRITERS.keys() - {"dsml", "gemma4", "functionary"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in RARE)) for name in FORMATS]
)
def test_a_strict_tool_is_served_whatever_the_format(compiler: GrammarCompiler, name: str) -> None:
    talk, shape = reply_format("{{ tools }}{{ messages }}", name), ReplyShape(tools=tuple(STRICT))
    if not FORMATS[name].holds:
        with pytest.raises(InvalidField, match=f"the format '{name}' holds strict calls only where"):
            talk.grammar(None, shape)
        return
    grammar = talk.grammar(None, shape)
    assert accepts(compiler, grammar, WRITTEN[name])
    assert accepts(compiler, grammar, "Hello")
    assert not accepts(compiler, grammar, WRITTEN[name].replace("city", "town"))


@pytest.mark.parametrize("name", BARE)
def test_thinking_may_come_first(compiler: GrammarCompiler, name: str) -> None:
    thinking = reply_format("{{ tools }}{{ messages }}</think>", name)
    grammar = thinking.grammar(None, ReplyShape(tools=tuple(STRICT)))
    call = WRITTEN[name]
    for before in ("<think>[a] b</think>\n\n", "<think></think>", ""):
        assert accepts(compiler, grammar, before + call), before
        assert accepts(compiler, grammar, f"{before}Hello")
        assert not accepts(compiler, grammar, before + call.replace("2", "true"))
    opened = thinking.grammar(None, ReplyShape(tools=tuple(STRICT), is_open=True))
    assert accepts(compiler, opened, f"hm</think>\n\n{call}")
    assert not accepts(compiler, opened, f"hm</think>\n\n{call.replace('2', 'true')}")


def test_harmony_s_control_tokens_are_tokens_and_its_turns_are_kept(byte_level: Any, tmp_path: Path) -> None:
    own = ["<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "<|return|>"]
    vocabulary = HfVocabulary.from_str(byte_level.to_str())
    vocabulary.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in own])
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_hf_tokenizer(tmp_path / "tokenizer.json", TokenizerFiles({}, {}))
    source = "{{ tools }}{{ messages }}<|channel|>analysis<|message|> to=functions."
    talk = ReplyFormat(tokenizer, JinjaTemplate("test", {"default": source}, tokenizer, {}))
    assert talk.tools is FORMATS["harmony"]
    own_compiler = GrammarCompiler(tokenizer)
    think = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    call = WRITTEN["harmony"].removesuffix("<|call|>")  # which ends the reply
    try:
        demanded = talk.grammar(None, ReplyShape(tools=tuple(STRICT), choice="required"))
        assert demanded is not None
        closed, opened = (
            own_compiler.compile(found)
            for is_open in (False, True)
            if (found := talk.grammar(None, ReplyShape(tools=tuple(STRICT), is_open=is_open)))
        )

        def takes(grammar: Any, text: str) -> bool:
            return accepts_ids(grammar.state(), tokenizer.encode(text, add_special=False, allow_special=True))

        for text in (
            f"{think}{call}",
            f"{think}<|channel|>final<|message|>Hello {{}}",
            call,
            think + think + call,
        ):
            assert takes(closed, text), text
        assert takes(own_compiler.compile(demanded), call)
        assert takes(opened, f"hm<|end|><|start|>assistant{call}")
        assert takes(opened, "hm<|end|><|start|>assistant<|channel|>final<|message|>Hello")
        for text in (call.replace("2", "true"), f"{think}{call.replace('city', 'town')}", "Hello", think):
            assert not takes(closed, text), text
    finally:
        own_compiler.close()
