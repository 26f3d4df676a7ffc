"""Takes slots before a draft is checked, and gives them back once its right tokens are known."""

from __future__ import annotations

from plait.schedule.drafts.slots import DraftSlots
from plait.schedule.plan import CopySlot
from plait.schedule.pools import Pools
from plait.schedule.sequence import TokenSequence

SHARE = 4  # a draft takes at most this part of the slots that no sequence holds: the others are cached


def branch(pools: Pools, seq: TokenSequence, num_drafted: int, *, keeps_rows: bool) -> bool:
    """Take slots for a step that checks so many draft tokens behind all known ones.

    `keeps_rows`: the step can keep states behind rows. False: no slot is available.
    """
    if not pools.slots:
        return True
    if keeps_rows and 0 < num_drafted * SHARE <= pools.slots.num_available:
        seq.draft_slots = DraftSlots(seq.num_tokens, tuple(pools.slots.take(num_drafted)), False)
        return True
    if not pools.slots.num_available:
        return False
    copy = pools.take_slot()
    pools.moves.append(CopySlot(seq.slot, copy))
    seq.draft_slots = DraftSlots(seq.num_computed_tokens, (copy,), True)
    return True


def settle_draft(pools: Pools, seq: TokenSequence, end: int, *, accepted: bool) -> int:
    """Choose the sequence's state once its draft was checked: of how many tokens it is.

    end: the tokens that are right. `accepted`: the whole draft is, so it is the state that the step left.
    """
    kept = seq.draft_slots
    if kept is None:
        return end
    reached, slots = end, list(kept.slots)
    if not accepted:
        i = 0 if kept.is_copy else end - kept.base
        seq.slot, slots[i] = slots[i], seq.slot
        reached = kept.base + i
    for slot in slots:
        pools.give_slot(slot)
    seq.draft_slots = None
    return reached


def drop_draft(pools: Pools, seq: TokenSequence) -> bool:
    """End a draft that was never checked. Returns whether the sequence's state is known: that before it."""
    kept, seq.draft_slots = seq.draft_slots, None
    if kept is None:
        return False
    slots = list(kept.slots)
    if kept.is_copy:
        seq.slot, slots[0] = slots[0], seq.slot
    for slot in slots:
        pools.give_slot(slot)
    return kept.is_copy
