"""Prompts for filling in: each form of control tokens, and models without them."""

from __future__ import annotations

import pytest

from plait.errors import InvalidField
from plait.text.fill_in import FORMS, SUFFIX_FIRST, fill_in_prompt
from plait.text.tokenizers.tokenizer import Special, SpecialTokens, TextTokenizer


class Bytes:
    """One token per byte."""

    vocab_size = 256

    def encode(self, text: str, first: bool) -> list[int]:
        return [*text.encode()]

    def token_bytes(self, token_id: int) -> bytes | None:
        return bytes([token_id]) if token_id < 256 else None

    def has_token(self, token_id: int) -> bool:
        return 0 <= token_id < 256


def vocabulary(*texts: str, bos: bool = False) -> TextTokenizer:
    specials = SpecialTokens([Special(300 + i, text) for i, text in enumerate(texts)])
    before = (300,) if bos else ()
    return TextTokenizer("bytes", Bytes(), specials, bos_token_id=300 if bos else None, before=before)


@pytest.mark.parametrize("form", FORMS)
def test_prefix_and_suffix_come_before_the_gap(form: tuple[str, ...]) -> None:
    assert fill_in_prompt(vocabulary(*form), "ab", "c") == [300, 97, 98, 301, 99, 302]
    assert fill_in_prompt(vocabulary("<s>", *form, bos=True), "ab", "c") == [300, 301, 97, 98, 302, 99, 303]
    assert fill_in_prompt(vocabulary(*form), "", f"{form[0]}") == [300, 301, *form[0].encode(), 302]


def test_a_model_that_reads_the_suffix_first_goes_on_from_the_prefix() -> None:
    assert fill_in_prompt(vocabulary(*SUFFIX_FIRST), "ab", "c") == [300, 99, 301, 97, 98]


def test_a_vocabulary_without_all_of_the_tokens_is_refused() -> None:
    with pytest.raises(InvalidField, match="no tokens for filling in") as caught:
        fill_in_prompt(vocabulary(*FORMS[0][:2]), "ab", "c")
    assert caught.value.param == "suffix"
