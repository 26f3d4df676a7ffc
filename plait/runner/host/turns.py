"""Speculative turns of one sequence as one native call: draft, verification, acceptance, and the same again.

A turn with k draft tokens is a pass of the model over 1 + k rows and k passes of its head. Between them
native code compares the draft with what the model made (`kernels.cpu.runtime.turns`). So Python runs once
for several turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plait.ops.seed import uniform
from plait.runner.host.mtp import HeadPlace, MtpDrafter
from plait.runner.host.mtp_passes import HostPasses
from plait.runner.host.program import Floats, HostProgram, ProgramReplay
from plait.runner.host.sampler import HostSampler, Settings, check_finite
from plait.runner.host.static_batch import StaticBatch
from plait.schedule.drafts.turns import MOST_STOPS, MOST_TURNS, TurnsEnd
from plait.schedule.plan import Chunk, Sampled, SamplingRow, StepPlan

KIND = 64  # added to the number of rows: the time of turns is not compared with that of single passes
Longs = npt.NDArray[np.int64]


class TableMaker(Protocol):
    """Makes tables of launches (`kernels.cpu.runtime.turn_tables`). `steps`: where their number is."""

    @property
    def steps(self) -> int: ...
    def glue(self, name: str, *args: object) -> object: ...
    def draw(self, logits: Floats, width: int, settings: tuple[object, ...], ids: object) -> object: ...
    def join(self, parts: Sequence[object]) -> object: ...


@dataclass(frozen=True, slots=True)
class DrawTable:
    """The draw from a program's logits as a table of its own, and where its settings and its tokens are."""

    table: object
    settings: Settings
    ids: Longs

    def set(self, row: SamplingRow, count: int, vocab_size: int) -> None:
        """Write a row's settings but for its random numbers, `count` times."""
        p = row.params
        values = (p.temperature or 0.0, min(p.top_k or 0, vocab_size), 1.0 if p.top_p is None else p.top_p)
        for setting, value in zip(self.settings, (*values, p.min_p or 0.0), strict=False):
            setting[:count] = value


