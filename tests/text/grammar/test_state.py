"""Grammar state of a reply: which tokens may come next, where it may stop; replies share nothing."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from plait.errors import BadGrammar, EngineError
from plait.text.grammar.compiler import GrammarCompiler
from plait.text.grammar.request_fields import grammar_from
from plait.text.grammar.state import GrammarState, allows
from plait.text.grammar.vocabulary import vocabulary_of
from plait.text.tokenizers.gguf import gguf_tokenizer
from plait.text.tokenizers.hf import TokenizerFiles, load_hf_tokenizer
from plait.text.tokenizers.tokenizer import TextTokenizer
from tests.text.accepting import count_allowed

pytestmark = pytest.mark.timeout(120)
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", 'b"\\\n', "é你😀"]}, "maxItems": 3},
        "next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]},
    },
    "required": ["name", "age", "next"],
    "additionalProperties": False,
}
SCHEMAS = {
    "person": PERSON,
    "object": {"type": "object"},
    "anything": {},
    "map": {
        "type": "object",
        "patternProperties": {"^k_": {"type": "number"}},
        "additionalProperties": False,
    },
    "tuple": {"type": "array", "prefixItems": [{"type": "boolean"}, {"const": None}], "items": False},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,5}$"},
    "date": {"type": "string", "format": "date"},
    "numbers": {
        "type": "array",
        "items": {"type": "number", "exclusiveMinimum": -2, "maximum": 7},
        "minItems": 2,
    },
    "union": {
        "oneOf": [
            {"type": "object", "properties": {"kind": {"const": k}}, "required": ["kind"]} for k in ("x", "y")
        ]
    },
}
ESCAPED = [
    '"',
    "\\",
    "\n",
    "\t",
    "/",
    "\u2028",
    "é",
    "你好",
    "😀",
    "<|im_end|>",
    "</s>",
    "\x7f",
    "\x00",
    "a b",
]


class Words:
    """A vocabulary under test, and its grammars."""

    def __init__(self, tokenizer: TextTokenizer) -> None:
        self.tokenizer = tokenizer
        self.compiler = GrammarCompiler(tokenizer)
        self.vocabulary = self.compiler.vocabulary
        self.by_first: dict[bytes, list[int]] = {}
        for i in range(self.vocabulary.size):
            if i not in tokenizer.special_ids and (token := tokenizer.token_bytes(i)):
                self.by_first.setdefault(token[:1], []).append(i)
        tokens = {tokenizer.token_bytes(i): i for c in CLOSERS for i in self.by_first.get(c, ())}
        self.closers = [tokens[c] for c in CLOSERS if c in tokens]

    def state(self, **body: Any) -> GrammarState:
        grammar = grammar_from(body)
        assert grammar is not None
        return self.compiler.compile(grammar).state()

    def allowed(self, state: GrammarState) -> list[int]:
        """The ids that may come next; an end is among them exactly when the reply may stop."""
        row = np.full(self.vocabulary.num_words, 0xFFFFFFFF, np.uint32)
        state.fill(row)
        ids = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
        assert bool(self.vocabulary.ends.intersection(ids)) == state.may_stop
        assert not state.may_stop or self.vocabulary.ends <= set(ids)
        return ids

    def split(self, text: bytes, choose: random.Random) -> list[int]:
        """Some way to write a text in tokens."""
        ids, at = [], 0
        while at < len(text):
            fitting = [
                i
                for i in self.by_first[text[at : at + 1]]
                if text.startswith(self.tokenizer.token_bytes(i), at)
            ]
            ids.append(choose.choice(fitting))
            at += len(self.tokenizer.token_bytes(ids[-1]))
        return ids

    def takes(self, state: GrammarState, text: str, seed: int = 0) -> bool:
        """Whether the whole text is a reply, by one way to write it."""
        for token_id in self.split(text.encode(), random.Random(seed)):
            if token_id not in self.allowed(state):
                return False
            state.accept(token_id)
        return state.may_stop

    def walk(self, state: GrammarState, choose: random.Random, free: int = 40) -> bytes:
        """A reply of uniformly random tokens; after `free` of them, it is closed as soon as it can be."""
        reply = b""
        for step in range(2_000):
            if state.is_finished:
                return reply
            ids = self.allowed(state)
            if step >= free:
                if state.may_stop:
                    return reply
                ids = [i for i in self.closers if i in ids][:1] or ids
            token_id = choose.choice(ids)
            state.accept(token_id)
            if token_id in self.vocabulary.ends:
                return reply
            assert token_id not in self.tokenizer.special_ids
            reply += self.tokenizer.token_bytes(token_id)
        raise AssertionError(f"the reply does not end: {reply[:200]!r}")


CLOSERS = [c.encode() for c in '"]}:,0n1']


@pytest.fixture(scope="module")
def smollm(smollm2_metadata: Any) -> Iterator[Words]:
    tokenizer = gguf_tokenizer(smollm2_metadata)
    assert tokenizer is not None
    words = Words(tokenizer)
    yield words
    words.compiler.close()


@pytest.fixture(params=["byte_level", "metaspace"], scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Words]:
    """A byte-level vocabulary, and a SentencePiece-like one with byte tokens and pieces."""
    path: Path = tmp_path_factory.mktemp(request.param) / "tokenizer.json"
    request.getfixturevalue(request.param).save(str(path))
    words = Words(load_hf_tokenizer(path, TokenizerFiles({"bos_token": "<s>", "eos_token": "</s>"}, {})))
    yield words
    words.compiler.close()


def check(schema: Any, reply: bytes) -> None:
    jsonschema.Draft202012Validator(schema, format_checker=jsonschema.FormatChecker()).validate(
        json.loads(reply)
    )


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_replies_of_a_real_vocabulary_satisfy_their_schema(smollm: Words, name: str) -> None:
    for seed in range(3):
        check(SCHEMAS[name], smollm.walk(smollm.state(guided_json=SCHEMAS[name]), random.Random(seed)))


@pytest.mark.parametrize("name", SCHEMAS)
def test_random_replies_of_tiny_vocabularies_satisfy_their_schema(tiny: Words, name: str) -> None:
    for seed in range(6):
        check(SCHEMAS[name], tiny.walk(tiny.state(guided_json=SCHEMAS[name]), random.Random(seed)))


CHARACTERS = st.sampled_from(ESCAPED) | st.characters(exclude_categories=["Cs"])
STRINGS = st.lists(CHARACTERS, max_size=6).map("".join)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=40)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | STRINGS,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(STRINGS, inner, max_size=3),
        max_leaves=6,
    ),
    seed=st.integers(0, 1000),
)
def test_every_json_text_is_taken_however_it_is_split(tiny: Words, value: Any, seed: int) -> None:
    text = json.dumps(value, ensure_ascii=False)
    assert tiny.takes(tiny.state(guided_json=True), text.replace("\x7f", "\\u007f"), seed)


@pytest.mark.parametrize("text", ESCAPED)
def test_escapes_and_control_tokens_texts_are_only_text(tiny: Words, text: str) -> None:
    reply = tiny.walk(tiny.state(guided_json={"const": text}), random.Random(1))  # asserts: no control token
    assert json.loads(reply) == text
    assert tiny.walk(tiny.state(guided_choice=[text]), random.Random(1)).decode() == text


def test_a_byte_token_and_a_piece_of_the_same_text_are_both_allowed(metaspace: Any, tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    metaspace.save(str(path))
    words = Words(load_hf_tokenizer(path, TokenizerFiles({"eos_token": "</s>"}, {})))
    both = {metaspace.token_to_id("q"), metaspace.token_to_id("<0x71>")}
    assert len(both) == 2
    assert set(words.allowed(words.state(guided_regex="q"))) == both
    words.compiler.close()


def test_a_reply_may_stop_exactly_where_it_is_complete(tiny: Words) -> None:
    state = tiny.state(guided_regex="ab|abc|abcde?")
    stops = [state.may_stop]
    for byte in b"abcd":
        state.accept(tiny.split(bytes([byte]), random.Random(0))[0])
        stops.append(state.may_stop)
        assert bool(tiny.vocabulary.ends.intersection(tiny.allowed(state))) == stops[-1]
    assert stops == [False, False, True, True, True]
    assert not state.is_finished
    state.accept(tiny.split(b"e", random.Random(0))[0])
    assert state.is_finished
    assert set(tiny.allowed(state)) == tiny.vocabulary.ends
    state.accept(min(tiny.vocabulary.ends))
    assert state.may_stop
    assert state.is_finished
    assert set(tiny.allowed(state)) == tiny.vocabulary.ends


def test_an_end_that_is_not_allowed_and_a_wrong_token_are_our_own_fault(tiny: Words) -> None:
    state = tiny.state(guided_regex="ab")
    with pytest.raises(EngineError, match="does not let end here"):
        state.accept(min(tiny.vocabulary.ends))
    wrong = tiny.split(b"b", random.Random(0))[0]
    with pytest.raises(EngineError, match=f"token {wrong} was chosen where its grammar does not allow it"):
        state.accept(wrong)
    assert tiny.allowed(state) == tiny.allowed(tiny.state(guided_regex="ab"))  # it stayed where it was
    ended = tiny.state(guided_regex="a?")
    ended.accept(min(tiny.vocabulary.ends))
    with pytest.raises(EngineError, match="follows the end"):
        ended.accept(wrong)
    with pytest.raises(EngineError, match=r"contiguous uint32, not \[3\] of int64"):
        ended.fill(np.zeros(3, np.int64))  # type: ignore[arg-type]


GRAMMARS: list[dict[str, Any]] = [
    {"guided_json": PERSON},
    {"guided_regex": r"(\p{Lu}\w{1,3} ?)+!"},
    {"guided_choice": ["one", "ones", 'once "upon"']},
    {"grammar": 'root ::= ("x" | "y" root)+'},
]


@pytest.mark.parametrize("body", GRAMMARS)
def test_masks_of_a_draft_are_those_of_the_reply_itself(smollm: Words, body: dict[str, Any]) -> None:
    choose = random.Random(3)
    for _ in range(4):
        state, twin = smollm.state(**body), smollm.state(**body)
        draft: list[int] = []
        masks: list[list[int]] = []
        for _ in range(8):
            masks.append(smollm.allowed(twin))
            if twin.is_finished:
                break
            draft.append(choose.choice([i for i in masks[-1] if i not in smollm.vocabulary.ends]))
            twin.accept(draft[-1])
        else:
            masks.append(smollm.allowed(twin))
        found = state.masks(draft)
        assert [bits(mask) for mask in found] == masks
        assert count_allowed(state, draft) == len(draft)
        assert smollm.allowed(state) == masks[0]  # it stayed where it was


def bits(mask: bytes) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.frombuffer(mask, np.uint8), bitorder="little")).tolist()


def test_a_draft_is_cut_where_it_leaves_the_grammar_or_ends(tiny: Words) -> None:
    a, b = (tiny.split(c, random.Random(0))[0] for c in (b"a", b"b"))
    end = min(tiny.vocabulary.ends)
    state = tiny.state(guided_regex="a{2,5}")
    assert count_allowed(state, []) == 0
    assert count_allowed(state, [b]) == 0
    assert count_allowed(state, [a, b, a]) == 1
    assert count_allowed(state, [a] * 9) == 5
    assert count_allowed(state, [a, a, end, a]) == 2
    assert count_allowed(state, [end]) == 0
    assert len(state.masks([a, a, a])) == 4
    assert count_allowed(state, [-1]) == count_allowed(state, [10**9]) == 0
    for token_id in (a, a):
        state.accept(token_id)
    assert count_allowed(state, [a] * 9) == 3


@pytest.mark.parametrize("body", GRAMMARS)
def test_forced_tokens_are_a_draft_that_is_never_wrong(smollm: Words, body: dict[str, Any]) -> None:
    state, choose, found = smollm.state(**body), random.Random(5), 0
    for _ in range(30):
        if state.is_finished:
            break
        before = smollm.allowed(state)
        forced = state.find_forced()
        assert smollm.allowed(state) == before
        assert count_allowed(state, forced) == len(forced)
        found += len(forced)
        token_id = choose.choice([i for i in before if i not in smollm.vocabulary.ends] or before)
        state.accept(token_id)
    assert state.find_forced() == () or not state.is_finished
    assert found or "guided_regex" in body or "grammar" in body


def test_the_only_possible_reply_is_forced_whole(smollm: Words) -> None:
    state = smollm.state(guided_choice=["Paris is a city"])
    forced = state.find_forced()
    assert forced == tuple(smollm.tokenizer.encode("Paris is a city", add_special=False))
    for token_id in forced:
        state.accept(token_id)
    assert state.is_finished
    assert state.find_forced() == ()


def test_a_copy_is_independent(smollm: Words) -> None:
    state = smollm.state(guided_json=PERSON)
    for token_id in smollm.split(b'{"name":"', random.Random(0)):
        state.accept(token_id)
    before, copies = smollm.allowed(state), [state.copy() for _ in range(3)]
    replies = [smollm.walk(copy, random.Random(seed)) for seed, copy in enumerate(copies)]
    assert smollm.allowed(state) == before
    assert len(set(replies)) == 3
    for reply in replies:
        check(PERSON, b'{"name":"' + reply)
    check(PERSON, b'{"name":"' + smollm.walk(state, random.Random(9)))
    ended = smollm.state(guided_regex="a?")
    ended.accept(min(smollm.vocabulary.ends))
    assert ended.copy().is_finished


def test_states_of_one_grammar_do_not_disturb_each_other_across_threads(smollm: Words) -> None:
    grammar = grammar_from({"guided_json": SCHEMAS["anything"]})
    assert grammar is not None
    compiled = smollm.compiler.compile(grammar)

    def walk(seed: int) -> bytes:
        return smollm.walk(compiled.state(), random.Random(seed), 30)

    alone = [walk(seed) for seed in range(6)]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(walk, range(6))) == alone


def test_a_control_token_comes_only_where_a_grammar_names_it(smollm: Words) -> None:
    start = smollm.tokenizer.token_id("<|im_start|>")
    state = smollm.state(guided_grammar='start: "a" <|im_start|> "b"')
    a, b = (smollm.split(c, random.Random(0))[0] for c in (b"a", b"b"))
    for token_id in (a, start, b):
        state.find_forced()  # a call in between changes nothing
        assert smollm.allowed(state) == [token_id]
        assert token_id is not None
        state.accept(token_id)
    assert state.is_finished


def test_an_end_in_the_middle_and_ids_without_text_are_never_allowed(smollm: Words) -> None:
    with pytest.raises(BadGrammar, match="allows no reply at all"):
        smollm.state(guided_grammar='start: "a" <|im_end|> "b"')
    wide = vocabulary_of(smollm.tokenizer, smollm.vocabulary.size + 100)
    compiler = GrammarCompiler(smollm.tokenizer, smollm.vocabulary.size + 100)
    grammar = grammar_from({"guided_grammar": 'start: <[*]> "b"'})
    assert grammar is not None
    (mask,) = compiler.compile(grammar).state().masks()
    compiler.close()
    assert wide.num_words == len(mask) // 4
    assert max(bits(mask)) < smollm.vocabulary.size
    assert not smollm.vocabulary.ends & set(bits(mask))
    assert len(bits(mask)) > 49_000


def test_ends_beyond_the_tokenizers_own_end_a_reply_too(tiny: Words) -> None:
    extra = tiny.tokenizer.token_id("<|im_end|>")
    assert extra is not None
    vocabulary = vocabulary_of(tiny.tokenizer, ends=[extra, 10**6, -1])
    assert vocabulary.ends == tiny.tokenizer.eos_token_ids | {extra}


def test_a_vocabulary_in_which_nothing_ends_a_reply_is_refused(tiny: Words) -> None:
    with pytest.raises(BadGrammar, match="no token that ends a reply"):
        vocabulary_of(replace(tiny.tokenizer, eos_token_ids=frozenset()))


def test_a_mask_has_the_bit_of_each_allowed_token() -> None:
    row = np.array([0, 1 << 31], np.uint32)
    assert [i for i in range(-1, 70) if allows(row, i)] == [63]
