"""Sampling fields that are texts, in tokens: bad words, biases, DRY's breakers; and prompts cut to size.

Text stays out of the engine, so this is done once for a request, before it is admitted.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from plait.errors import InvalidField
from plait.request import SamplingParams
from plait.text.tokenizers.tokenizer import Tokenizer

MOST_KEPT = 32  # lists of breakers of which the tokens are kept
MOST_BREAKERS = 1 << 15  # tokens that contain a breaker
SEPARATOR = b"\xff"  # between tokens: it is in no text
MOST_IDS = 4096  # sequences of tokens, and biased tokens, that the texts of one field may become
Words = tuple[tuple[int, ...], ...]


class WordRules:
    """Turns the texts in sampling parameters into tokens. Safe from any thread.

    `tokenizer` None: the model has no vocabulary, and texts are refused.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._breakers: OrderedDict[tuple[str, ...], Words] = OrderedDict()

    def apply(self, params: SamplingParams) -> SamplingParams:
        """The same parameters as the engine takes them. Raises InvalidField, naming the field."""
        found = params
        if params.bad_words:
            words = (*params.bad_word_ids, *self._word_ids(params.bad_words))
            found = replace(found, bad_words=(), bad_word_ids=words)
        if params.logit_bias_strings:
            bias = self._bias(params.logit_bias_strings)
            found = replace(found, logit_bias={**bias, **params.logit_bias}, logit_bias_strings={})
        if params.dry_multiplier:
            found = replace(found, dry_breaker_ids=self._breaker_ids(params.dry_sequence_breakers))
        if params.allowed_token_ids and (tokenizer := self._tokenizer) is not None:
            known = [t for t in params.allowed_token_ids if 0 <= t < tokenizer.vocab_size]
            if known and not any(tokenizer.token_bytes(t) for t in known):
                text = "allowed_token_ids: no token in it has a text; add one that may be written"
                raise InvalidField(text, "allowed_token_ids")
        return found

    def _need_tokenizer(self, name: str) -> Tokenizer:
        if self._tokenizer is None:
            text = f"{name}: the model has no tokenizer, so no text is known; name a vocabulary with --vocab"
            raise InvalidField(text, name)
        return self._tokenizer

    def _word_ids(self, words: Sequence[str]) -> Words:
        """Each word as vLLM bans it: alone and behind a space; and as it continues a text."""
        tokenizer = self._need_tokenizer("bad_words")
        found: dict[tuple[int, ...], None] = {}
        for word in words:
            plain = word.lstrip() or word
            forms = [tokenizer.encode(text, add_special=False) for text in (plain, f" {plain}")]
            forms.append(encode_inside(tokenizer, plain))
            found.update((tuple(ids), None) for ids in forms if ids)
        return _check_bound("bad_words", found, MOST_IDS)

    def _bias(self, texts: Mapping[str, float]) -> dict[int, float]:
        """Each token of a text gets its bias; of a token in two texts the later one counts, as llama.cpp has
        it."""
        tokenizer, found = self._need_tokenizer("logit_bias_strings"), dict[int, float]()
        for text, bias in texts.items():
            found.update(dict.fromkeys(encode_inside(tokenizer, text), bias))
        if len(found) > MOST_IDS:
            at = "logit_bias_strings"
            raise InvalidField(f"{at}: its texts have {len(found)} tokens, more than {MOST_IDS}", at)
        return found

    def _breaker_ids(self, texts: tuple[str, ...]) -> Words:
        """Every token that contains a breaker, and breakers of several tokens as sequences."""
        if self._tokenizer is None:
            if texts == SamplingParams.dry_sequence_breakers:
                return ()
            self._need_tokenizer("dry_sequence_breakers")
        with self._lock:
            if texts in self._breakers:
                self._breakers.move_to_end(texts)
                return self._breakers[texts]
        found = _find_breakers(self._need_tokenizer("dry_sequence_breakers"), texts) if texts else ()
        with self._lock:
            self._breakers[texts] = found
            while len(self._breakers) > MOST_KEPT:
                self._breakers.popitem(last=False)
        return found


def encode_inside(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text that continues another, so that no space is put before it."""
    before = tokenizer.encode("\n", add_special=False)
    ids = tokenizer.encode(f"\n{text}", add_special=False)
    is_apart = ids[: len(before)] == before
    return ids[len(before) :] if is_apart else tokenizer.encode(text, add_special=False)


def _find_breakers(tokenizer: Tokenizer, texts: Sequence[str]) -> Words:
    tokens = [tokenizer.token_bytes(i) for i in range(tokenizer.vocab_size)]
    joined = SEPARATOR.join(tokens)
    starts = list(accumulate((len(token) + 1 for token in tokens), initial=0))
    found: dict[tuple[int, ...], None] = {}
    for text in texts:
        at = joined.find(text.encode())
        while at >= 0:
            token_id = bisect_right(starts, at) - 1
            found[(token_id,)] = None
            at = joined.find(text.encode(), starts[token_id + 1])
        if len(ids := tuple(encode_inside(tokenizer, text))) > 1:
            found[ids] = None
    return _check_bound("dry_sequence_breakers", found, MOST_BREAKERS)


def _check_bound(name: str, found: Iterable[tuple[int, ...]], most: int) -> Words:
    words = tuple(found)
    if len(words) > most:
        text = f"{name}: its texts make {len(words)} sequences of tokens, more than {most}; send longer texts"
        raise InvalidField(text, name)
    return words


def truncate_prompt(ids: tuple[int, ...], params: SamplingParams, max_model_len: int) -> tuple[int, ...]:
    """The last `truncate_prompt_tokens` of a prompt; -1: as many as leave the context its `max_tokens`."""
    most = params.truncate_prompt_tokens
    if most is None:
        return ids
    if most < 0:
        most = max(max_model_len - max(params.max_tokens or 1, params.min_tokens, 1), 1)
    return ids[-most:]
