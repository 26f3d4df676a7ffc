"""Speculative turns of one sequence in one plan: what is requested of the runner, and what it reports."""

from __future__ import annotations

from msgspec import Struct


class PlanTurns(Struct, frozen=True, gc=False):
    """The step with a sequence's draft, and further ones that the runner drafts itself.

    There are `most`, fewer behind one of the tokens `stops`.
    """

    most: int
    stops: tuple[int, ...]


class TurnsEnd(Struct, frozen=True, gc=False):
    """What the last of `num_turns` leaves: the draft that it checked, and the slots of its step.

    `num_earlier`: tokens of the turns before it. `slot`: the sequence's; `row_slots`: those behind the rows
    before the last.
    """

    num_turns: int
    num_earlier: int
    draft: tuple[int, ...]
    slot: int
    row_slots: tuple[int, ...]
