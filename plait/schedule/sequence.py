"""One token stream that the engine advances: a choice of a request. n choices are n sequences."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from plait.request import FinishReason, SamplingParams, TokenLogprobs
from plait.schedule.plan import SamplingRow


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """Changed by the `Scheduler` alone.

    `token_ids`: prompt and output; `num_computed_tokens` of them are in the state that `tables` (one block
    table per group) and `slot` point to. `max_len`: where it must end, in tokens. `scored`: log-probabilities
    of prompt tokens so far, the first of them for the second token.
    """

    id: int
    request_id: str
    index: int
    token_ids: list[int]
    params: SamplingParams
    stop_token_ids: frozenset[int]
    max_len: int
    seed: int = 0
    wants_prompt_logprobs: bool = False
    prompt_len: int = 0
    arrival: int = 0
    phase: Phase = Phase.WAITING
    num_computed_tokens: int = 0
    tables: tuple[list[int], ...] = ()
    slot: int = 0
    num_preemptions: int = 0
    scored: list[TokenLogprobs] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.prompt_len = self.prompt_len or len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_left(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_prefilling(self) -> bool:
        return self.num_left > 1 or self.num_computed_tokens == 0

    def samples_after(self, end: int) -> bool:
        """Whether a token is sampled once the tokens before `end` are computed."""
        return end == self.num_tokens and self.max_len > self.prompt_len

    def num_logits(self, start: int, end: int) -> int:
        """Rows of logits that a chunk start..end must give: to sample from, and to score the prompt."""
        last = int(end == self.num_tokens)
        if not self.wants_prompt_logprobs or len(self.scored) >= self.prompt_len - 1:
            return last
        return max(end - max(start, len(self.scored)), last)

    def sampling_row(self, start: int, end: int) -> SamplingRow:
        """What the sampler must know about the chunk start..end."""
        params, num_logits = self.params, self.num_logits(start, end)
        first = end - num_logits
        targets: tuple[int, ...] = ()
        if self.wants_prompt_logprobs and len(self.scored) < self.prompt_len - 1:
            targets = tuple(self.token_ids[first + 1 : min(end + 1, self.prompt_len)])
        penalised = (params.repetition_penalty or 1, params.presence_penalty, params.frequency_penalty) != (
            1,
            0,
            0,
        )
        too_short = self.num_output_tokens < params.min_tokens
        return SamplingRow(
            params=params,
            num_logits=num_logits,
            num_samples=int(self.samples_after(end)),
            position=self.num_tokens,
            seed=self.seed,
            prompt_targets=targets,
            history=tuple(self.token_ids) if penalised else (),
            prompt_len=self.prompt_len,
            stop_token_ids=self.stop_token_ids if too_short else frozenset(),
            num_stopless=int(too_short),
        )

    def stops_at(self, token_id: int) -> bool:
        """Whether this token, sampled now, ends the sequence and is no part of it."""
        return token_id in self.stop_token_ids and self.num_output_tokens >= self.params.min_tokens


def num_computed(prompt_len: int, max_len: int) -> int:
    """The most tokens of a sequence that are ever computed: the last one sampled is not."""
    return max(prompt_len, max_len - 1)


@dataclass(frozen=True, slots=True)
class Update:
    """What one step added to a sequence, and why it ended if it did."""

    seq_id: int
    request_id: str
    index: int
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
