"""Embeddings in Python: pooled hidden states of the model, as /v1/embeddings returns them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from plait.errors import EngineError
from plait.request import Pooling, SamplingParams

if TYPE_CHECKING:  # a server answers before it has loaded torch and the rest
    from plait.frontend.frontend import Front
    from plait.frontend.output_stream import OutputStream

NOTHING = SamplingParams(max_tokens=0)  # tokens to generate: none


def embed_prompts(
    front: Front, prompts: Sequence[str | Sequence[int]], pooling: Pooling, at_once: int
) -> Iterator[tuple[float, ...]]:
    """The pooled hidden state of each prompt, in order; the engine has at most `at_once` of them at a time.

    Raises what `Front.prepare` raises, before anything is computed, and what the engine fails a request with.
    """
    requests = [replace(front.prepare(prompt, NOTHING), pooling=pooling) for prompt in prompts]
    for first in range(0, len(requests), at_once):
        streams = [front.submit(request) for request in requests[first : first + at_once]]
        try:
            yield from [_vector(stream) for stream in streams]
        except BaseException:
            for stream in streams:
                stream.cancel()
            raise


def _vector(stream: OutputStream) -> tuple[float, ...]:
    *_, last = stream
    if not last.embedding:
        raise last.error or EngineError(f"a text ended with {last.finish_reason!r} and no hidden state")
    return last.embedding


def unit(vector: Sequence[float]) -> list[float]:
    """The vector with length 1; zeros stay zeros."""
    length = math.hypot(*vector)
    return [value / length for value in vector] if length else list(vector)
