"""Embeddings in Python: pooled hidden states of the model, as /v1/embeddings returns them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.errors import EngineError, InvalidField
from plait.frontend.model_head import check_left_out
from plait.frontend.pairs import pair_ids
from plait.request import Pooling, SamplingParams

if TYPE_CHECKING:  # a server answers before it has loaded torch and the rest
    from plait.frontend.frontend import Front
    from plait.frontend.output_stream import OutputStream

NOTHING = SamplingParams(max_tokens=0)  # tokens to generate: none


def embed_prompts(
    front: Front, prompts: Sequence[str | Sequence[int]], pooling: Pooling, at_once: int, before: str = ""
) -> Iterator[tuple[float, ...]]:
    """The pooled hidden state of each prompt, in order; the engine has at most `at_once` of them at a time.

    `before`: a model's own prompt, which comes before each text. Raises what `Front.prepare` raises, before
    anything is computed, and what the engine fails a request with.
    """
    first_of = front.head.count_left_out(before, pooling, front.encode)
    requests = []
    for prompt in prompts:
        whole = before + prompt if isinstance(prompt, str) else prompt
        made = front.prepare(whole, NOTHING)
        skipped = first_of if isinstance(prompt, str) else 0
        check_left_out(skipped, len(made.prompt_token_ids), "prompts")
        requests.append(replace(made, pooling=pooling, pooled_from=skipped))
    for first in range(0, len(requests), at_once):
        streams = [front.submit(request) for request in requests[first : first + at_once]]
        try:
            yield from [_vector(stream) for stream in streams]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise


def classify_prompts(
    front: Front, prompts: Sequence[str | Sequence[int]], activate: bool, at_once: int
) -> list[list[float]]:
    """A number for each label, for each prompt. Raises InvalidField for a model without a head for labels."""
    if not front.head.scores:
        raise InvalidField(
            "model: this model has no head for labels; LLM.embed gives vectors of any", "model"
        )
    return [
        front.head.classify(one, activate=activate) for one in embed_prompts(front, prompts, "last", at_once)
    ]


def score_pairs(
    front: Front, queries: Sequence[object], documents: Sequence[object], task: str | None, at_once: int
) -> list[float]:
    """The score of each document and its query, or the only one. Raises InvalidField."""
    if len(front.head.labels) != 1:
        count = len(front.head.labels)
        raise InvalidField(
            f"model: a pair's score needs a head with one output; this model has {count}", "model"
        )
    if len(queries) not in {1, len(documents)}:
        text = f"prompts: {len(queries)} queries for {len(documents)} documents; give one, or as many"
        raise InvalidField(text, "prompts")
    each = queries if len(queries) == len(documents) else list(queries) * len(documents)
    pairs = [pair_ids(front, str(a), str(b), task) for a, b in zip(each, documents, strict=True)]
    return [one for (one,) in classify_prompts(front, pairs, True, at_once)]


def _vector(stream: OutputStream) -> tuple[float, ...]:
    *_, last = stream
    if not last.embedding:
        raise last.error or EngineError(f"a text ended with {last.finish_reason!r} and no hidden state")
    return last.embedding
