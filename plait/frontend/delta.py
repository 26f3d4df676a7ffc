"""The deltas of a stream: new text of one choice, with all that came with it."""

from __future__ import annotations

from dataclasses import dataclass

from plait.request import FinishReason
from plait.text.output import OutputDelta


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """A token as a client sees it: its text, its true bytes, its log-probability and the alternatives."""

    token: str
    token_id: int
    bytes: bytes
    logprob: float
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """New text of one choice; the last one of a choice carries `finish_reason`.

    `logprobs` are of exactly the tokens with text that starts in this delta. `stop_reason`: the stop string
    or the token id that ended it. `num_tokens`: output tokens so far, end-of-generation not counted.
    `embedding`: the hidden state, in the one delta of a request for embeddings. `parts`: content, thinking
    and calls in their order, of a stream with a reader; `text` is the content. `num_reasoning_tokens`: how
    many of the output tokens so far were thinking. `prompt_progress`: the event's, of a delta without text.
    """

    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] | None = None
    prompt_logprobs: tuple[TextLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    num_tokens: int = 0
    error: Exception | None = None
    embedding: tuple[float, ...] | None = None
    parts: tuple[OutputDelta, ...] = ()
    num_reasoning_tokens: int = 0
    prompt_progress: tuple[int, float] | None = None