class NativeTurns:
    """Runs the turns of a plan. `program`: the model's step; `passes`: those of the head of `drafter`."""

    def __init__(
        self,
        program: HostProgram,
        passes: HostPasses,
        drafter: MtpDrafter,
        sampler: HostSampler,
        maker: TableMaker,
    ) -> None:
        self._program, self._head, self._before = program, passes.program, passes.before
        self._drafter, self._sampler, self._maker = drafter, sampler, maker
        self._nothing = maker.glue("nothing")
        self._journal, self._stops = np.zeros(6, np.int64), np.zeros(MOST_STOPS, np.int64)
        longest = program.static.capacity.logits
        self._numbers, self._row_numbers = np.zeros((MOST_TURNS + 1) * longest), np.zeros(longest)
        self._head_number = np.zeros(passes.program.static.capacity.logits)  # of its one row
        self._draws: tuple[DrawTable, DrawTable] | None = None
        self._turns: dict[tuple[int, bool], _TurnTable] = {}  # by draft tokens, and whether tokens are drawn

    def run(self, plan: StepPlan, row: SamplingRow) -> list[Sampled] | None:
        """The answer to the one chunk of a plan with turns; None: it is to run as a single step."""
        (chunk,), turns = plan.chunks, plan.turns
        place, count = self._drafter.place_of(chunk.seq_id), len(chunk.token_ids) - 1
        if turns is None or place is None or len(turns.stops) > MOST_STOPS:
            return None
        if len(place.proposal) < place.wanted:  # turns go on with drafts of this length
            return None
        start, rows = place.done - place.base, count + 1
        num_rows = min(turns.num_rows, self._drafter.memory.max_len - start - count)
        if place.done != chunk.start or start < 1 or num_rows < 2 * rows:
            return None
        key = count, bool(row.params.temperature)
        try:
            if (turn := self._turns.get(key)) is None:
                turn = self._turns[key] = self._make(*key)
            self._set(plan, chunk, row, place, num_rows)
            threads = self._program.threads
            sizes = {"tokens": rows, "logits": rows, "seqs": 1, "steps": turns.most}
            threads.run(turn.table, **sizes, between=self._nothing, kind=KIND + rows)
            return [self._read(chunk, place, turn)]
        except BaseException:  # half of the turns may have run
            place.clear()
            raise

    def _set(self, plan: StepPlan, chunk: Chunk, row: SamplingRow, place: HeadPlace, num_rows: int) -> None:
        """Write what the first verification reads, where the head goes on, and what all turns need."""
        start, rows, turns = place.done - place.base, len(chunk.token_ids), plan.turns
        assert turns is not None
        self._program.static.fill(plan)
        tables = self._drafter.memory.tables(place.index, start, start + num_rows + rows - 1)
        self._head.static.fill(StepPlan(0, (Chunk(chunk.seq_id, start, (0,), tables, 0, 1),)))
        self._journal[:] = 0, turns.most, start, len(turns.stops), chunk.start, start + num_rows - rows
        self._stops[: len(turns.stops)] = turns.stops
        if row.params.temperature and self._draws is not None:
            count = num_rows + rows
            self._numbers[:count] = [uniform(row.seed, row.position + i) for i in range(count)]
            self._row_numbers[:rows], self._head_number[0] = self._numbers[:rows], self._numbers[0]
            for draw, number in zip(self._draws, (rows, 1), strict=True):
                draw.set(row, number, self._sampler.vocab_size)

    def _read(self, chunk: Chunk, place: HeadPlace, turn: _TurnTable) -> Sampled:
        """The answer, and what the head's place is now."""
        done, static, rows = int(self._journal[0]), self._program.static, len(chunk.token_ids)
        found, rights, last = turn.found[:done].tolist(), turn.rights[:done].tolist(), done - 1
        check_finite(turn.values[:done].ravel().tolist())
        earlier = [token for i in range(last) for token in found[i][: rights[i] + 1]]
        place.at = place.done = chunk.start + len(earlier) + rights[last] + 1
        place.count, place.last = 0, found[last][rights[last]]
        place.proposal = tuple(static.ids[1:rows].tolist())
        slots, draft = static.row_slots[: len(chunk.row_slots)].tolist(), turn.drafts[last, 1:].tolist()
        ended = TurnsEnd(done, len(earlier), tuple(draft), int(static.slots[0]), tuple(slots))
        return Sampled((*earlier, *found[last]), turns=ended)

    def _make(self, count: int, is_drawn: bool) -> _TurnTable:
        """The table of a turn with so many draft tokens."""
        turn, program, head = _TurnTable(count), self._program, self._head
        largest, drafted = program.results.largest, head.results.largest
        assert largest is not None
        assert drafted is not None
        found, proposed, drawing, proposing = largest[0], drafted[0], list[object](), list[object]()
        if is_drawn:
            model, own = self._draws = self._draws or self._make_draws()
            found, proposed, drawing, proposing = model.ids, own.ids, [model.table], [own.table]
        s, h, hidden, glue = program.static, head.static, program.results.for_head, self._maker.glue
        moving, head_moving = turn.describe(s), turn.describe(h)
        numbers = self._row_numbers, self._head_number
        accept = glue(
            "accept",
            *(count, self._journal, self._maker.steps, found, largest[1]),
            *(turn.found, turn.values, turn.drafts, turn.rights, self._stops),
            *(s.ids, moving, s.slots, s.row_slots, hidden, hidden.strides[0]),
            *(
                h.ids,
                head_moving,
                h.starts,
                h.logit_rows,
                self._before,
                hidden.shape[1],
                self._numbers,
                *numbers,
            ),
        )
        parts = [program.table, *drawing, accept]
        for number in range(1, count + 1):
            where = (s.ids, h.ids, head_moving, h.starts, h.logit_rows, *numbers)
            parts += [head.table, *proposing, glue("take", number, count, proposed, *where)]
        turn.table = self._maker.join(parts)
        return turn

    def _make_draws(self) -> tuple[DrawTable, DrawTable]:
        return (
            self._make_draw(self._program, self._row_numbers),
            self._make_draw(self._head, self._head_number),
        )

    def _make_draw(self, program: HostProgram, numbers: npt.NDArray[np.float64]) -> DrawTable:
        rows = program.static.capacity.logits
        settings = (np.zeros(rows), np.zeros(rows, np.int64), np.zeros(rows), np.zeros(rows), numbers)
        ids, logits = np.zeros(rows, np.int64), program.results.logits
        return DrawTable(self._maker.draw(logits, self._sampler.limit, settings, ids), settings, ids)


@dataclass(slots=True)
class _TurnTable:
    """A table of launches, and where it leaves for each turn what the model made of each row of it.

    found, values: tokens, and the largest logits; drafts: the rows' own tokens; rights: how many draft tokens
    were right.
    """

    count: int
    table: object = None
    found: Longs = field(init=False)
    drafts: Longs = field(init=False)
    values: npt.NDArray[np.float32] = field(init=False)
    rights: Longs = field(init=False)

    def __post_init__(self) -> None:
        shape = MOST_TURNS, self.count + 1
        self.found, self.drafts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.values, self.rights = np.zeros(shape, np.float32), np.zeros(MOST_TURNS, np.int64)

    def describe(self, static: StaticBatch) -> Longs:
        """Of a batch `moving`, and what is needed to place a row: see `kernels.cpu.runtime.turns`."""
        places = static.table_places
        words = (static.moving.ctypes.data, static.moving.strides[0], len(places), places.ctypes.data)
        return np.array([*words, static.block_size], np.int64)


def add_turns(replay: object, drafter: MtpDrafter, sampler: HostSampler, maker: TableMaker) -> bool:
    """Let a recorded step run turns, where the head is recorded and both find the largest logits."""
    passes = drafter.passes
    if not isinstance(replay, ProgramReplay) or not isinstance(passes, HostPasses):
        return False
    if replay.program.results.largest is None or passes.program.results.largest is None:
        return False
    replay.turns = NativeTurns(replay.program, passes, drafter, sampler, maker)
    return True
