"""A sequence: one choice of a request as the scheduler sees it, with its tokens, block tables and slot.

Also what a step brings: sampled tokens become an `Update` of their sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from msgspec import Struct

from plait.request import Event, FinishReason, SamplingParams, TokenLogprobs
from plait.schedule.attached import Guide, PooledHidden
from plait.schedule.beams import BeamSearch
from plait.schedule.drafts.canvas import Canvas
from plait.schedule.drafts.noisy_canvas import NoisyCanvas
from plait.schedule.drafts.passes import Denoising
from plait.schedule.drafts.slots import DraftSlots
from plait.schedule.plan import FOLLOW, Chunk, Sampled, SamplingRow
from plait.state.blocks import root

MOST_REPLAYED = 8  # tokens that are computed again in a step with a draft; of more, a step has no draft


class Phase(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


class SavedSequence(Struct, frozen=True):
    """A preempted sequence's copy in host memory: the state after `length` tokens.

    `holes`: by group, how many blocks at the front of its table were behind the window.
    """

    handle: int
    length: int
    nbytes: int
    holes: tuple[int, ...]
    num_blocks: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Gang:
    """Sequences that are sampled in the same step, and have memory together or not at all.

    Either a choice and its negative prompt (`search` None), or the beams of a search. `ranked`: the members
    with a live beam, best beam first; only the first member computes the prompt, the others fork from it.
    """

    members: tuple[TokenSequence, ...]
    search: BeamSearch | None = None
    ranked: tuple[TokenSequence, ...] = ()

    def __post_init__(self) -> None:
        self.ranked = self.members[:1] if self.search else self.members
        for seq in self.members:
            seq.gang = self
            seq.is_unobserved = seq.can_follow = False

    @property
    def is_due(self) -> bool:
        """Whether one token of each is left to compute, so that all can be sampled in a step."""
        return all(seq.num_left == 1 for seq in self.ranked)


@dataclass(slots=True, eq=False)
class TokenSequence:
    """Tokens, memory and progress of one sequence. Only the `Scheduler` and its `Allocation` change it.

    `token_ids`: prompt and output; `num_computed_tokens` of them are in the state that `tables` (one block
    table per group) and `slot` point to. `num_pending`: tokens that are being sampled. `max_len`: where it
    must end. `scored`: log-probabilities of prompt tokens so far, from the second token on. `pooled`: the
    sum of its hidden states, if requested. `deadline`: on the scheduler's clock. `is_watched`: it streams.
    `adapter`: the slot of its adapter, 0: none. `gang`: the sequences that it is sampled with, if any.
    `chain` and `num_recorded`: its hashes, and how many of its blocks the prefix cache knows. `marks`:
    positions where a snapshot is needed. `in_step`: the step that was planned with it, until what it
    computes is recorded; `awaited`: the step of which this is recorded and only the answer is missing (0:
    none). `draft`: its draft tokens in that step; `draft_slots`: where it goes back to if they are wrong.
    `saved`: its state in host memory while it waits. `num_cached_tokens` of the prompt were not computed when
    it first ran, and `miss_cause` is why there were not more. `mirostat_mu`: mirostat's bound after its last
    token; None: it has none yet. `canvas`: what it writes on, if it does; its places are the `draft` then.
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
    cache_salt: str = ""
    adapter: int = 0
    boundaries: tuple[int, ...] = ()
    priority: int = 0
    deadline: float | None = None
    prompt_len: int = 0
    arrival: int = 0
    arrived_at: float = 0.0
    phase: Phase = Phase.WAITING
    num_computed_tokens: int = 0
    tables: tuple[list[int], ...] = ()
    slot: int = 0
    draft_slots: DraftSlots | None = None
    draft: tuple[int, ...] = ()
    in_step: int = 0
    awaited: int = 0
    num_pending: int = 0
    chain: list[bytes] = field(default_factory=list)
    num_recorded: int = 0
    marks: set[int] = field(default_factory=set)
    saved: SavedSequence | None = None
    guide: Guide | None = None
    num_cached_tokens: int = 0
    miss_cause: str = ""
    num_preemptions: int = 0
    scored: list[TokenLogprobs] = field(default_factory=list)
    pooled: PooledHidden | None = None
    is_watched: bool = True
    mirostat_mu: float | None = None
    gang: Gang | None = None
    canvas: Canvas | NoisyCanvas | None = None
    is_penalized: bool = field(init=False)  # whether its sampler must know what came before
    is_unobserved: bool = field(init=False)  # whether the engine reads no token between two decode steps
    can_follow: bool = field(init=False)  # whether a decode can be planned before its token is known

    def __post_init__(self) -> None:
        params = self.params
        self.is_penalized = params.needs_history
        is_chosen_on_host = self.is_penalized or params.needs_chain
        looked_at = is_chosen_on_host or params.logprobs is not None or self.canvas is not None
        self.is_unobserved = not looked_at and self.guide is None and self.pooled is None
        reads_answer = self.wants_prompt_logprobs or is_chosen_on_host or self.canvas is not None
        self.can_follow = not reads_answer and self.guide is None and self.pooled is None
        self.prompt_len = self.prompt_len or len(self.token_ids)
        self.chain = [root(self.cache_salt)]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def length(self) -> int:
        """Tokens that are known or being sampled, and places of a canvas."""
        return len(self.token_ids) + self.num_pending + self.num_places

    @property
    def members(self) -> tuple[TokenSequence, ...]:
        """The sequences that it is admitted and preempted with, itself among them."""
        return (self,) if self.gang is None else self.gang.members

    @property
    def is_idle(self) -> bool:
        """Whether it is a beam that does not live yet, and computes nothing."""
        return self.gang is not None and self not in self.gang.ranked

    @property
    def is_negative(self) -> bool:
        """Whether it is a negative prompt: its logits guide another sequence, and it has no answer."""
        return self.gang is not None and self.gang.search is None and self is self.gang.members[1]

    @property
    def is_due(self) -> bool:
        """Whether what comes next can be sampled in the next step."""
        if self.gang is not None:
            return self.gang.is_due and not self.is_idle
        return not self.is_prefilling and self.has_more

    @property
    def has_more(self) -> bool:
        """Whether there is a token to compute, be it one that is being sampled and will not be the last."""
        if self.num_computed_tokens < len(self.token_ids) or self.canvas is not None:
            return True
        return self.num_pending > 0 and self.length < self.max_len

    def is_in(self, step: int) -> bool:
        """Whether a step has yet to bring something to the sequence."""
        return step in (self.in_step, self.awaited)

    @property
    def is_ready(self) -> bool:
        """Whether it may run, because its guide is compiled or it has none."""
        return self.guide is None or self.guide.is_ready

    def cut_draft(self, draft: tuple[int, ...]) -> tuple[int, ...]:
        """The first tokens of a draft, as many as the guide allows."""
        return draft if self.guide is None else draft[: max(len(self.guide.masks(draft)) - 1, 0)]

    @property
    def num_left(self) -> int:
        """Tokens that are known and not computed."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_places(self) -> int:
        """Places of the canvas behind its tokens; 0 without one."""
        is_written = self.canvas and self.max_len > self.prompt_len
        return self.canvas.count_places(len(self.token_ids)) if self.canvas and is_written else 0

    @property
    def num_due(self) -> int:
        """Tokens of a step that samples what comes next."""
        return 1 if self.canvas is None else self.num_left + self.num_places

    @property
    def most_computed(self) -> int:
        """The most tokens of it that are ever computed."""
        known = num_computed(self.prompt_len, self.max_len)
        return self.canvas.find_end(self.max_len) if self.canvas else known

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def is_prefilling(self) -> bool:
        computed = self.num_computed_tokens
        if self.canvas is not None:  # the tokens of the last canvas come with the next one's places
            return len(self.token_ids) - computed > self.canvas.spec.size
        return len(self.token_ids) - computed > 1 or computed == 0

    @property
    def can_draft(self) -> bool:
        """Whether a step that computes all of its tokens may check a draft behind them, too.

        In a hybrid some tokens may have to be computed again, because a draft was wrong.
        """
        replays = self.slot > 0 and self.num_output_tokens > 0
        is_near = 0 < self.num_left <= (MOST_REPLAYED if replays else 1)
        return is_near and self.num_computed_tokens > 0 and self.gang is None

    def samples_after(self, end: int) -> bool:
        """Whether a token is sampled once the tokens before `end` are computed."""
        return end >= len(self.token_ids) and self.max_len > self.prompt_len and not self.is_negative

    def num_logits(self, start: int, end: int) -> int:
        """Rows of logits that a chunk start..end must give: to sample from, and to score the prompt.

        Tokens of a draft are not part of start..end, and have one row each. A place of a canvas has the row
        of its own token.
        """
        if self.pooled:
            return 0
        if self.canvas is not None:
            return len(self.draft)
        last = int(end >= len(self.token_ids))
        if not self.wants_prompt_logprobs or len(self.scored) >= self.prompt_len - 1:
            return last + len(self.draft)
        return max(end - max(start, len(self.scored)), last)

    @property
    def needs_all_tokens(self) -> bool:
        """Whether each of its tokens must be computed, also those of which the state is cached."""
        if self.pooled:
            return self.pooled.needs_all_tokens
        return self.wants_prompt_logprobs and len(self.scored) < self.prompt_len - 1

    def forget_memory(self) -> None:
        """Forget the blocks and slots, which are given back; all is computed again."""
        self.tables, self.slot, self.draft_slots, self.draft = (), 0, None, ()
        self.in_step = self.awaited = self.num_pending = 0
        self.num_computed_tokens = self.num_recorded = 0
        if self.canvas is not None:
            self.canvas.restart()

    def take(self, answer: Sampled, end: int) -> None:
        """Keep what a step computed of the tokens before `end`: log-probabilities and hidden states."""
        self.scored.extend(answer.prompt_logprobs)
        if self.pooled and answer.pooled:
            self.pooled.add(answer.pooled, end)

    def keep_tokens(self, token_ids: tuple[int, ...]) -> tuple[tuple[int, ...], FinishReason | None]:
        """The first of these new tokens that belong to the sequence, and whether it ends with them."""
        if self.max_len <= self.prompt_len:
            return (), "length"
        guide, num_tokens = self.guide, len(self.token_ids)
        for i, token_id in enumerate(token_ids):
            # An end that comes before min_tokens was the only thing that its guide allowed.
            is_allowed = guide is not None or num_tokens - self.prompt_len + i >= self.params.min_tokens
            if token_id in self.stop_token_ids and is_allowed:
                return token_ids[:i], "stop"
            if guide is not None and guide.accept(token_id):
                return token_ids[: i + 1], "stop"
            if num_tokens + i + 1 >= self.max_len:
                return token_ids[: i + 1], "length"
        return token_ids, None

    def event(
        self, answer: Sampled | None, kept: tuple[int, ...], reason: FinishReason | None, *, is_scoring: bool
    ) -> Event:
        """What a step added to the sequence. `kept`: the tokens of the answer that belong to it.

        Mirostat's bound after the last of them is kept for the next step.
        """
        if answer and answer.mirostat_mu and kept:
            self.mirostat_mu = answer.mirostat_mu[len(kept) - 1]
        new, logprobs = (answer.token_ids, answer.logprobs) if answer else ((), None)
        stop_token = None
        if reason == "stop" and len(kept) < len(new) and not (self.guide and self.guide.is_finished):
            stop_token = new[len(kept)]  # else the guide ended it, without a token of its own
        return Event(
            self.request_id,
            self.index,
            token_ids=kept,
            logprobs=logprobs[: len(kept)] if logprobs and kept else None,
            prompt_logprobs=tuple(self.scored) if is_scoring else None,
            finish_reason=reason,
            stop_token_id=stop_token,
            num_cached_tokens=self.num_cached_tokens,
            embedding=self.pooled.vector() if self.pooled else None,
            mirostat_mu=self.mirostat_mu,
        )

    def chunk(self, share: int, step: int, *, is_whole: bool = False) -> Chunk:
        """Its next tokens, as many as its share of a step; `is_whole`: these are all it has."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + share
        self.in_step = step
        if self.canvas is not None and end > len(self.token_ids):
            self.draft = self.canvas.open(len(self.token_ids), self.seed)
        return Chunk(
            seq_id=self.id,
            start=start,
            token_ids=(*self.token_ids[start:end], *self.draft) or (FOLLOW,),
            blocks=tuple([tuple(table) for table in self.tables]),
            slot=self.slot,
            num_logits=self.num_logits(start, end),
            num_pooled=self.pooled.count_new(start, end, self.num_tokens) if self.pooled else 0,
            adapter=self.adapter,
            row_slots=self.draft_slots.rows if self.draft_slots else (),
            prompt=self.prompt_len if is_whole else 0,
            denoising=self._denoising,
        )

    @property
    def _denoising(self) -> Denoising | None:
        passed = self.canvas.denoising if self.canvas and self.draft else None
        return Denoising(*passed) if passed else None

    def sampling_row(self, chunk: Chunk, places: Mapping[int, int]) -> SamplingRow:
        """What the sampler must know about its chunk of a step that was just planned.

        `places`: where in the batch each sequence is, by id.
        """
        if self.canvas is not None:
            return self._row_of_canvas(self.canvas)
        params, num_logits, num_tokens = self.params, chunk.num_logits, self.length
        end = chunk.end - len(self.draft)
        targets: tuple[int, ...] = ()
        if self.wants_prompt_logprobs and len(self.scored) < self.prompt_len - 1:
            targets = tuple(self.token_ids[end - num_logits + 1 : min(end + 1, self.prompt_len)])
        samples = self.samples_after(end)
        num_stopless = max(params.min_tokens + self.prompt_len - num_tokens, 0) if params.min_tokens else 0
        return SamplingRow(
            params=params,
            num_logits=num_logits,
            num_samples=(1 + len(self.draft)) * samples,
            position=num_tokens,
            seed=self.seed,
            prompt_targets=targets,
            draft=self.draft,
            history=tuple(self.token_ids) if self.is_penalized else (),
            prompt_len=self.prompt_len,
            stop_token_ids=self.stop_token_ids if num_stopless else frozenset(),
            num_stopless=num_stopless,
            masks=self.guide.masks(self.draft) if self.guide is not None and samples else (),
            mirostat_mu=self.mirostat_mu,
            negative=self._negative_row(places) if samples else -1,
            num_candidates=self.gang.search.num_candidates if self.gang and self.gang.search else 0,
        )

    def _row_of_canvas(self, canvas: Canvas | NoisyCanvas) -> SamplingRow:
        """A token for every place, and how sure the model is of it."""
        num_tokens, least = len(self.token_ids), self.params.min_tokens
        num_stopless = max(least + self.prompt_len - num_tokens, 0) if least else 0
        params, seed, heat = canvas.choose_draws(self.params, self.seed)
        history, draft = canvas.list_past(self.token_ids) if self.is_penalized else ((), ())
        return SamplingRow(
            *(params, len(self.draft), len(self.draft), num_tokens, seed),
            draft=draft,
            history=history,
            prompt_len=self.prompt_len,
            stop_token_ids=self.stop_token_ids if num_stopless else frozenset(),
            num_stopless=num_stopless,
            is_scored=not heat,
            entropy_at=heat,
        )

    def _negative_row(self, places: Mapping[int, int]) -> int:
        is_guided = self.gang is not None and self.gang.search is None
        return places[self.members[1].id] if is_guided else -1


def num_computed(prompt_len: int, max_len: int) -> int:
    """The most tokens of a sequence that are ever computed: the last one sampled is not."""
    return max(prompt_len, max_len - 1)
