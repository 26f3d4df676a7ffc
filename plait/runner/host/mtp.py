"""Multi-token prediction as a drafter: the model's own head, which goes on from its hidden states.

The head has keys and values of its own, at a place for each sequence, as a draft model has. What the model
made of each token is kept until the head computes it, so prompts cost it nothing before the first draft. It
sees no further back than what was kept then: behind cached prefixes, and after a pause, it begins anew. A
head for which a token of a prompt costs next to nothing has them all.
Nothing here needs torch: on a GPU, and where a head runs op by op, `runner.mtp_passes` has what is kept.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plait.runner.host.draft_memory import DraftMemory, without_logprobs
from plait.runner.host.mtp_passes import HeadPasses, HiddenRows, KeepingPasses
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import Chunk, SamplingRow, StepPlan

MOST_KEPT = 256  # hidden states of one sequence that wait for the head


class KeptRows(Protocol):
    """Hidden states that wait for the head, up to MOST_KEPT of each place."""

    def put(self, place: int, at: int, rows: HiddenRows) -> None:
        """Write rows from `at` on."""

    def drop(self, place: int, spare: int, count: int) -> None:
        """Of the first `count`, remove the first `spare`: the others move to the beginning."""

    def first(self, place: int, count: int) -> HiddenRows:
        """The first `count`, as the passes of the head take them."""


class HiddenOnHost:
    """Hidden states in host memory, float32, up to `most` of each place."""

    def __init__(self, places: int, size: int, most: int = MOST_KEPT) -> None:
        self._rows = np.empty((places, most, size), np.float32)

    def put(self, place: int, at: int, rows: HiddenRows) -> None:
        """See `KeptRows`."""
        self._rows[place, at : at + len(rows)] = np.asarray(rows)

    def drop(self, place: int, spare: int, count: int) -> None:
        """See `KeptRows`."""
        self._rows[place, : count - spare] = self._rows[place, spare:count].copy()

    def first(self, place: int, count: int) -> npt.NDArray[np.float32]:
        """See `KeptRows`."""
        return self._rows[place, :count]


@dataclass(slots=True)
class HeadPlace:
    """Where one sequence's state is: entries of positions base … done-1, hidden states of those from `at`.

    `count` of these are kept. `last`: the token behind position done-1, by which a sequence is known again.
    `proposal`: the draft that was made when the sequence had done + 1 tokens.
    """

    index: int
    base: int = 0
    done: int = 0
    at: int = 0
    count: int = 0
    last: int = -1
    proposal: tuple[int, ...] = ()
    wanted: int = 0  # draft tokens that were requested last

    def clear(self, position: int = 0) -> None:
        """Know nothing before this position."""
        self.base = self.done = self.at = position
        self.count, self.last, self.proposal = 0, -1, ()

    def is_about(self, token_ids: Sequence[int]) -> bool:
        """Whether the entries are those of a prefix of these tokens, judged by the last of them."""
        return self.done == self.base or (len(token_ids) > self.done and token_ids[self.done] == self.last)


class MtpDrafter:
    """Proposes drafts with a model's head. `kept`: memory for hidden states of each place.

    `observe` has to be called behind each step of the model. Sequences beyond the places get no drafts.
    Penalties and `min_tokens` are left out of the draws, as with a draft model.
    """

    def __init__(self, passes: HeadPasses, memory: DraftMemory, kept: KeptRows) -> None:
        self.passes, self.memory, self._kept = passes, memory, kept
        self._free = [HeadPlace(i) for i in reversed(range(memory.num_places))]
        self._places: OrderedDict[int, HeadPlace] = OrderedDict()  # by sequence, least recently drafted first
        self._error: Exception | None = None
        self._is_resting = False
        self._step = 0

    def observe(self, plan: StepPlan, hidden: HiddenRows) -> None:
        """hidden: [the plan's tokens or more, hidden]. A failure must not fail the step."""
        if self._is_resting or self._error is not None:
            return
        try:
            row = 0
            for chunk in plan.chunks:
                end = row + len(chunk.token_ids)
                if not chunk.num_pooled:  # what is pooled gives no reply
                    self._keep(chunk, hidden[row:end])
                row = end
        except Exception as error:
            self._error = error

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Drafts by sequence id. Raises EngineError if the head computes no numbers."""
        if self._error is not None:
            raise self._error
        found, work = dict[int, tuple[int, ...]](), list[tuple[DraftRequest, HeadPlace]]()
        left, longest = self.memory.max_step_len, max((one.limit for one in wanted), default=0)
        for one in wanted:
            place = self._places.get(one.seq_id)
            if place is None or one.limit < 1:
                continue
            self._places.move_to_end(one.seq_id)
            place.wanted = one.limit
            end = len(one.token_ids) - 1
            if place.done == end and place.proposal and place.is_about(one.token_ids):
                found[one.seq_id] = place.proposal[: one.limit]  # no step has checked it yet
            elif self._settle(place, one, end, longest) and end - place.done <= left:
                left -= end - place.done
                work.append((one, place))
        if work:
            found |= self._draft(work)
        return found

    @property
    def most(self) -> int:
        """Tokens of a draft, at most."""
        return self.passes.most

    @property
    def at_once(self) -> bool:
        """Whether one pass makes all of a draft."""
        return self.passes.at_once

    def place_of(self, seq_id: int) -> HeadPlace | None:
        """Where the state of a sequence is, if it has a place."""
        return self._places.get(seq_id)

    def rest(self, is_resting: bool) -> None:
        """Keep no hidden states, as there are no drafts for now; afterwards the head begins anew."""
        self._is_resting = is_resting

    def forget(self, seq_id: int) -> None:
        """Free the place of a sequence that has ended."""
        if place := self._places.pop(seq_id, None):
            self._free.append(place)

    def _keep(self, chunk: Chunk, rows: HiddenRows) -> None:
        """Keep what the model made of a chunk's tokens; what was kept of later ones was of other tokens."""
        place = self._places.get(chunk.seq_id) or self._take_place(chunk)
        if chunk.start > place.at + place.count:  # a prefix was cached
            place.clear(chunk.start)
        first = max(place.at - chunk.start, 0)  # computed again, and the head has them
        rows = rows[first:]
        if not len(rows):
            return
        count = chunk.start + first - place.at
        is_known = chunk.num_logits < 2 and chunk.token_ids[-1] >= 0  # of a draft some may be wrong
        if is_known and count + len(rows) > MOST_KEPT and isinstance(self.passes, KeepingPasses):
            self._store(place, chunk, count, rows)
            count, rows = 0, rows[-1:]
        if len(rows) >= MOST_KEPT:
            rows = rows[-MOST_KEPT:]
            place.at, count = chunk.end - MOST_KEPT, 0
        elif count + len(rows) > MOST_KEPT:
            spare = min(count, max(MOST_KEPT // 2, count + len(rows) - MOST_KEPT))
            self._kept.drop(place.index, spare, count)
            place.at, count = place.at + spare, count - spare
        place.count = count + len(rows)
        self._kept.put(place.index, count, rows)

    def _store(self, place: HeadPlace, chunk: Chunk, count: int, rows: HiddenRows) -> None:
        """Let the head keep what it need not wait for: the first `count` rows that were kept, and those of a
        chunk but for the last, behind which the token is not known."""
        assert isinstance(self.passes, KeepingPasses)
        if place.at != place.done or chunk.end - place.base > self.memory.max_len:
            place.base = place.done = place.at
        pieces = [self._kept.first(place.index, count)] if count else []
        pieces += [rows[i : i + MOST_KEPT] for i in range(0, len(rows) - 1, MOST_KEPT)]
        for piece in pieces:
            size = min(len(piece), chunk.end - 1 - place.done)
            start = place.done - place.base
            tables = self.memory.tables(place.index, start, start + size)
            own = Chunk(chunk.seq_id, start, (0,) * size, tables, 0, 0)
            self.passes.keep(StepPlan(self._step, (own,)), [piece[:size]])
            place.done = place.at = place.done + size
        place.count, place.last, place.proposal = 0, chunk.token_ids[-1], ()

    def _take_place(self, chunk: Chunk) -> HeadPlace:
        """A place for a sequence that has none: a free one, or that of the one without drafts for longest."""
        if not self._free:
            self.forget(next(iter(self._places)))
        place = self._places[chunk.seq_id] = self._free.pop()
        place.clear(chunk.start)
        return place

    def _settle(self, place: HeadPlace, one: DraftRequest, end: int, longest: int) -> bool:
        """Make the place one of a prefix of these tokens; False: what the head has to read is not known.

        longest: draft tokens of the passes, which all sequences take part in.
        """
        if not place.is_about(one.token_ids):
            place.clear(end)
            return False
        needed = end + min(longest, self.most) + self.passes.ahead
        if place.at != place.done or needed - place.base > self.memory.max_len:
            place.base = place.done = place.at
        if needed - place.base > self.memory.max_len:  # its own limit is less than that of another
            return False
        return place.done < end <= place.at + place.count

    def _draft(self, work: list[tuple[DraftRequest, HeadPlace]]) -> dict[int, tuple[int, ...]]:
        """One pass over what is new of all sequences, then passes of one token each."""
        work.sort(key=lambda each: len(each[0].token_ids) - each[1].done > 2 or each[1].done == each[1].base)
        length = min(max(one.limit for one, _ in work), self.most)
        self._step += 1
        chunks, rows = [], []
        for one, place in work:
            end = len(one.token_ids) - 1
            tokens = tuple(one.token_ids[place.done + 1 :])
            start = place.done - place.base
            tables = self.memory.tables(place.index, start, end - place.base + length + self.passes.ahead)
            chunks.append(Chunk(one.seq_id, start, tokens, tables, 0, 1))
            rows.append(self._kept.first(place.index, len(tokens)))
        sampling = [
            SamplingRow(without_logprobs(one.params), 1, 1, len(one.token_ids), one.seed) for one, _ in work
        ]
        try:
            drafts = self.passes.run(StepPlan(self._step, tuple(chunks)), rows, sampling, length)
        except BaseException:
            for _, place in work:  # half a pass may have run
                place.clear()
            raise
        found = {}
        for (one, place), draft in zip(work, drafts, strict=True):
            end = len(one.token_ids) - 1
            used = end - place.done
            if used < place.count:  # only of tokens that were drafted and rejected
                place.count = used
            place.at, place.count, place.done = end, 0, end
            place.last, place.proposal = one.token_ids[end], draft
            found[one.seq_id] = draft[: one.limit]
        return found
