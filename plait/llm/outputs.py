"""Finished requests as the Python API returns them, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from msgspec import Struct

from plait.frontend.deltas import ChoiceScore, Delta, TextLogprob, best_of
from plait.frontend.output_stream import OutputStream
from plait.request import RequestTrace, SamplingParams


class Logprob(Struct, frozen=True):
    """Natural-log probability of one token, raw from the model. `rank`: 1 is the most likely.

    `rank` None: the token is not among the requested alternatives.
    """

    logprob: float
    rank: int | None
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # by token id; the token itself is always there


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a finished request. `logprobs`: one entry per token of `token_ids`, if requested.

    `trace`: where its time went; None if the engine never took it. A comparison of choices ignores it.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    trace: RequestTrace | None = field(default=None, compare=False)


class RequestOutput(Struct):
    """A finished request. `prompt` is None when token ids or messages were given.

    `prompt_logprobs`: one entry per prompt token, None for the first, because nothing precedes it.
    `num_cached_tokens`: how many of the prompt's tokens came from the prefix cache. `metrics`: the trace of
    the choice that was generated first, which computed the prompt.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = True
    num_cached_tokens: int = 0
    metrics: RequestTrace | None = None


def collect(stream: OutputStream, prompt: str | None, params: SamplingParams) -> RequestOutput:
    """Read a stream to its end; `params` are the caller's, before the engine's additions.

    Raises the error that ended it, if one did.
    """
    request, count = stream.request, stream.request.params.n
    outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(count)]
    scores = [ChoiceScore() for _ in range(count)]
    result = RequestOutput(request.id, prompt, list(request.prompt_token_ids), outputs)
    stream.be_patient()
    for delta in stream:
        if delta.error:
            raise delta.error
        scores[delta.index].add(delta.logprobs)
        _add(outputs[delta.index], delta, params)
        if delta.prompt_logprobs is not None:
            asked = params.prompt_logprobs or 0
            result.prompt_logprobs = [None, *(_by_token(lp, asked) for lp in delta.prompt_logprobs)]
        if delta.index == 0:
            result.num_cached_tokens = max(result.num_cached_tokens, delta.num_cached_tokens)
    for out in outputs:
        out.trace = stream.trace(out.index)
    result.metrics = outputs[0].trace
    if params.is_ranked:
        result.outputs = [replace(outputs[i], index=at) for at, i in enumerate(best_of(scores, params.n))]
    return result


def _add(out: CompletionOutput, delta: Delta, params: SamplingParams) -> None:
    out.text += delta.text
    out.token_ids += delta.token_ids
    if out.logprobs is not None:
        out.logprobs += [_by_token(lp, params.logprobs or 0) for lp in delta.logprobs or ()]
    if delta.finish_reason:
        out.finish_reason, out.stop_reason = delta.finish_reason, delta.stop_reason


def _by_token(chosen: TextLogprob, asked: int) -> TokenLogprobs:
    ranked = {
        lp.token_id: Logprob(lp.logprob, rank if rank <= asked else None, lp.token)
        for rank, lp in enumerate(chosen.top, 1)
    }
    if chosen.token_id in ranked:
        return ranked
    return {chosen.token_id: Logprob(chosen.logprob, None, chosen.token), **ranked}
