"""The draft model of speculative decoding: a smaller model, which draws with the same random numbers.

Its state follows each sequence at a place of its own. Draft tokens that were rejected are taken back, and new
tokens are computed. Then the draft model goes on alone for as many tokens as are requested.

A model of PARD (An et al. 2025, "PARD: Accelerating LLM Inference with Low-Cost PARallel Draft Model
Adaptation", arXiv 2504.18583) needs no more passes: masks behind the last token give the rest of the draft.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from plait.runner.host.draft_memory import DraftMemory, without_logprobs
from plait.runner.runner import ModelRunner
from plait.schedule.drafts.turns import MOST_DRAFTED, DraftRequest
from plait.schedule.plan import (
    Chunk,
    CopySlot,
    Move,
    SamplingBatch,
    SamplingRow,
    StepPlan,
)


@dataclass(slots=True)
class _Place:
    """Where one sequence's state is. It covers `done` tokens of the sequence and, behind them, `ahead`.

    `slot`: the state after all of these; `spare`: the state after `done` if there are any `ahead`. `proposal`
    is the draft that was made when the sequence had `done` tokens.
    """

    index: int
    slot: int
    spare: int
    done: int = 0
    last: int = -1  # the token before `done`
    ahead: tuple[int, ...] = ()
    proposal: tuple[int, ...] = ()

    def is_about(self, token_ids: Sequence[int]) -> bool:
        """Whether the state is that of a prefix of these tokens, judged by the prefix's last token."""
        return len(token_ids) >= self.done and (not self.done or token_ids[self.done - 1] == self.last)

    def settle(self, token_ids: Sequence[int]) -> None:
        """Take back rejected tokens, so that the state is that of a proper prefix of these."""
        if not self.is_about(token_ids):
            self.done, self.ahead = 0, ()
        right = 0
        known = token_ids[self.done : self.done + len(self.ahead)]
        while right < len(known) and known[right] == self.ahead[right]:
            right += 1
        if not self.slot:  # paged state is taken back by its length alone
            self.done = min(self.done + right, len(token_ids) - 1)
        elif right == len(self.ahead) and self.done + right < len(token_ids):
            self.done += right
        elif self.ahead:
            self.slot, self.spare = self.spare, self.slot
        else:
            self.done = 0
        self.ahead = self.proposal = ()
        self.last = token_ids[self.done - 1] if self.done else -1


@dataclass(slots=True)
class _Job:
    """What one call does for one sequence. `found`: its draft tokens so far."""

    request: DraftRequest
    place: _Place
    limit: int
    found: list[int] = field(default_factory=list)

    @property
    def end(self) -> int:
        """The number of tokens, the draft included."""
        return len(self.request.token_ids) + len(self.found)


@dataclass(frozen=True, slots=True)
class Masks:
    """Of a model of PARD: the token that stands for one of a draft, and tokens of a draft, at most."""

    token: int
    most: int


