"""Hostile grammars are refused in bounded time and memory, with the reason, and harm only their request."""

from __future__ import annotations

import gc
import json
import resource
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from plait.errors import BadGrammar, CapacityError, OutOfMemory
from plait.request import Grammar
from plait.text.grammar import compiler as grammar_compiler
from plait.text.grammar import state as grammar_state
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.grammar.library import GrammarLimits, readable
from plait.text.grammar.request_fields import grammar_from
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from plait.text.tokenizers.tokenizer import TextTokenizer
from tests.text.accepting import accepts, count_allowed

pytestmark = pytest.mark.timeout(120)
GOOD = Grammar("regex", "[a-c]{3}")
# Long enough by the clock that a busy machine meets the limit under test.
LIMITS = GrammarLimits(cpu_s=0.5, memory_bytes=384 << 20, timeout_s=60.0, wait_s=60.0, children=1)


def chain(n: int) -> str:
    """A schema that refers to itself n times over, and ends."""
    links = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(n)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**links, f"d{n}": {"type": "null"}}})


def nested(n: int) -> str:
    return '{"items":' * n + "{}" + "}" * n


HOSTILE = {
    "a schema nested deeply": ({"guided_json": nested(20_000)}, "nested too deeply|references too deep"),
    "a schema nested less deeply": ({"guided_json": nested(150)}, "recursion limit"),
    "a long chain of references": ({"guided_json": chain(5_000)}, "references too deep"),
    "references in a circle": ({"guided_json": '{"$ref": "#"}'}, "no reply at all"),
    "references in a circle, with more beside": (
        {"guided_json": '{"allOf": [{"$ref": "#"}, {"type": "object"}]}'},
        "circular references",
    ),
    "an exponential schema": (
        {"guided_json": {"allOf": [{"anyOf": [{"required": [f"{n}{c}"]} for c in "ab"]} for n in range(30)]}},
        "schema too large",
    ),
    "patterns to compare with each other": (
        {"guided_json": {"patternProperties": {f"^p{i}_.*$": {"type": "string"} for i in range(1000)}}},
        r"takes more than 0.5 s|too large",
    ),
    "a thousand regular expressions at once": (
        {"guided_grammar": "start: T\nT: " + " & ".join(f"/(?s:.*){i}(?s:.*)/" for i in range(1000))},
        r"takes more than 0.5 s|too large|fuel exhausted",
    ),
    "an exponential terminal": (
        {
            "guided_grammar": "start: T0\n"
            + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(60))
            + '\nT60: "a"'
        },
        r"too big|takes more than",
    ),
    "an exponential rule": (
        {
            "guided_grammar": "start: r0\n"
            + "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(900))
            + '\nr900: "a"|'
        },
        r"too many|row has|takes more than|too large",
    ),
    "a chain of rules": (
        {
            "guided_grammar": "start: r0\n"
            + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(9000))
            + '\nr9000: "a"'
        },
        "references too deep",
    ),
    "an exponential regular expression": (
        {"guided_regex": "((a{0,999}){0,999}){0,999}"},
        "too many expressions",
    ),
    "a regular expression nested deeply": (
        {"guided_regex": "(" * 9000 + "a" + ")" * 9000},
        "nested parentheses",
    ),
    "a grammar nested deeply": (
        {"guided_grammar": "start: " + "(" * 9000 + '"a"' + ")" * 9000},
        "deeply nested",
    ),
    "llama.cpp's notation nested deeply": (
        {"grammar": "root ::= " + "(" * 9000 + '"a"' + ")" * 9000},
        "too deeply",
    ),
    "llama.cpp's notation with rules in a row": (
        {"grammar": "".join(f"r{i} ::= r{i + 1}\n" for i in range(9000)) + 'r9000 ::= "a"\nroot ::= r0'},
        r"takes more than|references too deep",
    ),
    "something larger than the limit": (
        {"guided_regex": "a" * (256 << 10) + "a"},
        "262145 bytes; at most 262144",
    ),
    "half a character": ({"guided_regex": "\ud800"}, "half of a surrogate pair"),
    "half a character, escaped": ({"guided_json": '{"const": "\\ud800"}'}, "half of a surrogate pair"),
}
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "if": ({"if": {"type": "string"}, "then": {"minLength": 1}}, r'Unimplemented keys.*"if"'),
    "not": ({"not": {"type": "string"}}, '"not"'),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"items": {"contains": {}}}, "contains"),
    "nullable": (
        {"properties": {"a": {"type": "string", "nullable": True}}},
        "'nullable' is not supported; write",
    ),
    "dependencies": ({"anyOf": [{"dependencies": {"a": ["b"]}}]}, "'dependencies' is not supported"),
    "$dynamicRef": ({"$defs": {"a": {"$dynamicRef": "#a"}}}, r"'\$dynamicRef' is not supported; use \$ref"),
    "x-guidance": ({"x-guidance": {"lenient": True}, "not": {}}, "'x-guidance' is not supported"),
    "minProperties": ({"type": "object", "minProperties": 2}, "'minProperties' is not supported above"),
    "format": ({"type": "string", "format": "iri"}, "Unknown format: iri"),
    "look-ahead": ({"type": "string", "pattern": "(?=a)b"}, "look-around"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"minimum": 3}]}, "may both hold; send anyOf"),
    "a remote $ref": ({"$ref": "http://localhost/schema"}, "not present|not fetch"),
    "a file": ({"$ref": "file:///etc/passwd"}, "not present|not fetch"),
    "nothing": ({"enum": []}, "Unsatisfiable"),
    "a wrong type": ({"type": "strnig"}, "strnig"),
    "a bad bound": ({"minLength": "3"}, "minLength"),
}


