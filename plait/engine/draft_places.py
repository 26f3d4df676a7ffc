"""How many sequences have drafts at a time: places for the state of what drafts, within a limit of memory."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from plait.config import EngineConfig
from plait.engine.memory_plan import gib
from plait.errors import OutOfMemory
from plait.memory import PagedState, SlotState, State, block_groups, has_slots
from plait.runner.host.draft_memory import DraftMemory
from plait.runner.host.mtp import MOST_KEPT
from plait.schedule.drafts.turns import MOST_DRAFTED

log = logging.getLogger("plait")
SHARE = 4  # the state of drafts takes at most this part of what the state of sequences may


@dataclass(frozen=True, slots=True)
class Beside:
    """What a place takes next to its state: bytes, and tokens of a draft behind what is known in a pass."""

    nbytes: int = 0
    num_masks: int = 0


NOTHING = Beside()


def plan_places(
    states: Mapping[str, State],
    config: EngineConfig,
    dtype: str,
    free: int,
    longest: int,
    beside: Beside = NOTHING,
) -> DraftMemory:
    """A place for each running sequence, or for as many as fit. Raises OutOfMemory if not one does.

    `dtype`: what the drafting model computes in; `free`: bytes free on its device; `longest`: tokens of one
    place.
    """
    memory = DraftMemory(
        groups=block_groups(states),
        has_slots=has_slots(states),
        block_size=config.block_size,
        num_places=config.max_num_seqs,
        max_len=longest,
        max_step_len=config.max_num_batched_tokens,
        num_masks=beside.num_masks,
    )
    limit = (config.memory_limit or free) // SHARE
    each = place_nbytes(memory, states, dtype) + beside.nbytes
    if each > limit:
        raise OutOfMemory(
            f"speculate: the state of one draft of {longest} tokens needs {gib(each)}, and there are "
            f"{gib(limit)} for it; start with a smaller --max-model-len, a --memory-limit of at least "
            f"{SHARE * each}, or --speculate ngram"
        )
    places = min(config.max_num_seqs, limit // each if each else config.max_num_seqs)
    if places < config.max_num_seqs:
        log.warning(
            "drafts of %d sequences at a time fit into %s, not of %d", places, gib(limit), config.max_num_seqs
        )
    return replace(memory, num_places=places)


def plan_head_places(
    states: Mapping[str, State],
    config: EngineConfig,
    dtype: str,
    free: int,
    longest: int,
    *,
    beside: Beside,
    most: int | None = None,
) -> DraftMemory:
    """The same for a model's own head, which computes what was kept of a sequence before its first draft.

    `beside`: with the hidden states that are kept of one; `most`: places, at most.
    """
    memory = plan_places(states, config, dtype, free, longest, beside)
    places = memory.num_places if most is None else min(memory.num_places, most)
    if places < memory.num_places:
        log.warning(
            "drafts of %d sequences at a time: the startup image is of a run with less memory, and has space "
            "for no more; `plait warmup` makes another",
            places,
        )
    step = max(MOST_KEPT, places * (1 + min(config.num_draft_tokens, MOST_DRAFTED)))
    return replace(memory, num_places=places, max_step_len=step)


def block_nbytes(most: int, vocab_size: int) -> int:
    """Bytes of the logits of one sequence's block, of which at most so many tokens are drafted."""
    return min(most, MOST_DRAFTED) * vocab_size * 4


def place_nbytes(memory: DraftMemory, states: Mapping[str, State], dtype: str) -> int:
    """Bytes of state of one place of a draft model that computes in `dtype`."""
    total = 2 * sum(s.nbytes_per_slot(dtype) for s in states.values() if isinstance(s, SlotState))
    for group in memory.groups:
        members = (states[name] for name in group.members)
        per_token = sum(s.nbytes_per_token(dtype) for s in members if isinstance(s, PagedState))
        total += memory.per_place(group) * memory.block_size * per_token
    return total
