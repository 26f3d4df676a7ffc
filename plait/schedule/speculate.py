"""Speculative decoding: proposes draft tokens, and chooses how many pay. It never changes the text.

A draft token is checked by the same draw that would have made the token, so a wrong one costs only time.
This is the method of Leviathan, Kalman and Matias 2023, with common random numbers in place of rejection.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from msgspec import Struct, field

from plait.schedule.costs import NUM_BELIEVED, NUM_REMEMBERED, StepCosts, median
from plait.schedule.drafts.governor import DraftGovernor
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.sequence import MOST_REPLAYED, TokenSequence

log = logging.getLogger("plait")
MODEST = 2  # draft tokens while nothing is known about costs
PROBE = 4  # draft tokens of a probe, which finds out whether drafts would pay by now
FIRST_PAUSE, LONGEST_PAUSE = 32, 512  # tokens between two such probes
DECAY, OVERALL_DECAY = 0.94, 0.99  # of what is known about acceptance, for each draft token that was checked
TRUST = 4.0  # draft tokens that the acceptance of all sequences counts for in a new one
CONVINCED = 0.9  # acceptance at which another probe in a row would show nothing new
STUBBORN = 16  # of so many probes that cannot pay one is made all the same
FEW = 2  # sequences: of more, those without a draft lose more than one brings by being in single steps
LIKELY = 7.0, 8.0  # accepted and checked, of drafts that a proposer is sure of, before one was made
COMPLETE = ("stop", "length")  # why a reply ended, if it is to be drafted from
FREE = 0.02  # share of a step's time below which a draft token counts as free
GAIN = 1.02  # factor in tokens per second that drafts must bring at least
PATIENCE = 8  # draft tokens that are still considered when one more did not help


class Proposer(Protocol):
    """Proposes draft tokens by sequence id; a sequence without a draft may be left out."""

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]: ...
    def forget(self, seq_id: int) -> None: ...


@runtime_checkable
class ModelProposer(Proposer, Protocol):
    """One that computes. `most`: tokens of a draft; `at_once`: whether it makes all of one in one pass."""

    at_once: bool
    most: int


@runtime_checkable
class MatchingProposer(Proposer, Protocol):
    """One that drafts from text that there was, and knows how much of it was the same so far."""

    def is_sure(self, one: DraftRequest) -> bool: ...
    def keep(self, salt: str, reply: Sequence[int]) -> None: ...


class _Record(Struct):
    """How drafts for one sequence fared: fading counts of tokens that were accepted and checked.

    `pause`: tokens until the next probe; `due`: the sequence's length then, None while drafts pay.
    """

    accepted: float
    checked: float
    pause: int = FIRST_PAUSE
    due: int | None = 0
    is_probing: bool = False

    @property
    def acceptance(self) -> float:
        return self.accepted / self.checked

    def observe(self, drafted: int, accepted: int, decay: float) -> None:
        checked = accepted + (accepted < drafted)  # what follows the first wrong token was never compared
        self.accepted = self.accepted * decay**checked + accepted
        self.checked = self.checked * decay**checked + checked


class _Candidate(Struct):
    """One sequence while draft lengths are being chosen; `limit`: the longest draft it can use."""

    seq: TokenSequence
    record: _Record
    limit: int
    length: int = 0

    def request(self, length: int) -> DraftRequest:
        """Requests a draft of this length."""
        seq = self.seq
        return DraftRequest(seq.id, seq.token_ids, length, seq.params, seq.seed, seq.cache_salt)

    def outlook(self, length: int, *, replays: bool) -> _Outlook:
        """What a draft of this length brings and costs in a step.

        In a model that replays, a step also computes again what came since the last draft that was right.
        """
        a = self.record.acceptance
        every = a**length  # all of it is accepted
        tokens = length + 1.0 if a >= 1 else (1 - a ** (length + 1)) / (1 - a)
        if not replays or every >= 1:
            return _Outlook(tokens, 1.0 + length, float(length))
        missed = tokens - every * (1 + length)  # tokens of a draft that was not right, times their share
        again = min(1 + missed / max(every, 1e-6), float(MOST_REPLAYED))
        return _Outlook(tokens, again + length, float(length))


class _Outlook(Struct, frozen=True):
    """Expected tokens that a sequence gets in a step, rows that it computes, draft tokens it is given.

    Of a whole step: the sums, but the longest draft, because all drafts are made side by side.
    """

    tokens: float
    rows: float
    drafted: float

    def exchange(self, old: _Outlook, new: _Outlook) -> _Outlook:
        """This step, with one sequence's share replaced by a longer one."""
        tokens, rows = self.tokens + new.tokens - old.tokens, self.rows + new.rows - old.rows
        return _Outlook(tokens, rows, max(self.drafted, new.drafted))


