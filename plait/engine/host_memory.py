"""The memory of a CPU: how much there is for sequences, and the lines that a startup logs about it."""

from __future__ import annotations

import logging

from plait import resource_limits
from plait.config import EngineConfig
from plait.engine.memory_plan import ModelFacts, Sizing, gib, size_state

USUAL_NBYTES = 4 << 30  # of free memory, where the system does not report it: a laptop's
log = logging.getLogger("plait")


def free_host_memory() -> int:
    """Bytes that can still be had, within the control groups' limits."""
    free = resource_limits.free_memory()
    return USUAL_NBYTES if free is None else free


def size_on_host(facts: ModelFacts, config: EngineConfig, *, mapped: int = 0, ranks: int = 1) -> Sizing:
    """The memory of sequences on a CPU. mapped: bytes of weights in files, which count as free until they are
    read; ranks: how many share this machine's memory. Raises ConfigError and OutOfMemory."""
    free, limit = free_host_memory(), resource_limits.memory_limit()
    if limit is not None:
        allowed = "memory: this process's control groups allow %s; %s can still be had"
        log.info(allowed, gib(limit), gib(free))
    total = resource_limits.total_memory()
    own_total = None if total is None else total // ranks
    return size_state(facts, config, free_memory=(free - mapped) // ranks, total_memory=own_total)


def describe_memory(sizing: Sizing, weights_nbytes: int, *, is_lazy: bool = True) -> None:
    """Log what weights and sequences take. `is_lazy`: see `Sizing.rows`."""
    for what, count, nbytes in sizing.rows(weights_nbytes, is_lazy=is_lazy):
        log.info("memory: %-31s %14s %10s", what, count, gib(nbytes))
    for note in sizing.notes:
        log.warning("%s", note)
