"""The scheduler: picks the sequences of a step by priority, then arrival; decodes before prompt chunks.

A step has a budget of tokens. The last in line is preempted, so the first always proceeds. The scheduler is
deterministic but for two measured things, which change no text: how many tokens a step may have so that
running replies do not wait too long, and whether a preempted sequence is swapped out or computed again.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from plait.errors import QueueFull
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits, StepCosts, describe_load
from plait.schedule.gang_beams import advance_beams, drop_state
from plait.schedule.plan import Chunk, Move, Sampled, SamplingBatch, StepPlan
from plait.schedule.sequence import Gang, Phase, TokenSequence
from plait.schedule.shares import check_fits, others_await, prompt_budget, share_members, share_step
from plait.schedule.turns import (
    Update,
    add_drafts,
    add_earlier,
    advance_canvas,
    answers_by_id,
    plan_steps,
    plan_turns,
    settle_earlier,
)
from plait.state.blocks import Hit

AGING_S = 30.0  # waiting this long counts as much as one level of priority: no request waits for ever
Drafts = Mapping[int, tuple[int, ...]]
NOTHING: Drafts = {}


class Scheduler:
    """Owns the sequences and their memory. A step is `plan()` or `plan_ahead()`, its launch, and `commit()`.

    *Suspects*, sequences of a step that failed, run alone, in turn. The engine feeds `costs`.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        memory: Allocation,
        *,
        costs: StepCosts | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.limits, self.memory, self.costs, self.clock = limits, memory, costs or StepCosts(), clock
        self.waiting: list[TokenSequence] = []  # in line, which is the order of `_place`
        self.running: list[TokenSequence] = []  # in line
        self.cache_counts: Counter[str] = Counter()
        self.num_preemptions = self.num_swaps = 0
        self._by_id: dict[int, TokenSequence] = {}
        self._suspects: list[TokenSequence] = []
        self._moves: dict[int, tuple[Move, ...]] = {}  # of plans that are not committed, by step
        self._step = self._arrivals = 0

    def add(self, *sequences: TokenSequence) -> None:
        """Queue these sequences (the choices of one request): all of them or none.

        Raises CapacityError if memory can never hold one, QueueFull if too many requests wait.
        """
        for seq in sequences:
            check_fits(seq, self.limits, self.memory)
        if not self.has_capacity():
            counts = f"{self.num_waiting_requests} requests are waiting and max_waiting is"
            raise QueueFull(f"{counts} {self.limits.max_waiting}; try again later")
        now = self.clock()
        for seq in [member for one in sequences for member in one.members]:
            seq.arrival, self._arrivals, seq.arrived_at = self._arrivals, self._arrivals + 1, now
            self._by_id[seq.id] = seq
            insort(self.waiting, seq, key=self._place)

    @property
    def longest(self) -> int:
        """The most tokens of one sequence that can be computed when it has all memory."""
        lengths = range(1 + self.limits.tail, self.limits.max_model_len + 1 + self.limits.tail)
        return bisect_left(lengths, True, key=lambda length: self.memory.shortage(length) is not None)

    def has_capacity(self, arriving: int = 0) -> bool:
        """Whether one more request may wait, when `arriving` others are on their way."""
        free_places = max(self.limits.max_num_seqs - len(self.running), 0)
        return self.num_waiting_requests + arriving < self.limits.max_waiting + free_places

    def cancel(self, seq_id: int) -> None:
        """Forget a sequence and take back what it holds. Unknown and finished ones are ignored."""
        if seq := self._by_id.get(seq_id):
            self._finish(*seq.members)

    def expire(self, now: float) -> list[int]:
        """Sequences with a deadline that has passed; the caller ends them."""
        return [seq.id for seq in self._by_id.values() if seq.deadline is not None and seq.deadline <= now]

    def list_drafting(self) -> list[TokenSequence]:
        """Running sequences that can have draft tokens checked in the next step."""
        return [s for s in self.running if s.can_draft and self.limits.causal and not self._suspects]

    def plan(
        self, drafts: Drafts = NOTHING, *, is_observed: bool = False, is_compared: bool = False
    ) -> StepPlan | None:
        """The next step, or None if there is nothing to do. `drafts`: draft tokens by id, of `list_drafting`;
        `is_observed`: one step, because the drafter reads its tokens; `is_compared`: see `plan_turns`."""
        if suspect := self._next_suspect():
            shares = share_members(suspect, self.limits.max_num_batched_tokens, self.limits, self.memory)
        else:
            shares = self._shares()
        self._reserve(shares)
        if self.waiting and not self._suspects:
            self._admit_waiting(shares)
            self.memory.read_ahead(self.waiting)
        if drafts and not self._suspects:
            add_drafts(self.running, shares, drafts, self.limits, self.memory)
        is_single = bool(is_observed or drafts or self.waiting or self._suspects)
        return self._make_plan(shares, is_single=is_single, is_compared=is_compared)

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after `plan`, which was launched and is not committed; what that one samples is FOLLOW.

        What `plan` computes is recorded here: the tokens that it reads are known, and memory is moved between
        the two steps. What a sequence computes behind its end is dropped, and its slot is no snapshot. None:
        commit `plan` first, as what comes next needs its tokens, memory is short, or nothing is left to do.
        """
        can_follow = all(seq.can_follow and not seq.draft for seq in self.running)
        if not can_follow or plan.num_steps > 1 or self._suspects or not self.limits.causal:
            return None
        for chunk in plan.chunks:
            seq = self._by_id.get(chunk.seq_id)
            if seq is not None and seq.in_step == plan.step:
                seq.in_step, seq.awaited = 0, plan.step
                seq.num_pending = int(seq.samples_after(chunk.end))
                self.memory.settle(seq, chunk.end, accepted=True)
        shares = self._shares()
        going = [seq for seq in self.running if shares.get(seq.id)]
        if not self.memory.reserve_all(going, [s.num_computed_tokens + shares[s.id] for s in going]):
            return None  # a sequence must be preempted, and its token is not known
        if self.waiting:
            self._admit_waiting(shares)
        if not any(shares.values()):
            return None
        return self._make_plan(shares, is_single=bool(self.waiting))

    def _make_plan(
        self, shares: Mapping[int, int], *, is_single: bool, is_compared: bool = False
    ) -> StepPlan | None:
        """The plan of these shares and of the moves that memory needs; None if there is nothing to do."""
        is_alone = len(self.running) == 1 and not (self.waiting or self._suspects)
        where = self.limits, self.costs, self.memory
        num_steps, stops = (1, ()) if is_single else plan_steps(self.running, *where)
        turns = plan_turns(self.running[0], *where, is_compared=is_compared) if is_alone else None
        step, moves = self._step + 1, tuple(self.memory.pools.moves)
        whole, some = not self.limits.causal, [seq for seq in self.running if shares.get(seq.id)]
        chunks = [seq.chunk(shares[seq.id], step, is_whole=whole) for seq in some]
        if not chunks and not moves:
            return None
        self._step, self._moves[step], self.memory.pools.moves = step, moves, []
        chunks.sort(key=lambda c: len(c.token_ids) > 1 or c.start == 0)  # stable: in line within
        fresh = tuple([c.slot for c in chunks if c.start == 0 and c.slot])
        return StepPlan(step, tuple(chunks), moves, fresh, num_steps, turns, stops)

    def sampling(self, plan: StepPlan) -> SamplingBatch:
        """What the sampler must know about a plan that was just made."""
        chunks = [chunk for chunk in plan.chunks if chunk.has_answer]
        places = {chunk.seq_id: place for place, chunk in enumerate(chunks)}
        return SamplingBatch(tuple(self._by_id[c.seq_id].sampling_row(c, places) for c in chunks))

    def commit(self, plan: StepPlan, sampled: Sequence[Sampled]) -> list[Update]:
        """Advance the sequences of a plan that has run; those cancelled since are left out.

        `sampled`: one entry per chunk with logits, in order. Raises EngineError, changing nothing, if not.
        """
        answers, updates = answers_by_id(plan, sampled, self._by_id), []
        for chunk in plan.chunks:
            seq = self._by_id.get(chunk.seq_id)
            if seq and seq.is_in(plan.step) and (update := self._advance(seq, chunk, answers.get(seq.id))):
                updates.append(update)
        for gang in {seq.gang: None for i in answers if (seq := self._by_id.get(i)) and seq.gang}:
            if gang.search and all(seq.id in answers for seq in gang.ranked):
                updates += self._advance_beams(gang, answers)
        self._moves.pop(plan.step, None)
        return updates

    def isolate(self) -> None:
        """After a failed step, preempt all, as neither state nor plans can be trusted; suspects run alone."""
        suspects = {seq.id: seq for seq in [*self._suspects, *self.running]}
        self._reset_memory([move for moves in self._moves.values() for move in moves])
        self._suspects = sorted(suspects.values(), key=self._place)

    def _reset_memory(self, moves: Sequence[Move]) -> None:
        """Preempt all, and begin again with empty memory. `moves`: those that may not have been made."""
        for seq in [*self.running]:
            seq.forget_memory()
            self._wait_again(seq)
        for seq in self.waiting:
            seq.saved = None
        self._moves.clear()
        self.memory.reset(moves)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.memory.pools.moves)

    @property
    def num_waiting_requests(self) -> int:
        return len({seq.request_id for seq in self.waiting})

    def stats(self) -> Mapping[str, int]:
        """What is running and waiting; blocks (of all groups), slots and host memory; preemptions."""
        return {
            **describe_load(self.waiting, self.running, self.costs),
            **self.memory.stats(),
            "num_preemptions": self.num_preemptions,
            "num_swaps": self.num_swaps,
        }

    def check(self) -> None:
        """Check the invariants; AssertionError names the one that is broken."""
        self.memory.check(self.running, self.waiting)
        assert {seq.id for seq in [*self.running, *self.waiting]} == set(self._by_id)
        assert len(self.running) <= self.limits.max_num_seqs
        assert self.running == sorted(self.running, key=self._place), "a sequence runs out of line"
        assert all(seq.phase is Phase.RUNNING and (seq.has_more or seq.awaited) for seq in self.running)
        assert all(seq.phase is Phase.WAITING and not seq.num_computed_tokens for seq in self.waiting)
        assert all(seq.id in self._by_id for seq in self._suspects)

    def repair(self) -> str:
        """Check; if a block table is wrong, begin again with empty memory. Returns what was wrong."""
        try:
            self.check()
        except Exception as error:  # any exception of the check is a wrong entry
            self._reset_memory(())
            return f"{type(error).__name__}: {error}"
        return ""

    # How many tokens each sequence gets

    def _place(self, seq: TokenSequence) -> tuple[float, int]:
        """A sequence's place in line: priority with aging, then arrival; the lowest is first."""
        return seq.priority + seq.arrived_at / AGING_S, seq.arrival

    def _shares(self) -> dict[int, int]:
        return share_step(self.running, self.limits, self.costs, self.memory)

    def _reserve(self, shares: dict[int, int]) -> None:
        """Reserve blocks for every share, in line; the last in line are preempted until it fits."""
        for seq in [*self.running]:
            if not shares.get(seq.id):
                continue
            end = seq.num_computed_tokens + shares[seq.id]
            while seq.phase is Phase.RUNNING and not self.memory.reserve(seq, end):
                for victim in self.running[-1].members:
                    shares.pop(victim.id, None)
                    self._save_if_cheaper(victim)
                    self._preempt(victim)

    # Which sequences start, and which are preempted

    def _admit_waiting(self, shares: dict[int, int]) -> None:
        decodes = [s for s in self.running if shares.get(s.id) and not s.is_prefilling]
        budget = prompt_budget(self.limits, self.costs, decodes)
        budget -= sum(n for seq_id, n in shares.items() if self._by_id[seq_id].is_prefilling)
        places = self.limits.max_num_seqs - len(self.running)
        for seq in [seq for seq in self.waiting if seq.is_ready and seq is seq.members[0]][: 2 * places]:
            hit = self.memory.lookup(seq)
            if self.memory.awaits_prefix(seq, hit) or others_await(seq, self.memory):
                continue  # what it begins with is being computed or read
            whole = not self.limits.causal and seq.num_tokens > budget
            if budget < 1 or whole or not self._admit(seq, hit):
                return
            shares |= (new := share_members(seq, budget, self.limits, self.memory))
            for one in seq.members:
                length = one.num_computed_tokens + new.get(one.id, 0)
                assert self.memory.reserve(one, length), "an admitted one did not fit"
            budget -= sum(new.values())

    def _admit(self, seq: TokenSequence, hit: Hit) -> bool:
        """Start a waiting sequence, with those of its gang, if all can have a place and memory for all their
        known tokens."""
        others = seq.members[1:]
        full = len(self.running) + len(others) >= self.limits.max_num_seqs
        if full or not self.memory.can_hold(seq, hit, self.running, others):
            return False
        self._open(seq, hit)
        for other in others:
            self._open(other, Hit() if other.is_idle else self.memory.lookup(other))
        return True

    def _open(self, seq: TokenSequence, hit: Hit) -> None:
        self.waiting.remove(seq)
        if seq.is_idle:
            drop_state(seq, self.memory)
        else:
            self.memory.open(seq, hit)
        seq.phase = Phase.RUNNING
        insort(self.running, seq, key=self._place)
        if not seq.miss_cause and not seq.is_idle:  # not when it resumes
            seq.num_cached_tokens, seq.miss_cause = hit.length, hit.cause
            self.cache_counts.update({hit.cause: 1, "asked_tokens": seq.prompt_len, "hit_tokens": hit.length})

    def _next_suspect(self) -> TokenSequence | None:
        """The suspect that must run alone now; None also when it has to wait for memory."""
        suspect = next(iter(self._suspects), None)
        if suspect is None or suspect.phase is Phase.RUNNING:
            return suspect
        return suspect if self._admit(suspect, self.memory.lookup(suspect)) else None

    def _save_if_cheaper(self, seq: TokenSequence) -> None:
        """Save a sequence that is preempted to host memory, unless it is faster to compute it again."""
        if not self.limits.causal or not seq.num_computed_tokens or not self.memory.can_save(seq):
            return
        if self.costs.prefers_moving(2 * self.memory.state_nbytes(seq), seq.num_computed_tokens):
            self.memory.save(seq)
            self.num_swaps += 1

    def _preempt(self, seq: TokenSequence) -> None:
        """Take a running sequence's memory; it waits at its place in line."""
        self.memory.release(seq)
        self._wait_again(seq)

    def _wait_again(self, seq: TokenSequence) -> None:
        self.running.remove(seq)
        seq.phase = Phase.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, seq, key=self._place)

    def _finish(self, *sequences: TokenSequence) -> None:
        for seq in sequences:
            for some in (self.running, self.waiting, self._suspects):
                if seq in some:
                    some.remove(seq)
            self.memory.release(seq)
            self.memory.forget_saved(seq)
            seq.phase = Phase.FINISHED
            del self._by_id[seq.id]

    # What a step brings

    def _advance(self, seq: TokenSequence, chunk: Chunk, answer: Sampled | None) -> Update | None:
        if seq.canvas is not None:
            return self._advance_canvas(seq, chunk, answer)
        chunk, answer, earlier = settle_earlier(seq, chunk, answer, self.memory)
        draft, seq.draft, is_settled = seq.draft, (), seq.awaited > 0
        if is_settled:
            seq.awaited = seq.num_pending = 0
        else:
            seq.in_step = 0
        end, is_scoring = chunk.end - len(draft), seq.wants_prompt_logprobs and not seq.num_output_tokens
        if answer:
            seq.take(answer, end)
        searches = seq.gang is not None and seq.gang.search is not None
        if end < seq.num_tokens or seq.is_negative or searches:
            if not is_settled:
                self._settle(seq, end, accepted=True)
            return None
        new = answer.token_ids if answer else ()
        # Of a draft, the tokens that were sampled in its places are right; of further steps, all are.
        wrong = (i for i, token_id in enumerate(draft) if new[i] != token_id)
        num_ahead = next(wrong, len(draft)) if draft else max(len(new) - 1, 0)
        tokens, reason = seq.keep_tokens(new[: num_ahead + 1])
        for one in seq.members:  # before the memory settles, because it names blocks by their tokens
            one.token_ids += tokens
        if not is_settled:
            self._settle(seq, end + num_ahead, accepted=not draft or num_ahead == len(draft))
        self._clear(seq)
        if reason is not None:
            self._finish(*seq.members)
        event = seq.event(answer, tokens, reason, is_scoring=is_scoring)
        return add_earlier(Update(seq.id, event, len(draft), num_ahead if draft else 0), answer, earlier)

    def _advance_canvas(self, seq: TokenSequence, chunk: Chunk, answer: Sampled | None) -> Update | None:
        update, is_kept = advance_canvas(seq, chunk, answer, self.memory), seq.canvas and seq.canvas.is_kept
        if update is not None or (answer is not None and is_kept):  # else a failure would undo it
            self._clear(seq)
        if update is not None and update.event.finish_reason is not None:
            self._finish(seq)
        return update

    def _clear(self, seq: TokenSequence) -> None:
        """A sequence, with its gang, has shown that it does not make steps fail."""
        if seq in self._suspects:
            self._suspects = [one for one in self._suspects if one not in seq.members]

    def _advance_beams(self, gang: Gang, answers: Mapping[int, Sampled]) -> list[Update]:
        self._clear(gang.members[0])
        is_whole, updates = advance_beams(gang, answers, self.memory)
        if updates:
            self._finish(*gang.members)
        elif not is_whole:
            for seq in gang.members:
                self._preempt(seq)
        return updates

    def _settle(self, seq: TokenSequence, end: int, *, accepted: bool) -> None:
        if self.limits.causal:  # an end inside of a right draft leaves state of tokens that do not count
            self.memory.settle(seq, min(end, seq.num_tokens), accepted=accepted and end <= seq.num_tokens)
