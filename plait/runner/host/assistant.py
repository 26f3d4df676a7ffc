"""Drafts of a head without keys and values of its own: it reads those of the model, where they lie.

Of each sequence the last chunk is kept: its block tables, and what the model made of its last tokens. Which
of these was the last right one is known when a draft is requested. By then the blocks may be another's: the
sequence may have been preempted, or its window have moved on. A table is of the store's own blocks all the
same, and they are only read. So such a draft is wrong at worst, and the model checks it like any other.
Nothing here needs torch: `runner.mtp_passes` has what runs op by op.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from plait.runner.host.draft_memory import without_logprobs
from plait.runner.host.mtp import KeptRows, MtpDrafter
from plait.runner.host.mtp_passes import HeadPasses, HiddenRows
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import MOST_STEPS, Chunk, SamplingRow, StepPlan, Table

MOST_SEEN = 2 * MOST_STEPS  # rows of a chunk: a draft's and one more


@dataclass(slots=True)
class _Seen:
    """A sequence's last chunk. `index`: where its rows are; `start`: the position of the first that is kept;
    `token_ids`: of these rows."""

    index: int
    start: int = 0
    token_ids: tuple[int, ...] = ()
    tables: tuple[Table, ...] = ()

    def find(self, token_ids: Sequence[int]) -> int | None:
        """The row of the token before the last; None: it is not there."""
        row = len(token_ids) - 2 - self.start
        is_there = 0 <= row < len(self.token_ids) and self.token_ids[row] == token_ids[-2]
        return row if is_there else None


class AssistantDrafter:
    """Proposes drafts for at most `num_places` sequences. `make`: passes over a model's store, and memory for
    hidden states of each place.

    `begin` has to be called before the first step, and `observe` behind each step of the model. Penalties
    and `min_tokens` are left out of the draws, as with a draft model.
    """

    at_once = False

    def __init__(self, num_places: int, make: Callable[[object], tuple[HeadPasses, KeptRows]]) -> None:
        self._make = make
        self._made: tuple[HeadPasses, KeptRows] | None = None
        self._free = list(range(num_places))
        self._seen: OrderedDict[int, _Seen] = OrderedDict()  # by sequence, least recently drafted first
        self._error: Exception | None = None
        self._is_resting = False
        self._step = 0

    @property
    def passes(self) -> HeadPasses:
        """Of the head."""
        assert self._made is not None
        return self._made[0]

    @property
    def most(self) -> int:
        """Tokens of a draft, at most."""
        return MOST_STEPS

    def begin(self, store: object) -> None:
        """Read the memory of this model from now on. Raises OutOfMemory."""
        self._made = self._make(store)

    def observe(self, plan: StepPlan, hidden: HiddenRows) -> None:
        """hidden: [the plan's tokens or more, hidden]. A failure must not fail the step."""
        if self._is_resting or self._error is not None:
            return
        try:
            end = 0
            for chunk in plan.chunks:
                end += len(chunk.token_ids)
                if chunk.num_logits and not chunk.num_pooled:  # a token follows
                    count = min(len(chunk.token_ids), MOST_SEEN)
                    self._keep(chunk, hidden[end - count : end])
        except Exception as error:
            self._error = error

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        """Drafts by sequence id. Raises EngineError if the head computes no numbers."""
        if self._error is not None:
            raise self._error
        work = list[tuple[DraftRequest, _Seen, int]]()
        for one in wanted:
            seen = self._seen.get(one.seq_id)
            if seen is None or one.limit < 1:
                continue
            self._seen.move_to_end(one.seq_id)
            if (row := seen.find(one.token_ids)) is not None:
                work.append((one, seen, row))
        return self._draft(work) if work else {}

    def rest(self, is_resting: bool) -> None:
        """Keep nothing, as there are no drafts for now."""
        self._is_resting = is_resting

    def forget(self, seq_id: int) -> None:
        """Free the place of a sequence that has ended."""
        if seen := self._seen.pop(seq_id, None):
            self._free.append(seen.index)

    def _keep(self, chunk: Chunk, rows: HiddenRows) -> None:
        """Keep what is known behind a chunk, in place of what was known before."""
        assert self._made is not None
        seen = self._seen.get(chunk.seq_id)
        if seen is None:
            if not self._free:
                self.forget(next(iter(self._seen)))
            seen = self._seen[chunk.seq_id] = _Seen(self._free.pop())
        self._made[1].put(seen.index, 0, rows)
        seen.start, seen.token_ids = chunk.end - len(rows), chunk.token_ids[-len(rows) :]
        seen.tables = chunk.blocks

    def _draft(self, work: list[tuple[DraftRequest, _Seen, int]]) -> dict[int, tuple[int, ...]]:
        """Passes of one token of each sequence, all of them in the place of the token before the last."""
        assert self._made is not None
        work.sort(key=lambda each: len(each[0].token_ids) == 2)  # tokens with history come first
        length = min(max(one.limit for one, _, _ in work), MOST_STEPS)
        self._step += 1
        chunks, rows, sampling = [], [], []
        for one, seen, row in work:
            count = len(one.token_ids) - 1
            chunks.append(Chunk(one.seq_id, count - 1, (one.token_ids[-1],), seen.tables, 0, 1))
            rows.append(self._made[1].first(seen.index, row + 1)[row:])
            sampling.append(SamplingRow(without_logprobs(one.params), 1, 1, count + 1, one.seed))
        drafts = self.passes.run(StepPlan(self._step, tuple(chunks)), rows, sampling, length)
        return {one.seq_id: draft[: one.limit] for (one, _, _), draft in zip(work, drafts, strict=True)}


HeadDrafter = MtpDrafter | AssistantDrafter
