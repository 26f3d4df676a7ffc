from __future__ import annotations

from typing import Any

import pytest

from plait.engine.limits import MAX_CHARS_PER_TOKEN, RequestLimits
from plait.errors import CapacityError, ContextTooLong, InvalidField
from plait.request import Request, SamplingParams

LIMITS = RequestLimits(vocab_size=97, max_model_len=20, longest=15, may_grow=", or grow")


def request(prompt: Any, **params: Any) -> Request:
    return Request("r", tuple(prompt), SamplingParams(**{"max_tokens": 1, **params}))


@pytest.mark.parametrize(
    ("prompt", "params", "kind", "message"),
    [
        ([], {}, InvalidField, "prompt: it is empty"),
        ([1, 97], {}, InvalidField, r"prompt: token id 97 is not one of this model's 0\.\.96"),
        ([-1], {}, InvalidField, "prompt: token id -1"),
        ([True], {}, InvalidField, "prompt: token id True"),
        ([None], {}, InvalidField, "prompt: token id None"),
        ([1], {"logit_bias": {97: 1.0}}, InvalidField, "logit_bias: token id 97"),
        ([1], {"stop_token_ids": (97,)}, InvalidField, "stop_token_ids: token id 97"),
        (range(20), {}, ContextTooLong, r"is 20 tokens\. However, you requested 21 tokens \(20 in the"),
        (range(18), {"max_tokens": 9, "min_tokens": 3}, ContextTooLong, r"18 in the prompt, 3 in the comp"),
        (range(21), {"max_tokens": 0}, ContextTooLong, "shorten the prompt to 20 tokens, or grow"),
        (range(16), {}, CapacityError, "16 tokens does not fit, and the longest that does has 15"),
        ([1], {"max_tokens": 16}, CapacityError, "16 tokens does not fit"),
    ],
)
def test_admit_refuses_what_the_model_cannot_serve(
    prompt: Any, params: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        LIMITS.admit(request(prompt, **params))


@pytest.mark.parametrize(("asked", "most"), [(None, 17), (3, 3), (99, 17), (0, 0)])
def test_admit_makes_max_tokens_what_the_context_has_left(asked: int | None, most: int) -> None:
    roomy = RequestLimits(97, 20)
    admitted = roomy.admit(request([1, 2, 3], max_tokens=asked))
    assert admitted.params.max_tokens == most
    assert roomy.admit(admitted) is admitted


def test_admit_blames_the_vocabulary_that_wrote_the_prompt() -> None:
    with pytest.raises(InvalidField, match="the vocabulary cl100k_base writes it with token 97"):
        LIMITS.admit(request([97]), "cl100k_base")


def test_check_chars_refuses_text_that_no_tokenizer_makes_fit() -> None:
    LIMITS.check_chars(20 * MAX_CHARS_PER_TOKEN, "prompt")
    with pytest.raises(ContextTooLong, match=r"21 tokens or more \(1281 characters in the messages\)"):
        LIMITS.check_chars(20 * MAX_CHARS_PER_TOKEN + 1, "messages")


def test_check_count_asks_for_parts() -> None:
    LIMITS.check_count(20, "tokens")
    with pytest.raises(ContextTooLong, match=r"you requested 21 tokens\. Please send them in parts"):
        LIMITS.check_count(21, "tokens")
