"""Finished requests as the Python API returns them, in vLLM's shape."""

from __future__ import annotations

from dataclasses import dataclass, field

from plait.engine.stream import Stream, TextLogprob


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural-log probability of one token, raw from the model. `rank`: 1 is the most likely.

    `rank` None: the token is not among the alternatives that were asked for.
    """

    logprob: float
    rank: int | None
    decoded_token: str


TokenLogprobs = dict[int, Logprob]  # by token id; the token itself is always there


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a finished request. `logprobs`: one entry per token of `token_ids`, if asked for."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True)
class RequestOutput:
    """A finished request. `prompt` is None when token ids or messages were given.

    `prompt_logprobs`: one entry per prompt token, None for the first, which nothing stands before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    finished: bool = True


def collect(stream: Stream, prompt: str | None) -> RequestOutput:
    """Read a stream to its end. Raises the error that ended it, if one did."""
    params, request = stream.request.params, stream.request
    outputs = [CompletionOutput(i, logprobs=None if params.logprobs is None else []) for i in range(params.n)]
    result = RequestOutput(request.id, prompt, list(request.prompt_token_ids), outputs)
    for delta in stream:
        if delta.error:
            raise delta.error
        out = outputs[delta.index]
        out.text += delta.text
        out.token_ids += delta.token_ids
        if out.logprobs is not None:
            out.logprobs += [_by_token(lp, params.logprobs or 0) for lp in delta.logprobs or ()]
        if delta.prompt_logprobs is not None:
            asked = params.prompt_logprobs or 0
            result.prompt_logprobs = [None, *(_by_token(lp, asked) for lp in delta.prompt_logprobs)]
        if delta.finish_reason:
            out.finish_reason, out.stop_reason = delta.finish_reason, delta.stop_reason
    return result


def _by_token(chosen: TextLogprob, asked: int) -> TokenLogprobs:
    ranked = {
        lp.token_id: Logprob(lp.logprob, rank if rank <= asked else None, lp.token)
        for rank, lp in enumerate(chosen.top, 1)
    }
    return (
        ranked
        if chosen.token_id in ranked
        else {
            chosen.token_id: Logprob(chosen.logprob, None, chosen.token),
            **ranked,
        }
    )
