"""Finding control tokens in text."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from plait.text.tokenizers.tokenizer import Literals, Special, SpecialTokens, end_of_generation

WORDS = st.lists(st.text(alphabet="<|a>", min_size=1, max_size=5), min_size=1, max_size=6)


@given(st.text(alphabet="<|a>", max_size=40), WORDS)
def test_literals_are_found_as_an_alternation_from_long_to_short_finds_them(
    text: str, words: list[str]
) -> None:
    pattern = re.compile("|".join(re.escape(w) for w in sorted(words, key=len, reverse=True)))
    assert list(Literals(words).find(text)) == [m.span() for m in pattern.finditer(text)]


@given(st.text(alphabet="<|a>", max_size=40), WORDS)
def test_no_piece_of_a_cut_text_holds_a_control_token(text: str, words: list[str]) -> None:
    specials = SpecialTokens(Special(i, w) for i, w in enumerate(words) if len(w) > 1)
    pieces = specials.cut(text)
    assert "".join(pieces) == text
    assert not any(specials.occur(piece) for piece in pieces if len(specials.cut(text)) == 1)


def test_white_space_goes_with_the_token_that_takes_it() -> None:
    specials = SpecialTokens(
        [Special(1, "<a>", rstrip=True), Special(2, "<b>", lstrip=True), Special(3, "<c>")]
    )
    assert specials.split("x <a> \n y <b> <c> z") == ["x ", 1, "y", 2, " ", 3, " z"]


def test_a_single_word_token_is_not_found_inside_a_word() -> None:
    specials = SpecialTokens([Special(1, "pad", single_word=True)])
    assert specials.split("padded pad.pad_ pad") == ["padded ", 1, ".pad_ ", 1]


def test_html_that_looks_like_an_end_is_one_only_where_it_is_a_control_token() -> None:
    ordinary, control = [Special(7, "</s>"), Special(8, "<|im_end|>")], [Special(9, "<eos>")]
    assert end_of_generation(control, ordinary) == {8, 9}
    assert end_of_generation([Special(7, "</s>")]) == {7}


def test_harmony_ends_a_message_without_ending_the_reply() -> None:
    texts = ["<|return|>", "<|call|>", "<|end|>"]
    assert end_of_generation(Special(i, t) for i, t in enumerate(texts)) == {0, 1}
    assert end_of_generation([Special(2, "<|end|>")]) == {2}


def test_every_common_end_of_generation_token_is_known() -> None:
    texts = """
    <|im_end|> <|eot_id|> <|end_of_turn|> <end_of_turn> <|endoftext|> <|eom_id|> </s> <|end|> <EOT> <eos>
    <|end_of_text|> <｜end▁of▁sentence｜> [EOS] [EOT] <end_of_utterance> <|eot|>
    """
    specials = [Special(i, text) for i, text in enumerate(texts.split())]
    assert end_of_generation(specials) == set(range(16))
