"""Turns the sampled tokens of a step into updates of its sequences: plain functions, no state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.errors import EngineError
from plait.request import FinishReason
from plait.schedule.plan import Sampled, StepPlan
from plait.schedule.sequence import TokenSequence, Update


def answers_by_id(
    plan: StepPlan, sampled: Sequence[Sampled], sequences: Mapping[int, TokenSequence]
) -> dict[int, Sampled]:
    """What was sampled, by sequence id; every sequence that has caught up must have its tokens.

    Raises EngineError if there are more or fewer.
    """
    chunks, answers = [c for c in plan.chunks if c.has_answer], {}
    if len(chunks) != len(sampled):
        raise EngineError(f"step {plan.step}: {len(sampled)} answers for {len(chunks)} chunks that have one")
    for chunk, answer in zip(chunks, sampled, strict=True):
        answers[chunk.seq_id] = answer
        seq = sequences.get(chunk.seq_id)
        if seq is None or not seq.in_step:
            continue
        wanted = (plan.num_steps + len(seq.draft)) * seq.samples_after(chunk.end - len(seq.draft))
        if len(answer.token_ids) != wanted:
            raise EngineError(
                f"step {plan.step}: {len(answer.token_ids)} tokens were sampled for "
                f"{seq.request_id}[{seq.index}], not {wanted}"
            )
    return answers


def num_right(draft: Sequence[int], token_ids: Sequence[int]) -> int:
    """How many tokens of a draft are what was sampled in their places."""
    return next((i for i, t in enumerate(draft) if token_ids[i] != t), len(draft))


def keep_tokens(
    seq: TokenSequence, token_ids: tuple[int, ...]
) -> tuple[tuple[int, ...], FinishReason | None]:
    """How many of these new tokens belong to the sequence, and whether it ends with them."""
    if seq.max_len <= seq.prompt_len:
        return (), "length"
    guide, num_tokens = seq.guide, len(seq.token_ids)
    for i, token_id in enumerate(token_ids):
        # An end that comes before min_tokens was the only thing that its guide allowed.
        if token_id in seq.stop_token_ids and (
            guide is not None or num_tokens - seq.prompt_len + i >= seq.params.min_tokens
        ):
            return token_ids[:i], "stop"
        if guide is not None and guide.accept(token_id):
            return token_ids[: i + 1], "stop"
        if num_tokens + i + 1 >= seq.max_len:
            return token_ids[: i + 1], "length"
    return token_ids, None


def stop_token(seq: TokenSequence, sampled: Sequence[int], kept: Sequence[int]) -> int | None:
    """The token that ended a sequence; None where its guide did, which waits for no token."""
    is_guides = len(kept) == len(sampled) or (seq.guide is not None and seq.guide.is_finished)
    return None if is_guides else sampled[len(kept)]


def as_update(
    seq: TokenSequence,
    answer: Sampled | None,
    tokens: tuple[int, ...],
    reason: FinishReason | None,
    checked: tuple[int, int],
    *,
    is_scoring: bool,
) -> Update:
    """What a step added. `checked`: how many tokens of a draft, and how many of these were right."""
    new, logprobs = (answer.token_ids, answer.logprobs) if answer else ((), None)
    return Update(
        seq_id=seq.id,
        request_id=seq.request_id,
        index=seq.index,
        token_ids=tokens,
        logprobs=logprobs[: len(tokens)] if logprobs and tokens else None,
        prompt_logprobs=tuple(seq.scored) if is_scoring else None,
        finish_reason=reason,
        stop_token_id=stop_token(seq, new, tokens) if reason == "stop" else None,
        num_cached_tokens=seq.num_cached_tokens,
        num_drafted=checked[0],
        num_accepted=checked[1],
        embedding=seq.pool.vector() if seq.pool else None,
    )
