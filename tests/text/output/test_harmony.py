"""gpt-oss's channels under a grammar: thinking has one, the requested text another, calls a third."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfVocabulary

from plait.request import Grammar, ReplyShape
from plait.text.chat.jinja import JinjaTemplate
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.output import Content
from plait.text.reply_format import ReplyFormat
from plait.text.tokenizers.builtin import builtin_tokenizer
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from plait.text.tokenizers.tokenizer import Tokenizer
from tests.text.accepting import accepts
from tests.text.test_reply_format import TOOL

Takes = Callable[[Grammar | None, str], bool]

HARMONY = "{{ messages }}{% if tools %}to=functions.{% endif %}<|channel|>analysis<|message|>"
FINAL, THOUGHT = "<|channel|>final<|message|>", "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
CALLED = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"n": 5}<|call|>'
OBJECT = Grammar("json_schema", '{"type": "object"}', "response_format")


@pytest.fixture(params=["text", "control tokens"], scope="module")
def harmony(
    request: Any, byte_level: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ReplyFormat, Takes]]:
    """Its markers being text, or tokens of their own: (how the model speaks, who takes a whole reply)."""
    if request.param == "text":
        found = builtin_tokenizer("cl100k_base", True)
    else:
        found = with_control_tokens(byte_level, tmp_path_factory.mktemp("harmony"))
    compiler = GrammarCompiler(found)
    model = ReplyFormat(found, JinjaTemplate("test", {"default": HARMONY}, found, {}))
    assert (model.tools and model.tools.name, model.reasoning and model.reasoning.name) == ("harmony",) * 2

    def takes(grammar: Grammar | None, text: str) -> bool:
        return accepts(compiler, grammar, text)

    yield model, takes
    compiler.close()


def with_control_tokens(byte_level: Any, folder: Path) -> Tokenizer:
    words = ("start", "end", "message", "channel", "constrain", "return", "call")
    vocabulary = HfVocabulary.from_str(byte_level.to_str())
    vocabulary.add_special_tokens([AddedToken(f"<|{w}|>", special=True, normalized=False) for w in words])
    vocabulary.save(str(folder / "tokenizer.json"))
    return load_hf_tokenizer(folder / "tokenizer.json", TokenizerFiles({}, {}))


def test_json_is_in_the_final_channel_and_thinking_before_it(harmony: tuple[ReplyFormat, Takes]) -> None:
    model, takes = harmony
    grammar = model.grammar(OBJECT, ReplyShape())
    for text in (f'{FINAL}{{"a": 1}}', f'{THOUGHT}{FINAL}{{"a": 1}}', f"{THOUGHT}{THOUGHT}{FINAL}{{}}"):
        assert takes(grammar, text), text
        reader = model.reader(ReplyShape())
        assert reader is not None
        parser = reader.parser()
        told = [*parser.push(text), *parser.finish()]
        assert "".join(delta.text for delta in told if isinstance(delta, Content)) == text.split(FINAL)[1]
    for text in (
        '{"a": 1}',
        f"{THOUGHT}{{}}",
        f"{FINAL}hm",
        f"{FINAL}{{}}{THOUGHT}",
        f"{FINAL}{THOUGHT}{{}}",
    ):
        assert not takes(grammar, text), text
    silent = model.grammar(OBJECT, ReplyShape(thinks=False))
    assert takes(silent, f"{FINAL}{{}}")
    assert not takes(silent, f"{THOUGHT}{FINAL}{{}}")


def test_a_call_in_place_of_json_has_a_channel_of_its_own(harmony: tuple[ReplyFormat, Takes]) -> None:
    model, takes = harmony
    grammar = model.grammar(OBJECT, ReplyShape(tools=(TOOL,)))
    # A control token that ends every reply is no part of one.
    called = CALLED.removesuffix("<|call|>") if "<|call|>" in model._special else CALLED
    for text in (called, f"{THOUGHT}{called}", f"{THOUGHT}{FINAL}{{}}"):
        assert takes(grammar, text), text
    for text in (f"{FINAL}{called}", called.replace("5", '"x"'), "{}"):
        assert not takes(grammar, text), text


@pytest.mark.parametrize(
    ("tail", "is_open", "good", "bad"),
    [
        ("<|start|>assistant", False, f"{FINAL}{{}}", "{}"),
        (f"<|start|>assistant{FINAL}", False, "{}", f"{FINAL}{{}}"),
        (f'<|start|>assistant{FINAL}{{"a": 1, ', False, '{"b": 2}', f"{FINAL}{{}}"),
        (
            "<|start|>assistant<|channel|>analysis<|message|>",
            True,
            f"hm<|end|><|start|>assistant{FINAL}{{}}",
            "{}",
        ),
    ],
)
def test_a_prompt_may_have_named_the_channel_already(
    harmony: tuple[ReplyFormat, Takes], tail: str, is_open: bool, good: str, bad: str
) -> None:
    model, takes = harmony
    assert model._tokenizer is not None
    prompt = model._tokenizer.encode(f"<|start|>user<|message|>hi<|end|>{tail}", allow_special=True)
    assert model.is_open(prompt) is is_open
    shape = ReplyShape(is_open=model.is_open(prompt), has_begun=model.has_begun(prompt))
    grammar = model.grammar(OBJECT, shape)
    assert takes(grammar, good)
    assert not takes(grammar, bad)
