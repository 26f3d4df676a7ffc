"""What the scheduler decides for one step: plain integers, the same for every rank.

What is made for each sequence in each step is a msgspec Struct, because making one takes a tenth of the time
of a frozen dataclass. Moves are, too: other ranks get a plan as msgpack, and a tag says which move it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from msgspec import Struct

from plait.request import SamplingParams, TokenLogprobs
from plait.schedule.drafts.passes import Denoised, Denoising
from plait.schedule.drafts.turns import PlanTurns, TurnsEnd

MOST_STEPS = 8  # decode steps of one plan
FOLLOW = -1  # instead of a decode's token: what the step before samples for its sequence
Table = tuple[int, ...]


class Chunk(Struct, frozen=True, gc=False):
    """One sequence's share of a step: `token_ids` are computed at positions start, start+1, …

    `blocks`: one block table per block group, in the groups' order; `slot`: where its recurrent state is.
    `num_logits`: so many last tokens get logits (0: a chunk in the middle of a prompt); `num_pooled`: of so
    many the hidden states are summed. A token FOLLOW: the decode was planned before its token was known.
    `adapter`: its adapter's slot, 0: none. `row_slots`: for states behind the rows before the last.
    """

    seq_id: int
    start: int
    token_ids: tuple[int, ...]
    blocks: tuple[Table, ...]
    slot: int
    num_logits: int
    num_pooled: int = 0
    adapter: int = 0
    row_slots: tuple[int, ...] = ()
    prompt: int = 0  # of its tokens, where each step computes the whole sequence
    denoising: Denoising | None = None

    @property
    def end(self) -> int:
        return self.start + len(self.token_ids)

    @property
    def has_answer(self) -> bool:
        """Whether the runner answers this chunk: with tokens, log-probabilities or hidden states."""
        return self.num_logits > 0 or self.num_pooled > 0


class CopySlot(Struct, frozen=True, gc=False, tag=True):
    """Copy one slot's state over another's: a snapshot is taken, or a sequence starts from one."""

    source: int
    target: int


class CopyBlock(Struct, frozen=True, gc=False, tag=True):
    """Copy a block's entries over another's, in the group of this index: a partly filled block is shared."""

    group: int
    source: int
    target: int


class Save(Struct, frozen=True, gc=False, tag=True):
    """Save blocks and a slot (0: none) to host memory, as `handle`.

    `blocks`: one tuple per group, any number in each.
    """

    handle: int
    blocks: tuple[Table, ...]
    slot: int


class Load(Struct, frozen=True, gc=False, tag=True):
    """Load what was saved as `handle` into as many blocks and a slot (0: none). The saved copy stays."""

    handle: int
    blocks: tuple[Table, ...]
    slot: int


class Drop(Struct, frozen=True, gc=False, tag=True):
    """Free the saved copy."""

    handle: int


Move = CopySlot | CopyBlock | Save | Load | Drop


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes: chunks, decodes first, and the copies of memory that come before it.

    `moves`: in this order, before the pass; then `fresh` slots are zeroed. Without chunks there is no pass.
    `num_steps`: decode steps in a row, each of what the one before it sampled, up to one of `stops`.
    """

    step: int
    chunks: tuple[Chunk, ...]
    moves: tuple[Move, ...] = ()
    fresh: tuple[int, ...] = ()
    num_steps: int = 1
    turns: PlanTurns | None = None  # more steps of a sequence alone, with drafts that the runner makes
    stops: Table = ()

    @property
    def num_tokens(self) -> int:
        """The tokens of one step."""
        return sum(len(chunk.token_ids) for chunk in self.chunks)


class SamplingRow(Struct, frozen=True, gc=False):
    """What the sampler must know about one chunk with logits; its `num_logits` rows are consecutive.

    The first `len(prompt_targets)` rows give the log-probabilities of those prompt tokens. The last
    `num_samples` rows give the tokens at `position`, `position` + 1, … A token's random number is a function
    of `seed` and its position alone. Row i of the samples follows `history` + `draft[:i]`. `history` is the
    prompt (`prompt_len` tokens) and the output so far, empty where no penalty needs it. None of the first
    `num_stopless` samples may be one of `stop_token_ids` (min_tokens), unless its mask allows nothing else.
    `masks`: what each sample may be, a bit per token id in little-endian uint32 words; () or empty: anything.
    """

    params: SamplingParams
    num_logits: int
    num_samples: int
    position: int
    seed: int
    prompt_targets: tuple[int, ...] = ()
    draft: tuple[int, ...] = ()
    history: tuple[int, ...] = ()
    prompt_len: int = 0
    stop_token_ids: frozenset[int] = frozenset()
    num_stopless: int = 0
    masks: tuple[bytes, ...] = ()
    mirostat_mu: float | None = None  # mirostat's bound after the token before
    negative: int = -1  # of a guided choice: the row of the batch with its negative prompt
    num_candidates: int = 0  # beam search: so many alternatives, whatever is requested
    is_scored: bool = False  # whatever is requested, each sample's own log-probability is needed
    entropy_at: float = (
        0.0  # the temperature at which entropies are needed, and the likeliest tokens; 0: none
    )


class SamplingBatch(Struct, frozen=True):
    """One row for each chunk of a plan that has an answer, in the plan's order."""

    rows: tuple[SamplingRow, ...]


class Sampled(Struct, frozen=True, gc=False):
    """The answer to one `SamplingRow`: a token per sample and step, or those of all `turns`; `logprobs` as
    many, or None; in `mirostat_mu` the bound after each. `pooled`: its hidden states' sum, by dimension.
    Where entropies are needed, log-probabilities are of the likeliest tokens."""

    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    pooled: tuple[float, ...] = ()
    mirostat_mu: tuple[float, ...] = ()
    turns: TurnsEnd | None = None
    denoised: Denoised | None = None


class Ticket(Protocol):
    """A step that was launched and may still run.

    `can_be_followed`: the next step may be launched before `wait`, with FOLLOW for the tokens of this one.
    """

    @property
    def can_be_followed(self) -> bool: ...
    def wait(self) -> list[Sampled]: ...


@dataclass(frozen=True, slots=True)
class Done:
    """The ticket of a step that has run. On a CPU there are no others."""

    answers: list[Sampled]

    @property
    def can_be_followed(self) -> bool:
        return False

    def wait(self) -> list[Sampled]:
        """The answers to the plan's chunks, in order."""
        return self.answers
