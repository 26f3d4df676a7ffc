"""Speculative turns of one sequence as one native call: draft, verification, acceptance, and the same again.

A turn with k draft tokens is a pass of the model over 1 + k rows and k passes of its head. Between them native code
compares the draft with what the model made (`kernels.cpu.runtime.turns`). So Python runs once for several turns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from plait.runner.host.program import HostProgram, ProgramReplay
from plait.runner.host.sampler import check_finite
from plait.runner.host.static_batch import StaticBatch
from plait.runner.mtp import HeadPlace, MtpDrafter
from plait.runner.mtp_passes import RecordedPasses
from plait.schedule.plan import MOST_STEPS, Chunk, Sampled, StepPlan, TurnsEnd

MOST_STOPS = 64  # stop tokens that native code looks for
KIND = 64  # added to the number of tokens: the time of turns is not compared with that of single passes
Longs = npt.NDArray[np.int64]


class GlueMaker(Protocol):
    """Makes tables of launches (`kernels.cpu.runtime.executor`)."""

    @property
    def steps(self) -> int: ...
    def glue(self, name: str, *args: object) -> object: ...
    def joined(self, parts: Sequence[object]) -> object: ...


class NativeTurns:
    """Runs the turns of a plan. `program`: the model's step; `head`: a pass of the head of `drafter`.

    Both find the largest logits; the sequence is sampled from nothing else.
    """

    def __init__(
        self, program: HostProgram, head: HostProgram, before: object, drafter: MtpDrafter, maker: GlueMaker
    ) -> None:
        self._program, self._head, self._before, self._drafter = program, head, before, drafter
        self._maker, self._nothing = maker, maker.glue("nothing")
        self._journal, self._stops = np.zeros(4, np.int64), np.zeros(MOST_STOPS, np.int64)
        self._turns: dict[int, _Turn] = {}  # by draft tokens

    def run(self, plan: StepPlan) -> list[Sampled] | None:
        """The answer to the one chunk of a plan with turns; None: not here, it is to run as a single step."""
        (chunk,), turns = plan.chunks, plan.turns
        place, count = self._drafter.place_of(chunk.seq_id), len(chunk.token_ids) - 1
        if turns is None or place is None or len(turns.stops) > MOST_STOPS:
            return None
        start, most = place.done - place.base, turns.most
        end = start + most * (count + 1) + count
        if place.done != chunk.start or start < 1 or end > self._drafter.memory.max_len:
            return None
        if (turn := self._turns.get(count)) is None:
            turn = self._turns[count] = self._make(count)
        try:
            answer = self._play(plan, chunk, place, turn, most)
        except BaseException:
            place.clear()
            raise
        return [answer]

    def _play(self, plan: StepPlan, chunk: Chunk, place: HeadPlace, turn: _Turn, most: int) -> Sampled:
        static, head, stops = self._program.static, self._head.static, plan.turns.stops if plan.turns else ()
        rows, start = turn.count + 1, place.done - place.base
        static.fill(plan)
        tables = self._drafter.memory.tables(place.index, start, start + most * rows + turn.count)
        head.fill(StepPlan(0, (Chunk(chunk.seq_id, start, (0,), tables, 0, 1),)))
        self._journal[:] = 0, most, start, len(stops)
        self._stops[: len(stops)] = stops
        self._program.threads.run(
            turn.table, tokens=rows, logits=rows, seqs=1, steps=most, between=self._nothing, kind=KIND + rows
        )
        done = int(self._journal[0])
        found, rights, last = turn.found[:done].tolist(), turn.rights[:done].tolist(), done - 1
        check_finite(turn.values[:done].ravel().tolist())
        tokens = [token for i in range(last) for token in found[i][: rights[i] + 1]]
        place.at = place.done = chunk.start + len(tokens) + rights[last] + 1
        place.count, place.last, place.proposal = 0, found[last][rights[last]], tuple(static.ids[1:rows].tolist())
        slots = static.row_slots[: len(chunk.row_slots)].tolist()
        ended = TurnsEnd(
            done, len(tokens), tuple(turn.drafts[last, 1:].tolist()), int(static.slots[0]), tuple(slots)
        )
        return Sampled((*tokens, *found[last]), turns=ended)

    def _make(self, count: int) -> _Turn:
        """The table of a turn with so many draft tokens."""
        turn, program, head = _Turn(count), self._program, self._head
        largest, drafted = program.results.largest, head.results.largest
        assert largest is not None and drafted is not None
        s, h, hidden, glue = program.static, head.static, program.results.hidden, self._maker.glue
        moving, head_moving = _describe(s, turn), _describe(h, turn)
        accept = glue(
            "accept",
            *(count, self._journal, self._maker.steps, *largest, turn.found, turn.values, turn.drafts),
            *(turn.rights, self._stops, s.ids, moving, s.slots, s.row_slots, hidden, hidden.strides[0]),
            *(h.ids, head_moving, h.starts, h.logit_rows, self._before, hidden.shape[1]),
        )
        parts = [program.table, accept]
        for number in range(1, count + 1):
            take = glue("take", number, count, drafted[0], s.ids, h.ids, head_moving, h.starts, h.logit_rows)
            parts += [head.table, take]
        turn.table = self._maker.joined(parts)
        return turn


class _Turn:
    """A table of launches, and where it leaves for each turn what the model made of each row of it.

    found, values: ids and values of the largest logits; drafts: the rows' tokens; rights: how many draft tokens
    were right.
    """

    def __init__(self, count: int) -> None:
        shape = MOST_STEPS, count + 1
        self.count, self.table = count, object()
        self.found, self.drafts = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
        self.values, self.rights = np.zeros(shape, np.float32), np.zeros(MOST_STEPS, np.int64)
        self.kept: list[object] = []


def _describe(static: StaticBatch, turn: _Turn) -> Longs:
    """The address of a batch's `moving` and what is needed to place a row: see `turns._place_rows`."""
    tables = np.array([(table.ctypes.data, table.strides[0]) for table in static.tables], np.int64)
    moving = static.moving
    made = np.array(
        [moving.ctypes.data, moving.strides[0], len(tables), tables.ctypes.data, static.block_size], np.int64
    )
    turn.kept += [tables, made]
    return made


def add_turns(replay: object, drafter: MtpDrafter, executor: GlueMaker | None) -> bool:
    """Let a recorded step run turns, where the head is recorded and both find the largest logits."""
    passes = drafter.passes
    if not isinstance(replay, ProgramReplay) or not isinstance(passes, RecordedPasses) or executor is None:
        return False
    if replay.program.results.largest is None or passes.program.results.largest is None:
        return False
    replay.turns = NativeTurns(replay.program, passes.program, passes.before, drafter, executor)
    return True