class Speculation(Struct):
    """Chooses each sequence's draft length before each step, for the most tokens per second.

    `replays`: after a partial acceptance the accepted tokens are computed again (models with slots). Where
    drafts do not pay there are none, but for a probe now and then, after pauses that double. A proposer that
    raises is not called again: replies go on without drafts, and `error` is the cause.

    The `governor` has the last word: it compares what tokens really cost with drafts and without. `is_even`:
    it also chooses the length, the same for all sequences (a head is about as often right in all of them).
    Up to FEW sequences have drafts that their proposer is sure of all the same, but while costs are compared.
    `keeps_replies`: later sequences may be drafted from replies that are complete.
    """

    proposer: Proposer
    costs: StepCosts
    num_draft_tokens: int
    replays: bool = False
    clock: Callable[[], float] = time.perf_counter
    spent: Callable[[], float] = time.perf_counter  # seconds, for the governor
    on_rest: Callable[[bool], None] = field(default=lambda is_resting: None)
    governor: DraftGovernor | None = None
    is_even: bool = False
    keeps_replies: bool = True
    is_resting: bool = False  # whether there are no drafts for now: steps may be planned ahead
    error: Exception | None = None
    num_drafted: int = 0
    num_accepted: int = 0
    _num_put_off: int = 0
    _is_measuring: bool = False
    _count: int = 0  # sequences that could have drafts in the last plan: the load that the governor chose for
    _matching: MatchingProposer | None = None  # the proposer, if it is one
    _records: dict[int, _Record] = field(default_factory=dict)
    _overall: _Record = field(default_factory=lambda: _Record(4.0, 8.0))
    _sure: dict[int, _Record] = field(default_factory=dict)  # of drafts that the proposer is sure of
    _sure_ids: set[int] = field(default_factory=set)  # sequences that had one in the last plan
    _proposing: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_REMEMBERED))  # s per token

    def __post_init__(self) -> None:
        if isinstance(self.proposer, MatchingProposer):
            self._matching = self.proposer

    def drafts(self, sequences: Sequence[TokenSequence], num_rows: int) -> Mapping[int, tuple[int, ...]]:
        """Drafts by sequence id for a step that computes `num_rows` tokens without them.

        `sequences`: those that have one token each of these rows, and that can take drafts.
        """
        count = self._count = len(sequences)
        most = self.governor.choose(count) if self.governor else self.num_draft_tokens
        self._is_measuring = self.governor is not None and self.governor.is_measuring(count)
        self._sure_ids = set()
        if self.is_resting != (is_resting := most == 0 or self.error is not None):
            self.is_resting = is_resting
            self.on_rest(is_resting)
        if is_resting:
            return self._propose_sure(sequences, num_rows)
        candidates = [candidate for seq in sequences if (candidate := self._candidate(seq))]
        if self.is_even:
            return self._propose([candidate.request(min(most, candidate.limit)) for candidate in candidates])
        # Of the whole step: every sequence brings a token, every row is computed, there are no drafts.
        plain = _Outlook(float(len(sequences)), float(num_rows), 0.0)
        self._choose(candidates, plain)
        if due := [candidate for candidate in candidates if _is_due(candidate)]:
            self._probe(due, candidates, plain)
        found = self._propose([one.request(one.length) for one in candidates if one.length])
        for candidate in candidates:
            if found.get(candidate.seq.id) and candidate.record.is_probing:
                # As if the probe were to fail; `observe` corrects this if it does not.
                candidate.record.due = candidate.seq.num_tokens + candidate.record.pause
                candidate.record.pause = min(2 * candidate.record.pause, LONGEST_PAUSE)
        return found

    def rests(self, drafting: Sequence[TokenSequence]) -> bool:
        """Whether the next plan has no drafts, like the last one, and no guide forces tokens in it.

        drafting: the sequences that could have some. The governor's choice is that of so many: others in the
        plan, of which a prompt is computed, do not count.
        """
        count = self._count = len(drafting)
        if not drafting:
            return True
        if not self.is_resting or self.governor is None or self.governor.choose(count):
            return False
        self._is_measuring = self.governor.is_measuring(count)
        return all(seq.guide is None for seq in drafting) and not self._list_sure(drafting)

    def observe(self, seq_id: int, drafted: int, accepted: int) -> None:
        """Record that a step checked `drafted` tokens of a sequence's draft and accepted `accepted`."""
        self.num_drafted += drafted
        self.num_accepted += accepted
        self._overall.observe(drafted, accepted, OVERALL_DECAY)
        if seq_id in self._sure_ids:
            self._sure[seq_id].observe(drafted, accepted, DECAY)
        if (record := self._records.get(seq_id)) is None:
            return
        record.observe(drafted, accepted, DECAY)
        if record.is_probing and accepted == drafted and record.acceptance < CONVINCED:
            record.due = 0

    def begin(self) -> float | None:
        """When a plan's work begins, for `charge`; None: what the last one cost need not be measured."""
        return self.spent() if self._is_measuring else None

    def charge(self, num_tokens: int, began: float | None) -> None:
        """Record what the last plan cost for its tokens, all of the engine's work included."""
        if self.governor and self._count:
            seconds = None if began is None else self.spent() - began
            self.governor.charge(self._count, num_tokens, seconds)

    def is_comparing(self, drafts: Mapping[int, tuple[int, ...]]) -> bool:
        """Whether the governor compares what plans with these drafts cost with those without."""
        return bool(drafts) and self.governor is not None and self.governor.is_comparing(self._count)

    def forget(self, seq: TokenSequence, reason: str | None) -> None:
        """Forget a sequence that has ended. If it is complete, later ones may be drafted from its reply, and
        from what was computed behind a stop string."""
        self._records.pop(seq.id, None)
        self._sure.pop(seq.id, None)
        self._sure_ids.discard(seq.id)
        self.proposer.forget(seq.id)
        if reason in COMPLETE and self.keeps_replies and self._matching and self.error is None:
            self._matching.keep(seq.cache_salt, seq.token_ids[seq.prompt_len :])

    def _list_sure(self, sequences: Sequence[TokenSequence]) -> list[_Candidate]:
        """The sequences that may have drafts though there are none for now."""
        if self._matching is None or self._is_measuring or self.error is not None or len(sequences) > FEW:
            return []
        found = list[_Candidate]()
        try:
            for seq in sequences:
                candidate = self._candidate(seq) if seq.guide is None else None
                if candidate is None or not self._matching.is_sure(candidate.request(candidate.limit)):
                    continue
                record = candidate.record = self._sure.setdefault(seq.id, _Record(*LIKELY, due=None))
                if record.due is None or seq.num_tokens >= record.due:
                    found.append(candidate)
        except Exception as error:
            self._end_with(error)
            return []
        return found

    def _propose_sure(self, sequences: Sequence[TokenSequence], num_rows: int) -> dict[int, tuple[int, ...]]:
        """Drafts of which the proposer is sure, as long as they pay. What does not is tried later again."""
        chosen = self._list_sure(sequences)
        self._choose(chosen, _Outlook(float(len(sequences)), float(num_rows), 0.0))
        for one in chosen:
            if not one.length:
                one.record.due = one.seq.num_tokens + one.record.pause
                one.record.pause = min(2 * one.record.pause, LONGEST_PAUSE)
                one.record.accepted, one.record.checked = LIKELY
        found = self._propose([one.request(one.length) for one in chosen if one.length])
        self._sure_ids = {*found}
        return found

    def _candidate(self, seq: TokenSequence) -> _Candidate | None:
        """The sequence as a candidate; None if it needs only one more token, which a step brings anyway."""
        limit = min(self.num_draft_tokens, seq.max_len - seq.num_tokens - 1)
        if limit < 1:
            return None
        new = _Record(TRUST * self._overall.acceptance, TRUST)
        return _Candidate(seq, self._records.setdefault(seq.id, new), limit)

    def _choose(self, candidates: Sequence[_Candidate], plain: _Outlook) -> None:
        """Set every candidate's length to what gives the most tokens per second; 0: no draft pays."""
        knows = self.costs.step_s(1) is not None
        longest = self.num_draft_tokens if knows else MODEST
        worth = self._tokens_per_s(plain) * GAIN
        best, lengths = worth, [0] * len(candidates)
        # Draft tokens that cost a pass each are made for all sequences side by side, so each gets as many.
        # Free ones go to the most promising sequences.
        is_free = self._draft_token_s() < FREE * (self.costs.step_s(plain.rows) or 0.0)
        for most in [longest] if is_free or not knows else range(1, longest + 1):
            found, value = self._most_promising(candidates, plain, most)
            if value <= best and best > worth:
                break
            if value > best:
                best, lengths = value, found
        for candidate, length in zip(candidates, lengths, strict=True):
            candidate.length = length

    def _most_promising(
        self, candidates: Sequence[_Candidate], plain: _Outlook, most: int
    ) -> tuple[list[int], float]:
        """(lengths up to `most`, tokens per second): adds draft tokens, the surest first, while it helps."""
        now = [c.outlook(0, replays=self.replays) for c in candidates]
        step, best, waited = plain, 0.0, 0
        lengths, tried = [0] * len(candidates), [0] * len(candidates)
        for i in _by_promise(candidates, most):
            tried[i] += 1
            longer = candidates[i].outlook(tried[i], replays=self.replays)
            step, now[i] = step.exchange(now[i], longer), longer
            value = self._tokens_per_s(step)
            waited += 1
            if value > best:
                best, lengths, waited = value, [*tried], 0
            elif waited >= max(PATIENCE, len(candidates)):
                break
        return lengths, best

    def _probe(self, due: Sequence[_Candidate], candidates: Sequence[_Candidate], plain: _Outlook) -> None:
        """Give the sequences in `due` a short draft, unless no acceptance could be high enough to pay."""
        if not self._could_pay(candidates, plain):
            self._num_put_off += 1
            if self._num_put_off % STUBBORN:  # the time that drafts take may have been measured wrong
                for candidate in due:
                    candidate.record.due = candidate.seq.num_tokens + LONGEST_PAUSE
                return
        for candidate in due:
            candidate.record.is_probing = True
            candidate.length = min(PROBE, candidate.limit)

    def _could_pay(self, candidates: Sequence[_Candidate], plain: _Outlook) -> bool:
        """Whether drafts would pay if all were accepted, for one of these sequences or for all of them."""
        if 0 < len(self._proposing) < NUM_BELIEVED:
            return True
        best = self._tokens_per_s(plain) * GAIN
        added = (
            _Outlook(plain.tokens + n * length, plain.rows + n * length, float(length))
            for n in (1, len(candidates))
            for length in range(1, self.num_draft_tokens + 1)
        )
        return any(self._tokens_per_s(step) > best for step in added)

    def _tokens_per_s(self, step: _Outlook) -> float:
        """Tokens of all sequences by the time of a step; without measured costs in an arbitrary unit."""
        seconds = self.costs.step_s(step.rows)
        if seconds is None:
            return step.tokens / StepCosts.assume(step.rows)
        return step.tokens / (seconds + self._draft_token_s() * step.drafted)

    def _draft_token_s(self) -> float:
        """Seconds that one draft token takes, for all sequences side by side."""
        return median(self._proposing) if self._proposing else 0.0

    def _end_with(self, error: Exception) -> None:
        self.error = error
        text = f"{type(error).__name__}: {error}"
        log.warning("speculation is off from now on, replies go on without it: %s", text)

    def _propose(self, wanted: Sequence[DraftRequest]) -> dict[int, tuple[int, ...]]:
        if not wanted:
            return {}
        started = self.clock()
        try:
            found = self.proposer.propose(wanted)
        except Exception as error:
            self._end_with(error)
            return {}
        drafts = {w.seq_id: tuple(found.get(w.seq_id, ())[: w.limit]) for w in wanted}
        if longest := max(map(len, drafts.values())):
            self._proposing.append((self.clock() - started) / longest)
        return {seq_id: draft for seq_id, draft in drafts.items() if draft}


def _by_promise(candidates: Sequence[_Candidate], most: int) -> Iterator[int]:
    """Indexes of candidates, one for each draft token that could be added, by the chance that it is right."""
    heap = [(-c.record.acceptance, i, 1) for i, c in enumerate(candidates)]
    heapq.heapify(heap)
    while heap:
        chance, i, length = heapq.heappop(heap)
        yield i
        if length < min(candidates[i].limit, most):
            heapq.heappush(heap, (chance * candidates[i].record.acceptance, i, length + 1))


def _is_due(candidate: _Candidate) -> bool:
    """Whether it is time for a probe of this sequence. Records first whether drafts pay for it."""
    record = candidate.record
    record.is_probing = False
    if candidate.length:
        record.due, record.pause = None, FIRST_PAUSE
    elif record.due is None:
        record.due = candidate.seq.num_tokens + record.pause
    return record.due is not None and candidate.seq.num_tokens >= record.due
