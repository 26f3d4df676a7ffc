"""Has a scheduler's prefix cache followed by a tree, which reports what can be resumed."""

from __future__ import annotations

from plait.schedule.scheduler import Scheduler
from plait.state.prefix_tree import PrefixTree


def follow_prefixes(scheduler: Scheduler) -> PrefixTree | None:
    """What is cached from now on; None: a model that is not causal caches nothing."""
    if not scheduler.limits.causal:
        return None
    memory = scheduler.memory
    tree = PrefixTree(memory.windows, memory.block_size, has_slots=memory.has_slots)
    memory.listener = memory.pools.index.listener = tree
    return tree
