"""Who runs next: first come, first served, decodes before prompts, within a budget of tokens per step.

Deterministic, and has never heard of a tensor. A sequence that no longer fits gives its memory back and is
computed again later (preemption by recomputation), the latest arrival first, so the earliest always proceeds.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from plait.errors import CapacityError, ContextTooLong, EngineError, QueueFull
from plait.request import FinishReason, TokenLogprobs
from plait.schedule.allocation import Allocation
from plait.schedule.plan import Chunk, Plan, Sampled, SamplingBatch
from plait.schedule.sequence import Phase, Update, num_computed
from plait.schedule.sequence import Sequence as TokenSequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What the scheduler may do in one step and at one time, in the words of `EngineConfig`.

    `causal` False: earlier outputs change as tokens are appended, so every step computes a whole sequence.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_waiting: int
    max_model_len: int
    causal: bool = True


class Scheduler:
    """Owns the sequences and their memory. `plan()`, run it, `commit()`; in between, `cancel()` at any time.

    Every waiting sequence arrived after every running one. While there are *suspects* (sequences of a step
    that failed, see `isolate`), they run alone, one after the other.
    """

    def __init__(self, limits: Limits, memory: Allocation) -> None:
        self.limits, self.memory = limits, memory
        self.waiting: list[TokenSequence] = []  # by arrival
        self.running: list[TokenSequence] = []  # by arrival
        self.num_preemptions = 0
        self._by_id: dict[int, TokenSequence] = {}
        self._suspects: list[TokenSequence] = []
        self._step = self._arrivals = 0

    def add(self, *sequences: TokenSequence) -> None:
        """Let these sequences (the choices of one request) wait for their turn: all of them or none.

        Raises ContextTooLong or CapacityError if one can never fit, QueueFull if too many requests wait.
        """
        for seq in sequences:
            self.check_fits(seq.prompt_len, seq.max_len)
        if not self.has_room():
            raise QueueFull(
                f"{self.num_waiting_requests} requests are waiting and max_waiting is "
                f"{self.limits.max_waiting}; try again later"
            )
        for seq in sequences:
            seq.arrival, self._arrivals = self._arrivals, self._arrivals + 1
            self._by_id[seq.id] = seq
            self.waiting.append(seq)

    def check_fits(self, prompt_len: int, max_len: int) -> None:
        """Raises ContextTooLong or CapacityError if a sequence could not finish even alone."""
        limits, length = self.limits, num_computed(prompt_len, max_len)
        longest = limits.max_model_len
        if not limits.causal:
            longest = min(longest, limits.max_num_batched_tokens)
        if prompt_len > longest:
            why = "" if longest == limits.max_model_len else " (this model computes a sequence in one piece)"
            raise ContextTooLong(
                f"the prompt has {prompt_len} tokens and the longest sequence is {longest}{why}", "prompt"
            )
        if length > longest:
            raise ContextTooLong(
                f"{length} tokens would be computed and the longest sequence is {longest}; ask for fewer",
                "max_tokens",
            )
        if short := self.memory.shortage(length):
            raise CapacityError(
                f"a sequence of {length} tokens needs {short[0]} blocks and there are {short[1]}; send a "
                "shorter prompt, ask for fewer tokens, or start with a larger --memory-limit"
            )

    def has_room(self, arriving: int = 0) -> bool:
        """Whether one more request may wait, when `arriving` others are on their way."""
        free_places = max(self.limits.max_num_seqs - len(self.running), 0)
        return self.num_waiting_requests + arriving < self.limits.max_waiting + free_places

    def cancel(self, seq_id: int) -> None:
        """Forget a sequence and take back what it holds. Unknown and finished ones are nobody's."""
        if seq := self._by_id.get(seq_id):
            self._finish(seq)

    def plan(self) -> Plan | None:
        """The next step, or None if there is nothing to do."""
        if (suspect := self._next_suspect()) is not None:
            shares = {suspect.id: self._share(suspect, self.limits.max_num_batched_tokens)}
        else:
            shares = self._shares()
        self._reserve(shares)
        if suspect is None:
            self._admit_waiting(shares)
        chunks = [self._chunk(seq, shares[seq.id]) for seq in self.running if shares.get(seq.id)]
        if not chunks:
            return None
        chunks.sort(key=lambda c: not (len(c.token_ids) == 1 and c.start > 0))  # stable: by arrival within
        fresh = tuple(c.slot for c in chunks if c.start == 0 and c.slot)
        self._step += 1
        return Plan(self._step, tuple(chunks), fresh=fresh)

    def sampling(self, plan: Plan) -> SamplingBatch:
        """What the sampler must know about a plan that was just made."""
        chunks = (c for c in plan.chunks if c.num_logits)
        return SamplingBatch(tuple(self._by_id[c.seq_id].sampling_row(c.start, c.end) for c in chunks))

    def commit(self, plan: Plan, sampled: Sequence[Sampled]) -> list[Update]:
        """Advance the sequences of a plan that has run; those cancelled since are left out.

        `sampled`: one entry per chunk with logits, in order. Raises EngineError, changing nothing, if not.
        """
        answers = self._answers(plan, sampled)
        updates = []
        for chunk in plan.chunks:
            if (seq := self._by_id.get(chunk.seq_id)) is None:
                continue
            if self.limits.causal:
                seq.num_computed_tokens = chunk.end
                self.memory.trim(seq)
            if (answer := answers.get(seq.id)) and (update := self._advance(seq, chunk, answer)):
                updates.append(update)
        return updates

    def isolate(self) -> None:
        """After a failed step no state can be trusted: what ran is computed again, alone at first."""
        suspects = sorted({s.id: s for s in [*self._suspects, *self.running]}.values(), key=_arrival)
        for seq in [*self.running]:
            self._preempt(seq)
        self._suspects = suspects

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def num_waiting_requests(self) -> int:
        return len({seq.request_id for seq in self.waiting})

    def stats(self) -> Mapping[str, int]:
        """Sequences running and waiting, blocks (of all groups) and slots free and in all, preemptions."""
        pools, slots = self.memory.pools, self.memory.slots
        return {
            "num_running": len(self.running),
            "num_waiting": len(self.waiting),
            "num_blocks": sum(max(pool.num_blocks - 1, 0) for pool in pools),
            "num_free_blocks": sum(pool.num_free for pool in pools),
            "num_slots": slots.num_slots - 1 if slots else 0,
            "num_free_slots": slots.num_free if slots else 0,
            "num_preemptions": self.num_preemptions,
        }

    def check(self) -> None:
        """The invariants; AssertionError tells which one is broken."""
        self.memory.check(self.running)
        arrivals = [seq.arrival for seq in [*self.running, *self.waiting]]
        assert arrivals == sorted(set(arrivals)), "somebody was overtaken"
        assert {seq.id for seq in [*self.running, *self.waiting]} == set(self._by_id)
        assert len(self.running) <= self.limits.max_num_seqs
        assert all(seq.phase is Phase.RUNNING and seq.num_left > 0 for seq in self.running)
        assert all(seq.phase is Phase.WAITING and not seq.num_computed_tokens for seq in self.waiting)
        assert all(seq.id in self._by_id for seq in self._suspects)

    def _share(self, seq: TokenSequence, budget: int) -> int:
        """Tokens of `seq` that this step computes."""
        if self.limits.causal:
            return min(seq.num_left, budget)
        return seq.num_tokens if seq.num_tokens <= budget else 0

    def _shares(self) -> dict[int, int]:
        """Tokens per running sequence: one for every decode, the rest to prompts by arrival."""
        shares = {seq.id: 1 for seq in self.running if not seq.is_prefilling}
        budget = self.limits.max_num_batched_tokens - len(shares)
        for seq in self.running:
            if seq.is_prefilling:
                shares[seq.id] = self._share(seq, budget)
                budget -= shares[seq.id]
        return shares

    def _reserve(self, shares: dict[int, int]) -> None:
        """Blocks for every share, by arrival; the latest arrivals are preempted until it fits."""
        for seq in [*self.running]:
            if not shares.get(seq.id):
                continue
            while seq.phase is Phase.RUNNING and not self._reserve_one(seq, shares[seq.id]):
                victim = self.running[-1]
                shares.pop(victim.id, None)
                self._preempt(victim)

    def _reserve_one(self, seq: TokenSequence, share: int) -> bool:
        return self.memory.reserve(seq, seq.num_computed_tokens + share)

    def _admit_waiting(self, shares: dict[int, int]) -> None:
        budget = self.limits.max_num_batched_tokens - sum(shares.values())
        while self.waiting and self.waiting[0] not in self._suspects:
            seq = self.waiting[0]
            share = self._share(seq, budget)
            if not share or not self._admit(seq):
                return
            assert self._reserve_one(seq, share), "an admitted sequence did not fit"
            shares[seq.id] = share
            budget -= share

    def _admit(self, seq: TokenSequence) -> bool:
        """Start the first waiting sequence if it can have a place and memory for all its known tokens."""
        full = len(self.running) >= self.limits.max_num_seqs
        if full or not self.memory.can_hold(seq, self.running):
            return False
        self.waiting.remove(seq)
        self.memory.open(seq)
        seq.phase = Phase.RUNNING
        self.running.append(seq)
        return True

    def _next_suspect(self) -> TokenSequence | None:
        """The suspect that must run alone now; None also when it has to wait for memory."""
        if not self._suspects:
            return None
        suspect = self._suspects[0]
        if suspect.phase is Phase.RUNNING or (suspect is self.waiting[0] and self._admit(suspect)):
            return suspect
        return None

    def _chunk(self, seq: TokenSequence, share: int) -> Chunk:
        start = seq.num_computed_tokens
        end = start + share
        return Chunk(
            seq_id=seq.id,
            start=start,
            token_ids=tuple(seq.token_ids[start:end]),
            blocks=tuple(tuple(table) for table in seq.tables),
            slot=seq.slot,
            num_logits=seq.num_logits(start, end),
        )

    def _answers(self, plan: Plan, sampled: Sequence[Sampled]) -> dict[int, Sampled]:
        """What was sampled by sequence; every sequence that has caught up must have its token."""
        chunks = [c for c in plan.chunks if c.num_logits]
        if len(chunks) != len(sampled):
            raise EngineError(
                f"step {plan.step}: {len(sampled)} answers for {len(chunks)} chunks with logits"
            )
        for chunk, answer in zip(chunks, sampled, strict=True):
            seq = self._by_id.get(chunk.seq_id)
            if seq and seq.samples_after(chunk.end) and not answer.token_ids:
                raise EngineError(f"step {plan.step}: nothing was sampled for {seq.request_id}[{seq.index}]")
        return {c.seq_id: s for c, s in zip(chunks, sampled, strict=True)}

    def _advance(self, seq: TokenSequence, chunk: Chunk, answer: Sampled) -> Update | None:
        scoring = seq.wants_prompt_logprobs and seq.num_output_tokens == 0
        seq.scored.extend(answer.prompt_logprobs)
        if chunk.end < seq.num_tokens:
            return None
        if seq in self._suspects:
            self._suspects.remove(seq)
        prompt_logprobs = tuple(seq.scored) if scoring else None
        if seq.max_len <= seq.prompt_len:
            return self._update(seq, None, prompt_logprobs, "length")
        if seq.stops_at(answer.token_ids[0]):
            return self._update(seq, answer, prompt_logprobs, "stop")
        seq.token_ids.append(answer.token_ids[0])
        reason: FinishReason | None = "length" if seq.num_tokens >= seq.max_len else None
        return self._update(seq, answer, prompt_logprobs, reason)

    def _update(
        self,
        seq: TokenSequence,
        answer: Sampled | None,
        prompt_logprobs: tuple[TokenLogprobs, ...] | None,
        reason: FinishReason | None,
    ) -> Update:
        if reason is not None:
            self._finish(seq)
        token_id = answer.token_ids[0] if answer else None
        stopped = reason == "stop"
        shown = answer is not None and not stopped
        return Update(
            seq_id=seq.id,
            request_id=seq.request_id,
            index=seq.index,
            token_ids=(token_id,) if shown and token_id is not None else (),
            logprobs=answer.logprobs if shown and answer else None,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            stop_token_id=token_id if stopped else None,
        )

    def _preempt(self, seq: TokenSequence) -> None:
        """Take a running sequence's memory; it waits, before everyone who came later."""
        self.running.remove(seq)
        self.memory.release(seq)
        seq.num_computed_tokens, seq.phase = 0, Phase.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        insort(self.waiting, seq, key=_arrival)

    def _finish(self, seq: TokenSequence) -> None:
        for some in (self.running, self.waiting, self._suspects):
            if seq in some:
                some.remove(seq)
        self.memory.release(seq)
        seq.phase = Phase.FINISHED
        del self._by_id[seq.id]


def _arrival(seq: TokenSequence) -> int:
    return seq.arrival
