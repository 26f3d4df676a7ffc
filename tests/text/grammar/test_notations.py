"""What each notation means: the replies that a grammar takes, and those it does not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from plait.errors import BadGrammar
from plait.request import Grammar
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.grammar.gbnf import lark_from_gbnf
from plait.text.grammar.request_fields import grammar_from
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from tests.text.accepting import accepts

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def compiler(byte_level: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    path: Path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    byte_level.save(str(path))
    made = GrammarCompiler(load_hf_tokenizer(path, TokenizerFiles({"eos_token": "</s>"}, {})))
    yield made
    made.close()


def takes(compiler: GrammarCompiler, body: dict[str, Any], reply: str) -> bool:
    grammar = grammar_from(body)
    assert grammar is not None
    return accepts(compiler, grammar, reply)


ARITHMETIC = r"""
# sums, as llama.cpp would write them
root   ::= (expr "=" ws term "\n")+
expr   ::= term ([-+*/] term)*
term   ::= ident | num | "(" ws expr ")" ws
ident  ::= [a-z] [a-z0-9_]* ws
num    ::= [0-9]+ ws
ws     ::= [ \t\n]*
"""


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (ARITHMETIC, ["a+1=2\n", "(x_1 *3) -y= 7\n", "1=1\n2=2\n"], ["a+1=2", "a+=2\n", "A=1\n", ""]),
        ('root ::= "a" | b*\nb ::= "b" "c"?', ["a", "", "b", "bcb", "bcbc"], ["ab", "c", "cb"]),
        ("root ::= [^a-c\\n]{2,3}", ["xy", "xyz", "é你"], ["x", "ax", "x\n", "wxyz"]),
        (r'root ::= "\u00e9\x41\"\\" [\u4e00-\u9fff]', ['éA"\\你'], ["\\u00e9", 'éA"\\a']),
        (r'root ::= "\u0022" "\u0041"', ['"A'], ["A", '"a']),
        ("root ::= . .", ["ab", "\n\n", "é\n"], ["a", "abc"]),
        ("root ::= [&&a-z] [~~]", ["&~", "a~"], ["é~", "a&", "A~"]),
        (r'root ::= [\]^"#-] "." "#"  # a comment "with a quote', ["].#", '".#', "#.#"], ["a.#", "]x#"]),
        ('root ::= some-Rule\nsome-Rule ::= "x" |\n  "y"', ["x", "y"], ["z"]),
        ('root ::= "a"{3} "b"{1,} "c"{0,2}', ["aaab", "aaabbcc"], ["aab", "aaac", "aaabccc"]),
    ],
)
def test_llama_cpps_notation(
    compiler: GrammarCompiler, grammar: str, good: list[str], bad: list[str]
) -> None:
    for field in ("grammar", "guided_grammar"):
        assert [takes(compiler, {field: grammar}, reply) for reply in good] == [True] * len(good)
        assert [takes(compiler, {field: grammar}, reply) for reply in bad] == [False] * len(bad)


@pytest.mark.parametrize(
    ("grammar", "says"),
    [
        ('start ::= "a"', "no rule 'root'"),
        ("root ::= nowhere", "no rule 'nowhere'"),
        ('root ::= "a', "Unexpected end|not a grammar"),
        ("root ::= [a", "not a grammar"),
        ('root ::= "a" ~ "b"', "Expected name"),
        (r'root ::= "\q"', "Invalid escape"),
        (r'root ::= "\ud800"', "is not a character"),
        (r'root ::= "\U00110000"', "is not a character"),
        ("root ::= root", "no reply at all"),
    ],
)
def test_wrong_notation_is_refused_with_the_place(compiler: GrammarCompiler, grammar: str, says: str) -> None:
    found = grammar_from({"grammar": grammar})
    assert found is not None
    with pytest.raises(BadGrammar, match=says):
        compiler.compile(found)


def test_what_the_converter_sees_keeps_its_meaning() -> None:
    assert lark_from_gbnf(r'root ::= "\u00e9\u0022"') == 'start: "é" "\\x22"'
    with pytest.raises(ValueError, match="nested too deeply"):
        lark_from_gbnf("root ::= " + "(" * 5000 + '"a"' + ")" * 5000)


@pytest.mark.parametrize(
    ("regex", "good", "bad"),
    [
        (r"a/b\\/c", ["a/b\\/c"], ["a/b/c"]),
        (r"^ab$", ["ab"], ["a", "abc"]),
        (r"a|bc", ["a", "bc"], ["ac", "b", ""]),
        (r"(?i)yes|no", ["YES", "No"], ["maybe"]),
        ("a\nb", ["a\nb"], ["a b"]),
        (r"[^/]+/\d{2}", ["é/12"], ["/12", "é/1"]),
        (r".", ["x", "你"], ["\n", "xy"]),
    ],
)
def test_regular_expressions_hold_from_end_to_end(
    compiler: GrammarCompiler, regex: str, good: list[str], bad: list[str]
) -> None:
    assert [takes(compiler, {"guided_regex": regex}, reply) for reply in good] == [True] * len(good)
    assert [takes(compiler, {"guided_regex": regex}, reply) for reply in bad] == [False] * len(bad)


@pytest.mark.parametrize("regex", [r"(a)\1", r"(?<=a)b", r"\bword\b", "[", "a{2,1}", "*"])
def test_regular_expressions_beyond_regular_are_refused(compiler: GrammarCompiler, regex: str) -> None:
    found = grammar_from({"guided_regex": regex})
    assert found is not None
    with pytest.raises(BadGrammar, match=r"regex"):
        compiler.compile(found)


def test_lark(compiler: GrammarCompiler) -> None:
    rules = 'start: greeting ", " NAME "!"\ngreeting: "Hi" | "Hello"\nNAME: /[A-Z][a-z]+/ & ~/Bo+b/'
    with_json = 'start: "call " %json {"type": "array", "items": {"enum": [1, 2]}}'
    for grammar, reply, good in (
        (rules, "Hi, Ada!", True),
        (rules, "Hello, Bab!", True),
        (rules, "Hi, Bob!", False),
        (rules, "Hi, ada!", False),
        (with_json, "call [1, 2]", True),
        (with_json, "call []", True),
        (with_json, "call [3]", False),
    ):
        assert takes(compiler, {"guided_grammar": grammar}, reply) is good, reply


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ('{"a": 1}', True),
        (' {"a": 1}', False),
        ('{"a": 1} ', False),
        ('{"a": 01}', False),
        ('{"a": "\\u0000\\n\\""}', True),
        ('{"a": "\n"}', False),
        ('{"a": [1,]}', False),
    ],
)
def test_json_object_takes_one_json_object(compiler: GrammarCompiler, text: str, good: bool) -> None:
    assert takes(compiler, {"response_format": {"type": "json_object"}}, text) is good


SPACED = {
    '{"a":1,"b":[]}': "line any none",
    '{ "a" : 1 , "b" : [ ] }': "line any",
    '{\n  "a": 1,\n\t"b": []\n}': "line any",
    "{\n" + " " * 8 + '"a": 1}': "line any",
    "{\n" + " " * 9 + '"a": 1}': "any",
    '{"a":  1}': "any",
    '{\n\n"a": 1}': "any",
    '{\n \n"a": 1}': "any",
    '{"a":\r\n1}': "any",
    '{"a":' + " " * 32 + "1}": "any",
    '{"a":' + " " * 33 + "1}": "",
}


@pytest.mark.parametrize("space", ["line", "any", "none"])
def test_white_space_in_json_is_one_space_or_one_indented_line_unless_set(
    compiler: GrammarCompiler, space: Any
) -> None:
    grammar = replace(Grammar("json_schema", '{"type": "object"}'), space=space)
    for text, spaces in SPACED.items():
        assert accepts(compiler, grammar, text) is (space in spaces.split()), text
