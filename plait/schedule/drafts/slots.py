"""Slots with the states that a sequence goes back to after a wrong draft token.

Recurrent state cannot be taken back. Where a step can keep the state behind each of its rows, a slot for each
draft token gets the state before it; the one behind the last right token becomes the sequence's own.
Else one slot gets a copy of the state before the step, of which the tokens are computed again.
"""

from __future__ import annotations

from msgspec import Struct


class DraftSlots(Struct, frozen=True, gc=False):
    """Slots of a draft: slots[i] has the recurrent state after `base` + i tokens once the step has run.

    `is_copy`: there is one, with the state before the step, and the step does not know of it.
    """

    base: int
    slots: tuple[int, ...]
    is_copy: bool

    @property
    def rows(self) -> tuple[int, ...]:
        """The slots that the step writes."""
        return () if self.is_copy else self.slots