@pytest.fixture(scope="module")
def tokenizer(byte_level: Any, tmp_path_factory: pytest.TempPathFactory) -> TextTokenizer:
    path: Path = tmp_path_factory.mktemp("byte_level") / "tokenizer.json"
    byte_level.save(str(path))
    return load_hf_tokenizer(path, TokenizerFiles({"eos_token": "</s>"}, {}))


@pytest.fixture(scope="module")
def compiler(tokenizer: TextTokenizer) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(tokenizer, limits=LIMITS)
    made.checker.start()
    yield made
    made.close()


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_grammars_are_refused_with_the_reason(compiler: GrammarCompiler, name: str) -> None:
    body, says = HOSTILE[name]
    grammar = grammar_from(body)
    assert grammar is not None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BadGrammar, match=says) as refusal:
        compiler.compile(grammar)
    assert refusal.value.param == next(iter(body))
    assert len(str(refusal.value)) < 800
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10  # KiB
    assert compiler.compile(GOOD).state().masks()  # and the next request is served


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_what_a_schema_asks_and_cannot_have_is_refused_by_name(compiler: GrammarCompiler, name: str) -> None:
    schema, says = UNSUPPORTED[name]
    grammar = grammar_from({"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}})
    assert grammar is not None
    with pytest.raises(BadGrammar, match=says) as refusal:
        compiler.compile(grammar)
    assert refusal.value.param == "response_format.json_schema.schema"


def test_a_property_may_be_called_like_an_unsupported_keyword(compiler: GrammarCompiler) -> None:
    schema = {
        "properties": {"nullable": {"const": {"nullable": True}}, "dependencies": {"enum": ["x-guidance"]}}
    }
    grammar = Grammar("json_schema", json.dumps(schema))
    reply = '{"nullable": %s, "dependencies": "x-guidance"}'
    assert accepts(compiler, grammar, reply % '{"nullable": true}')
    assert not accepts(compiler, grammar, reply % "null")


@pytest.mark.parametrize(
    ("schema", "says"),
    [("{", "not JSON"), ("3", "not an object"), ("false", "not an object"), ("[]", "not an object")],
)
def test_a_schemas_text_must_be_a_schema(compiler: GrammarCompiler, schema: str, says: str) -> None:
    with pytest.raises(BadGrammar, match=says):
        compiler.compile(Grammar("json_schema", schema))


@pytest.mark.parametrize("option", ["temperature=0.5", 'stop="x"', "max_tokens=3", 'lazy, stop = "x"'])
def test_a_rules_option_that_cannot_be_kept_is_refused(compiler: GrammarCompiler, option: str) -> None:
    with pytest.raises(BadGrammar, match=r"rule option '(temperature|stop|max_tokens)' cannot be honoured"):
        compiler.compile(Grammar("lark", f"start: a\na[{option}]: /b+/"))
    compiler.compile(Grammar("lark", f"start: a // {option}\na: {json.dumps(option)} /stop=/"))


def test_no_grammar_can_make_masks_depend_on_the_tokenizer(compiler: GrammarCompiler) -> None:
    forcing = '%llguidance {"no_forcing": false}\n'
    state = compiler.compile(Grammar("lark", f'{forcing}start: "the" " quick"\n{forcing}')).state()
    firsts = [compiler.vocabulary.tokenizer.encode(t, add_special=False)[0] for t in ("t", "the")]
    assert [count_allowed(state, [i]) for i in firsts] == [1, 1]


def test_the_clock_ends_a_trial_too(tokenizer: TextTokenizer) -> None:
    body, _ = HOSTILE["patterns to compare with each other"]
    grammar = grammar_from(body)
    assert grammar is not None
    limits = GrammarLimits(cpu_s=1000, timeout_s=0.3)
    slow = GrammarCompiler(tokenizer, limits=limits)
    try:
        for _ in range(2):  # which is not remembered against the grammar
            with pytest.raises(CapacityError, match=r"could not be tried out within 0\.3 s"):
                slow.compile(grammar)
        slow.checker._trials()._limits = replace(limits, timeout_s=60.0)  # what is good may be slow, too
        assert slow.compile(GOOD).state().masks()
    finally:
        slow.close()


def test_a_trying_process_that_is_killed_is_replaced(tokenizer: TextTokenizer) -> None:
    made = GrammarCompiler(tokenizer, limits=LIMITS)
    try:
        for n in range(3):
            made.compile(Grammar("regex", f"a{{{n + 1}}}"))
            child = trying(made)
            child.kill()
            child.wait()
    finally:
        made.close()


def test_signals_for_the_whole_group_end_no_trying_process(tokenizer: TextTokenizer) -> None:
    made = GrammarCompiler(tokenizer, limits=LIMITS)
    try:
        made.compile(GOOD)
        child = trying(made)
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            child.send_signal(number)
        made.compile(Grammar("regex", "[a-d]{3}"))
        assert trying(made) is child
    finally:
        made.close()


def test_a_compiler_that_is_forgotten_leaves_no_process(tokenizer: TextTokenizer) -> None:
    made = GrammarCompiler(tokenizer, limits=LIMITS)
    made.compile(GOOD)
    child = trying(made)
    assert child.poll() is None
    del made
    gc.collect()
    assert child.poll() == -signal.SIGKILL


def trying(compiler: GrammarCompiler) -> subprocess.Popen[str]:
    """The process that tries its grammars out."""
    pool = compiler.checker._pool
    assert pool is not None
    (child,) = (child for child in pool._children if child is not None)
    return child._process


AMBIGUOUS = Grammar("lark", 'start: e\ne: e e | e e e | "a"', "guided_grammar")


@pytest.mark.parametrize("limits", [{"max_row_items": 100}, {"reply_s": 0.02, "token_s": 0.0}])
def test_a_grammar_that_becomes_too_costly_ends_only_its_reply(
    tokenizer: TextTokenizer, limits: dict[str, Any]
) -> None:
    made = GrammarCompiler(tokenizer, limits=GrammarLimits(trial_steps=4, timeout_s=60.0, **limits))
    state, other = made.compile(AMBIGUOUS).state(), made.compile(GOOD).state()
    row = np.empty(made.vocabulary.num_words, np.uint32)
    (a,) = tokenizer.encode("a", add_special=False)

    def write() -> None:
        for _ in range(1000):
            state.fill(row)
            state.accept(a)

    with pytest.raises(BadGrammar, match=r"cannot be followed any further|make it less ambiguous") as refusal:
        write()
    assert refusal.value.param == "guided_grammar"
    for again in (state, state.copy()):
        with pytest.raises(BadGrammar):
            again.fill(row)
    other.accept(a)
    made.close()


def test_threads_share_one_compiler(tokenizer: TextTokenizer) -> None:
    made = GrammarCompiler(tokenizer, limits=LIMITS)
    with ThreadPoolExecutor(4) as pool:
        states = list(pool.map(lambda n: made.compile(Grammar("regex", f"a{{{n}}}")).state(), range(1, 13)))
    a = tokenizer.encode("a", add_special=False)
    assert [count_allowed(state, a * 20) for state in states] == list(range(1, 13))
    made.close()


def test_where_a_limit_leaves_too_little_memory_the_library_is_not_called(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = compiler.compile(GOOD).state()
    asked: list[int] = []
    for module in (grammar_compiler, grammar_state):
        monkeypatch.setattr(module, "is_free", lambda nbytes: asked.append(nbytes))
    monkeypatch.setattr(grammar_compiler, "compile_grammar", lambda *_: pytest.fail("it was called"))
    with pytest.raises(OutOfMemory, match=r"ulimit -v.*64 MiB"):
        compiler.compile(GOOD)
    with pytest.raises(OutOfMemory, match="ulimit -v"):
        followed.masks()
    assert asked == [64 << 20, 32 << 20]


def test_a_complaint_is_one_short_line() -> None:
    long = (
        "at 1(8): bad\n  1 | "
        + "(" * 5000
        + "\n    ^^^\nerror: too deep\n<backtrace>\n 0: main\n</backtrace>\n"
    )
    line = readable(long)
    assert line.startswith("at 1(8): bad; error: too deep; 1 | (((")
    assert len(line) < 300
    assert readable("<non-verbose/>") == "no reason given"
