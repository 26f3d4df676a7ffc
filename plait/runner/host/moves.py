"""The moves of a plan: copies of blocks and slots that come before a step, in their order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Protocol

from plait.schedule.plan import CopyBlock, CopySlot, Drop, Load, Move, Save, StepPlan


class MovableState(Protocol):
    """Memory of sequences: `state.store.StateStore` or `state.host_store.HostStore`."""

    def copy_rows(self, group: int, pairs: Iterable[tuple[int, int]]) -> None: ...
    def save(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None: ...
    def load(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None: ...
    def drop(self, handle: int) -> None: ...
    def zero_slots(self, slots: Iterable[int]) -> None: ...


def make_moves(store: MovableState, plan: StepPlan) -> None:
    """Make the moves in their order, neighbours that copy the same kind together; then zero slots."""
    for group, moves in groupby(plan.moves, _group_of):
        if group is not None:
            copies = (move for move in moves if isinstance(move, CopySlot | CopyBlock))
            store.copy_rows(group, ((copy.source, copy.target) for copy in copies))
            continue
        for move in moves:
            match move:
                case Save(handle, blocks, slot):
                    store.save(handle, blocks, slot)
                case Load(handle, blocks, slot):
                    store.load(handle, blocks, slot)
                case Drop(handle):
                    store.drop(handle)
    store.zero_slots(plan.fresh)


def _group_of(move: Move) -> int | None:
    """What a move copies: a block group, -1 for slots, None if it goes to or from host memory."""
    if isinstance(move, CopyBlock):
        return move.group
    return -1 if isinstance(move, CopySlot) else None
