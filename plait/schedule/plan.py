"""What the scheduler decides for one step: plain integers, the same for every rank."""

from __future__ import annotations

from dataclasses import dataclass

from plait.request import SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Chunk:
    """One sequence's share of a step: `token_ids` are computed at positions start, start+1, …

    `blocks`: one block table per block group, in the groups' order; `slot`: its place for fixed-size state.
    `num_logits`: the last that many tokens' logits are wanted (0: a piece in the middle of a prompt).
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[tuple[int, ...], ...]
    slot: int
    num_logits: int

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Plan:
    """Decodes first, then prefill chunks. `copies`: slot -> slot before the pass; `fresh`: slots to zero."""

    step: int
    chunks: tuple[Chunk, ...]
    copies: tuple[tuple[int, int], ...] = ()
    fresh: tuple[int, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler must know about one chunk with logits; its `num_logits` rows are consecutive.

    The first `len(prompt_targets)` rows are asked for the log-probabilities of those prompt tokens. If
    `samples`, the last row gives the token at `position` of the sequence; its random number is a function of
    `seed` and `position` alone. `history` is the prompt (`prompt_len` tokens) and the output so far, empty
    where no penalty needs it. `stop_token_ids` may not be sampled yet (min_tokens).
    """

    params: SamplingParams
    num_logits: int
    samples: bool
    position: int
    seed: int
    prompt_targets: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    prompt_len: int = 0
    stop_token_ids: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class SamplingBatch:
    """One row for each chunk of a plan that has logits, in the plan's order."""

    rows: tuple[SamplingRow, ...]


@dataclass(frozen=True, slots=True)
class Sampled:
    """The sampler's answer to one `SamplingRow`. `token_id` None: nothing was to be sampled."""

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