class DraftModel:
    """Proposes drafts with a model and memory of its own: `runner`'s store has the size that `memory` gives.

    Sequences beyond the places, or longer than a place, get no drafts. In one call at most `max_step_len`
    tokens that the sequences already have are computed, so after a long prompt drafts come some calls later.
    Penalties and `min_tokens` are left out of the draws, which costs wrong drafts only.
    """

    def __init__(self, runner: ModelRunner, memory: DraftMemory, masks: Masks | None = None) -> None:
        assert masks is None or not memory.has_slots
        self.runner, self.memory, self.masks = runner, memory, masks
        self.at_once, self.most = masks is not None, masks.most if masks else MOST_DRAFTED
        self._free = [_Place(i, *memory.slots(i)) for i in reversed(range(memory.num_places))]
        self._places: OrderedDict[int, _Place] = OrderedDict()  # by sequence id, least recently used first
        self._step = 0

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Drafts by sequence id. Raises EngineError if the model computes no numbers."""
        found, jobs = {}, []
        for one, place in self._find_places(wanted):
            if place.proposal and place.done == len(one.token_ids) and place.is_about(one.token_ids):
                found[one.seq_id] = place.proposal[: one.limit]  # no step has checked it yet
                continue
            place.settle(one.token_ids)
            limit = min(one.limit, self.memory.max_len - len(one.token_ids) + 1)
            jobs.append(_Job(one, place, limit))
        try:
            self._catch_up(jobs)
            self._go_on(jobs)
        except BaseException:
            for job in jobs:  # half a pass may have run: nothing of their state is known
                self.forget(job.request.seq_id)
            raise
        for job in jobs:
            job.place.proposal = tuple(job.found)
            job.place.ahead = () if self.masks else job.place.proposal[:-1]
        return found | {job.request.seq_id: tuple(job.found) for job in jobs if job.found}

    def forget(self, seq_id: int) -> None:
        """Free the place of a sequence that has ended."""
        if place := self._places.pop(seq_id, None):
            place.done, place.ahead, place.proposal = 0, (), ()
            self._free.append(place)

    def _find_places(self, wanted: Sequence[DraftRequest]) -> list[tuple[DraftRequest, _Place]]:
        """Those that have a place or get one: a free one, or that of a sequence that is not in `wanted`."""
        fitting = {}
        for one in wanted:
            if not 0 < len(one.token_ids) <= self.memory.max_len or one.limit < 1:
                self.forget(one.seq_id)
                continue
            fitting[one.seq_id] = one
            if one.seq_id in self._places:
                self._places.move_to_end(one.seq_id)
        for seq_id in [i for i in fitting if i not in self._places]:
            oldest = next(iter(self._places), None)
            if not self._free and oldest is not None and oldest not in fitting:
                self.forget(oldest)
            if self._free:
                self._places[seq_id] = self._free.pop()
        return [(one, self._places[i]) for i, one in fitting.items() if i in self._places]

    def _catch_up(self, jobs: Sequence[_Job]) -> None:
        """Compute, in one pass, tokens that the sequences have and the state has not, the fewest first.

        Masks take what is left of the pass, each sequence the same share of it.
        """
        left, missing = self.memory.max_step_len, list[tuple[_Job, tuple[int, ...]]]()
        for job in sorted(jobs, key=lambda job: len(job.request.token_ids) - job.place.done):
            tokens = tuple(job.request.token_ids[job.place.done : job.place.done + left])
            left -= len(tokens)
            if tokens:
                missing.append((job, tokens))
        drawing = [job for job, tokens in missing if job.place.done + len(tokens) == job.end]
        work = []
        for job, tokens in missing:
            if self.masks and job in drawing:
                job.limit = min(job.limit, 1 + left // len(drawing), self.masks.most)
                tokens += (self.masks.token,) * (job.limit - 1)
            work.append((job, self._chunk(job, job.place.done, tokens)))
        self._run(work)
        for job, chunk in work:
            known = job.request.token_ids[: chunk.end]  # behind them are masks
            job.place.done, job.place.last = len(known), known[-1]

    def _go_on(self, jobs: Sequence[_Job]) -> None:
        """Draft token by token behind the first one, for all sequences side by side."""
        moves: list[Move] = []
        if self.memory.has_slots:
            ahead = (job for job in jobs if job.found and job.limit > 1)
            moves = [CopySlot(job.place.slot, job.place.spare) for job in ahead]
        while going := [job for job in jobs if 0 < len(job.found) < job.limit]:
            self._run([(job, self._chunk(job, job.end - 1, (job.found[-1],))) for job in going], moves)
            moves = []

    def _chunk(self, job: _Job, start: int, tokens: tuple[int, ...]) -> Chunk:
        """Tokens that one pass computes for a job, from position `start` on: the last known one has logits,
        and so have masks behind it."""
        place, end = job.place, start + len(tokens)
        tables = self.memory.tables(place.index, start, end)
        return Chunk(job.request.seq_id, start, tokens, tables, place.slot, max(end - job.end + 1, 0))

    def _run(self, work: Sequence[tuple[_Job, Chunk]], moves: Sequence[Move] = ()) -> None:
        """Run one pass; a job with its last token in it gets a draft token, and one for each mask."""
        if not work:
            return
        # Decodes come first.
        work = sorted(work, key=lambda each: len(each[1].token_ids) > 1 or each[1].start == 0)
        chunks = tuple(chunk for _, chunk in work)
        drawing = [(job, chunk.num_logits) for job, chunk in work if chunk.num_logits]
        rows = [
            SamplingRow(without_logprobs(job.request.params), count, count, job.end, job.request.seed)
            for job, count in drawing
        ]
        fresh = tuple(chunk.slot for chunk in chunks if chunk.start == 0 and chunk.slot)
        self._step += 1
        plan = StepPlan(self._step, chunks, tuple(moves), fresh)
        answers = self.runner.launch(plan, SamplingBatch(tuple(rows))).wait()
        for (job, _), answer in zip(drawing, answers, strict=True):
            job.found += answer.token_ids
