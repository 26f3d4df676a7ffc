"""Beams as sequences: after each step they fork, and at the end they become the choices of their request.

A beam goes on in the sequence of its parent where it can. Further beams of the same parent get copies of its
state: whole blocks are shared, and the slot and the partly filled blocks are copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from plait.request import Event
from plait.schedule.allocation import Allocation
from plait.schedule.beams import Continued
from plait.schedule.plan import CopySlot, Sampled
from plait.schedule.sequence import Gang, TokenSequence
from plait.schedule.turns import Update
from plait.state.blocks import GARBAGE


def advance_beams(
    gang: Gang, answers: Mapping[int, Sampled], memory: Allocation
) -> tuple[bool, list[Update]]:
    """Take what a step sampled of all live beams. They fork and go on, or these updates end the search.

    False: some state was not copied for want of memory, and the gang must be preempted.
    """
    assert gang.search is not None
    scores = [answers[seq.id].logprobs for seq in gang.ranked]
    going = gang.search.advance([found[0] for found in scores if found])
    return (fork_beams(gang, going, memory), []) if going else (True, end_beams(gang))


def fork_beams(gang: Gang, going: Sequence[Continued], memory: Allocation) -> bool:
    """Give each beam that goes on a sequence with its tokens and its state.

    False: there was no memory for all copies. Then the tokens are right, and the gang must be preempted.
    """
    parents = [gang.ranked[one.parent] for one in going]
    free = [seq for seq in gang.members if seq not in parents]
    known = {seq.id: [*seq.token_ids] for seq in parents}
    ranked, taken = list[TokenSequence](), set[int]()
    forks: list[tuple[TokenSequence, TokenSequence]] = []
    for parent in parents:
        child = parent if parent.id not in taken else free.pop(0)
        taken.add(parent.id)
        ranked.append(child)
        if child is not parent:
            forks.append((parent, child))
    gang.ranked = tuple(ranked)
    failed = [child for parent, child in forks if not fork_state(parent, child, memory)]
    for seq in free:  # fewer beams live than before
        drop_state(seq, memory)
        seq.token_ids = seq.token_ids[: seq.prompt_len]
    for child, parent, one in zip(ranked, parents, going, strict=True):
        child.token_ids = [*known[parent.id], one.token_id]
    return not failed


def fork_state(parent: TokenSequence, child: TokenSequence, memory: Allocation) -> bool:
    """Give `child` a copy of all that `parent` has computed, for what it held itself.

    Whole blocks are shared. False: no memory is available, and `child` holds none.
    """
    pools, slot = memory.pools, child.slot
    child.slot = GARBAGE  # its own is used again
    drop_state(child, memory)
    child.slot = slot
    whole, rest = divmod(parent.num_computed_tokens, memory.block_size)
    has_slot = not pools.slots or slot or pools.slots.num_available
    if not has_slot or (rest and any(not pool.num_available for pool in pools.blocks)):
        drop_state(child, memory)
        return False
    child.tables = tuple(table[:whole] for table in parent.tables)
    for g, (pool, table) in enumerate(zip(pools.blocks, child.tables, strict=True)):
        pool.ref(block for block in table if block)
        if rest:
            table.append(pools.copy_of(g, parent.tables[g][whole]))
    if pools.slots:
        child.slot = slot or pools.take_slot()
        pools.moves.append(CopySlot(parent.slot, child.slot))
    child.num_computed_tokens, child.num_recorded = parent.num_computed_tokens, parent.num_recorded
    child.chain, child.marks = [*parent.chain], {*parent.marks}
    child.num_cached_tokens, child.miss_cause = parent.num_cached_tokens, parent.miss_cause
    return True


def drop_state(seq: TokenSequence, memory: Allocation) -> None:
    """Give back what a sequence holds, and keep nothing of it: it has computed nothing."""
    for pool, table in zip(memory.pools.blocks, seq.tables, strict=False):
        pool.give(block for block in reversed(table) if block)
    memory.pools.give_slot(seq.slot)
    seq.forget_memory()
    seq.tables, seq.chain = tuple([] for _ in memory.groups), seq.chain[:1]


def end_beams(gang: Gang) -> list[Update]:
    """The finished beams of a search as updates of its request's choices, the best first."""
    search, updates = gang.search, list[Update]()
    assert search is not None
    for seq, one in zip(gang.members, search.finished, strict=False):
        scored, stop = one.beam.tokens(), None
        if one.finish_reason == "stop":
            stop = scored[-1].token_id
        kept = scored if stop is None else scored[:-1]
        tokens = tuple(token.token_id for token in kept)
        seq.token_ids = [*seq.token_ids[: seq.prompt_len], *tokens]
        event = Event(
            seq.request_id,
            len(updates),
            token_ids=tokens,
            logprobs=kept if seq.params.logprobs is not None and kept else None,
            finish_reason=one.finish_reason,
            stop_token_id=stop,
            num_cached_tokens=gang.members[0].num_cached_tokens,
        )
        updates.append(Update(seq.id, event))
    return updates
