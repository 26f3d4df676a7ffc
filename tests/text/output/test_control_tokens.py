"""Markers as control tokens of a vocabulary: demanded, strict and free replies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfVocabulary

from plait.request import Grammar, ReplyShape
from plait.text.chat.jinja import JinjaTemplate
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.reply_format import ReplyFormat
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from tests.text.accepting import accepts
from tests.text.grammar.test_strict_tools import STRICT
from tests.text.output.test_call_grammar import WRITTEN
from tests.text.output.test_tool_families import COHERE_TEMPLATE, GLM_TEMPLATE, THINKS

MARKERS = {
    "glm": [
        f"<{edge}{part}>" for part in ("tool_call", "arg_key", "arg_value", "think") for edge in ("", "/")
    ],
    "cohere": [
        f"<|{edge}_{part}|>" for part in ("THINKING", "ACTION", "RESPONSE") for edge in ("START", "END")
    ],
    "dsml": ["｜DSML｜", "<think>", "</think>"],
    "internlm": ["<|action_start|>", "<|plugin|>", "<|action_end|>"],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>"],
    "gemma4": ["<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"],
    "solar_open": [
        *(f"<|{name}|>" for name in ("think", "content", "begin", "end", "flush", "tool_calls", "calls")),
        *(f"<|tool_call:{name}|>" for name in ("begin", "name", "args", "end")),
    ],
}
SOURCES = {
    "glm": GLM_TEMPLATE + THINKS,
    "cohere": COHERE_TEMPLATE,
    "dsml": "{{ tools }}<｜DSML｜tool_calls></think>",
    "internlm": "{{ tools }}<|action_start|><|plugin|>",
    "kimi_k3": "{{ tools }}<|open|><|sep|><|close|>",
    "gemma4": "{{ tools }}<|tool_call><|channel>thought<channel|>",
    "solar_open": "{{ tools }}<|think|><|tool_calls|><|content|><|end|>",
}
THOUGHT = {
    "glm": "<think>hm</think>\n",
    "cohere": "<|START_THINKING|>hm<|END_THINKING|>",
    "dsml": "<think>hm</think>",
    "internlm": "",
    "kimi_k3": "<|open|>think<|sep|>hm<|close|>think<|sep|>",
    "gemma4": "<|channel>thought\nhm<channel|>",
    "solar_open": "<|think|>hm<|end|><|begin|>assistant",
}
SAID = {
    "cohere": "<|START_RESPONSE|>Hello<|END_RESPONSE|>",
    "kimi_k3": "<|open|>response<|sep|>Hello<|close|>response<|sep|>",
    "solar_open": "<|content|>Hello",
}
ENDS = ("<|END_RESPONSE|>", "<|close|>response<|sep|>")


RARE = ("internlm", "gemma4", "solar_open", "dsml")


@pytest.mark.parametrize(
    ("name", "source"),
    [pytest.param(*one, marks=[pytest.mark.slow] * (one[0] in RARE)) for one in SOURCES.items()],
)
def test_a_reply_may_be_what_its_family_writes(
    name: str, source: str, byte_level: Any, tmp_path: Path
) -> None:
    vocabulary = HfVocabulary.from_str(byte_level.to_str())
    vocabulary.add_special_tokens([AddedToken(m, special=True, normalized=False) for m in MARKERS[name]])
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_hf_tokenizer(tmp_path / "tokenizer.json", TokenizerFiles({}, {}))
    talk = ReplyFormat(tokenizer, JinjaTemplate("test", {"default": source}, tokenizer, {}))
    compiler = GrammarCompiler(tokenizer)

    def takes(grammar: Grammar | None, text: str) -> bool:
        return accepts(compiler, grammar, text)

    call, said, thought = WRITTEN[name].removesuffix("<|calls|>"), SAID.get(name, "Hello"), THOUGHT[name]
    wrong, chosen = call.replace("2", "two"), said.replace("Hello", "yes")
    for end in ENDS:
        chosen = chosen.removesuffix(end)
    try:
        demanded = talk.grammar(None, ReplyShape(tools=tuple(STRICT), choice="required"))
        assert all(takes(demanded, text) for text in (call, thought + call))
        assert not any(takes(demanded, text) for text in (said, wrong, f"{thought}x"))
        strict = talk.grammar(None, ReplyShape(tools=tuple(STRICT)))
        assert all(takes(strict, text) for text in (call, said, thought + call, thought + said))
        assert takes(strict, "Hello") or name == "solar_open"
        assert not any(takes(strict, text) for text in (wrong, call + "more"))
        formed = talk.grammar(Grammar("choice", '["yes"]', "x"), ReplyShape(tools=tuple(STRICT)))
        assert all(takes(formed, text) for text in (call, chosen))
        assert not takes(formed, said)
    finally:
        compiler.close()
    reader = talk.reader(ReplyShape(tools=tuple(STRICT)))
    assert reader is not None
    assert {tokenizer.token_text(i) for i in reader.shown} == {*MARKERS[name]}


@pytest.mark.parametrize(
    ("prompt", "has_begun"),
    [
        ("<|CHATBOT_TOKEN|>", False),
        ("<|CHATBOT_TOKEN|><|START_THINKING|><|END_THINKING|>", False),
        ("<|CHATBOT_TOKEN|><|START_RESPONSE|>", True),
        ("<|CHATBOT_TOKEN|><|START_RESPONSE|>So", True),
    ],
)
def test_command_s_prompt_may_have_begun_the_response(
    prompt: str, has_begun: bool, byte_level: Any, tmp_path: Path
) -> None:
    byte_level.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_hf_tokenizer(tmp_path / "tokenizer.json", TokenizerFiles({}, {}))
    talk = ReplyFormat(tokenizer, JinjaTemplate("test", {"default": COHERE_TEMPLATE}, tokenizer, {}))
    assert talk.has_begun(tokenizer.encode(prompt, add_special=False)) is has_begun
