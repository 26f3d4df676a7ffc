"""Log-probabilities as replies show them: of chosen tokens, and as vLLM has them by id and of a prompt."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec.structs import replace

if TYPE_CHECKING:
    from plait.frontend.deltas import TextLogprob


LOGPROB_FLOOR = -9999.0  # JSON has no -inf
Logprob = Annotated[float, msgspec.Meta(le=0)]
Count = Annotated[int, msgspec.Meta(ge=0)]


class AlternativeToken(msgspec.Struct, frozen=True):
    """A token with its log-probability; `bytes` are its own, also when they are half a character."""

    token: str
    logprob: Logprob
    bytes: list[Annotated[int, msgspec.Meta(ge=0, le=255)]]


class ChosenToken(AlternativeToken, frozen=True):
    """A token of the reply, and the most likely ones in its place, best first."""

    top_logprobs: list[AlternativeToken]


def list_chosen_tokens(logprobs: Iterable[TextLogprob], num_top: int) -> list[ChosenToken]:
    """Tokens of a reply, with `num_top` alternatives each."""
    return [
        ChosenToken(*_show_token(lp), [AlternativeToken(*_show_token(one)) for one in best(lp)[:num_top]])
        for lp in logprobs
    ]


def _show_token(lp: TextLogprob) -> tuple[str, float, list[int]]:
    return lp.token, finite(lp.logprob), list(lp.bytes)


def finite(logprob: float) -> float:
    """A log-probability that JSON can carry. NaN and -inf become -9999."""
    return min(logprob, 0.0) if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


def best(lp: TextLogprob) -> list[TextLogprob]:
    """The alternatives of a token, most likely first."""
    return sorted(lp.top, key=lambda one: -finite(one.logprob))


class PromptScore(msgspec.Struct, frozen=True):
    """A token at a place of the prompt. `rank` is null where only the likeliest tokens were ranked."""

    logprob: Logprob
    rank: Annotated[int, msgspec.Meta(ge=1)] | None
    decoded_token: str


PromptScores = list[dict[str, PromptScore] | None]  # by token id, for each token; of the first there is none


def name_by_id(scores: Iterable[TextLogprob], *, keeps_bytes: bool) -> list[TextLogprob]:
    """The same scores with "token_id:5" for each token's text."""
    return [
        replace(
            one,
            token=f"token_id:{one.token_id}",
            bytes=one.bytes if keeps_bytes else b"",
            top=tuple(name_by_id(one.top, keeps_bytes=keeps_bytes)),
        )
        for one in scores
    ]


def list_prompt_scores(scores: Sequence[TextLogprob], num_top: int) -> PromptScores:
    """The scores of a prompt, from its second token on, with `num_top` alternatives each."""
    found: PromptScores = [None]
    for score in scores:
        ranked = {one.token_id: (one, i) for i, one in enumerate(best(score)[:num_top], 1)}
        ranks: dict[int, tuple[TextLogprob, int | None]] = {score.token_id: (score, None), **ranked}
        found.append(
            {str(i): PromptScore(finite(one.logprob), rank, one.token) for i, (one, rank) in ranks.items()}
        )
    return found
