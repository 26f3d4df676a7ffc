"""generation_config.json: tokens that no reply has, and settings that are reported as not read."""

from __future__ import annotations

from typing import Any

import pytest

from plait.errors import BadFile
from plait.request import SamplingParams
from plait.text.generation_rules import list_suppressed, list_unread


def test_suppressed_tokens_and_bad_words_of_one_token_are_never_written() -> None:
    config = {"suppress_tokens": [9, 3], "bad_words_ids": [[5], [7, 8], [2]], "eos_token_id": [2, 4]}
    assert list_suppressed(config, 10) == (3, 5, 9)  # 2 ends a reply
    assert list_suppressed({"suppress_tokens": None}, 10) == ()


def test_bad_words_of_several_tokens_join_those_of_a_request() -> None:
    config = {"bad_words_ids": [[5], [7, 8]]}
    assert SamplingParams().resolve(config).bad_word_ids == ((7, 8),)
    assert SamplingParams(bad_word_ids=((1,),)).resolve(config).bad_word_ids == ((1,), (7, 8))


@pytest.mark.parametrize(
    "config",
    [
        {"suppress_tokens": [10]},
        {"suppress_tokens": [-1]},
        {"suppress_tokens": [True]},
        {"suppress_tokens": "all"},
        {"bad_words_ids": [3]},
        {"bad_words_ids": [["x"]]},
        {"bad_words_ids": 5},
    ],
)
def test_what_is_no_list_of_ids_is_a_bad_file(config: dict[str, Any]) -> None:
    with pytest.raises(
        BadFile, match=r"generation_config\.json: (suppress_tokens|bad_words_ids) has .* from 0 to 9"
    ):
        list_suppressed(config, 10)


def test_settings_with_an_effect_that_is_missing_here_are_listed() -> None:
    config = {
        "no_repeat_ngram_size": 3,
        "num_beams": 1,
        "typical_p": 1.0,
        "forced_eos_token_id": 2,
        "top_k": 5,
    }
    assert list_unread(config) == ["no_repeat_ngram_size = 3", "forced_eos_token_id = 2"]
