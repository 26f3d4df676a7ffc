"""The ids of the built-in vocabularies are a contract: all 54 agent tokens in all four, and the holes."""

from __future__ import annotations

import pytest
import splintr

from plait.errors import ConfigError
from plait.text.tokenizers.builtin import builtin_tokenizer
from plait.text.tokenizers.vocabularies import AGENT_NAMES, BUILTIN, detect_vocabulary

FIRST = {"cl100k_base": 100277, "o200k_base": 200019, "llama3": 128300, "deepseek_v3": 128900}
HOLES = {
    "cl100k_base": {100256, *range(100261, 100276)},
    "o200k_base": {199998, *range(200000, 200018)},
    "llama3": {*range(128011, 128256), *range(128262, 128300), *range(128342, 128348)},
    "deepseek_v3": {*range(128000, 128798), *range(128815, 128900)},
}
CONSTANTS = {
    "cl100k_base": splintr.CL100K_AGENT_TOKENS,
    "o200k_base": splintr.O200K_AGENT_TOKENS,
    "llama3": splintr.LLAMA3_AGENT_TOKENS,
    "deepseek_v3": splintr.DEEPSEEK_V3_AGENT_TOKENS,
}


@pytest.mark.parametrize("name", BUILTIN)
def test_all_54_agent_tokens_have_their_ids(name: str) -> None:
    tokenizer = builtin_tokenizer(name)
    assert len(set(AGENT_NAMES)) == 54
    for offset, word in enumerate(AGENT_NAMES):
        expected = FIRST[name] + offset
        if name == "llama3" and 42 <= offset <= 47:
            expected = 128256 + offset - 42
        text = f"<|{word}|>"
        constant = word.upper() if not word.startswith("/") else f"{word[1:].upper()}_END"
        assert tokenizer.token_id(text) == expected == getattr(CONSTANTS[name], constant), text
        assert tokenizer.encode(text, add_special=False, allow_special=True) == [expected]
        assert tokenizer.token_text(expected) == text


@pytest.mark.parametrize("name", BUILTIN)
def test_the_control_tokens_are_those_compiled_into_splintr(name: str) -> None:
    compiled = splintr.Tokenizer.from_pretrained(name)
    assert BUILTIN[name].special_ids() == compiled.special_tokens()
    assert BUILTIN[name].size == compiled.vocab_size


@pytest.mark.parametrize("name", BUILTIN)
def test_holes_are_exactly_the_ids_without_a_token(name: str) -> None:
    tokenizer = builtin_tokenizer(name)
    size = tokenizer.vocab_size
    assert set(tokenizer.holes(size)) == HOLES[name]
    assert set(tokenizer.holes(size + 7)) == HOLES[name] | set(range(size, size + 7))
    for hole in (min(HOLES[name]), size, size + 10**6, -1):
        assert tokenizer.is_hole(hole)
        assert tokenizer.token_bytes(hole) == b""
        assert tokenizer.decode([hole, hole]) == ""


@pytest.mark.parametrize(
    ("size", "name"),
    [
        (100256, "cl100k_base"),
        (100277, "cl100k_base"),
        (100315, "cl100k_base"),
        (100331, "cl100k_base"),
        (128256, "llama3"),
        (128354, "llama3"),
        (128954, "deepseek_v3"),
        (129280, "deepseek_v3"),
        (200073, "o200k_base"),
        (50257, None),
        (32000, None),
        (100352, None),
        (131072, None),
        (151936, None),
        (256000, None),
        (0, None),
    ],
)
def test_only_sizes_in_the_exact_windows_name_a_vocabulary(size: int, name: str | None) -> None:
    assert detect_vocabulary(size) == name


def test_oxidizr_models_get_no_bos_and_stop_where_the_next_turn_begins() -> None:
    assert builtin_tokenizer("llama3").encode("hi") == [128000, 6151]
    assert builtin_tokenizer("llama3", oxidizr=True).encode("hi") == [6151]
    ends = builtin_tokenizer("cl100k_base", oxidizr=True).eos_token_ids
    assert {100257, 100277, 100278} <= ends
    assert not {100277, 100278} & builtin_tokenizer("cl100k_base").eos_token_ids


def test_every_end_of_generation_token_of_llama3_is_known() -> None:
    assert {128001, 128008, 128009} <= builtin_tokenizer("llama3").eos_token_ids


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="cl100k_base, o200k_base, llama3, deepseek_v3"):
        builtin_tokenizer("gpt2")
