"""Ranks as threads of one process: what they exchange goes through a list."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from plait.checkpoint.divided import Cuts
from plait.checkpoint.storages import Checkpoint
from plait.checkpoint.weights import Target, Weights
from plait.families.common.resolved import Resolved
from plait.model.decoder import Decoder
from plait.model.divide import divide_model
from plait.ops.ranks import Comm, add_in_tree
from plait.partition import Rank

T = TypeVar("T")
LONGEST_S = 60.0


class ThreadComm:
    """One of several ranks, each on a thread of its own."""

    def __init__(self, rank: Rank, barrier: threading.Barrier, passed: list[Tensor]) -> None:
        self.rank, self._barrier, self._passed = rank, barrier, passed

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        self._passed[self.rank.index] = x.clone()
        self._barrier.wait(LONGEST_S)
        found = tuple(self._passed)
        self._barrier.wait(LONGEST_S)
        return found

    def sum(self, x: Tensor) -> Tensor:
        return add_in_tree(self.gather(x), torch.add)


def run_ranks(
    work: Callable[[Comm], T], size: int, shares: int = 0, whole_experts: bool = False, block: int = 1
) -> list[T]:
    """What `work` returns on each rank. Raises what the first of them raises."""
    barrier, passed = threading.Barrier(size), [Tensor()] * size
    results: list[T | None] = [None] * size
    errors: list[Exception] = []

    def run(index: int) -> None:
        try:
            rank = Rank(index, size, shares, block, whole_experts)
            results[index] = work(ThreadComm(rank, barrier, passed))
        except Exception as error:
            errors.append(error)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(index,)) for index in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    first = [error for error in errors if not isinstance(error, threading.BrokenBarrierError)]
    if first or errors:
        raise (first or errors)[0]
    return [result for result in results if result is not None]


def rank_decoder(found: Resolved, checkpoint: Checkpoint, target: Target, comm: Comm) -> Decoder:
    """A rank's part of a model, every tensor of the checkpoint used."""
    spec, _ = divide_model(found.spec, comm.rank)
    target.cuts = Cuts.for_rank(comm, lambda rank: divide_model(found.spec, rank)[1])
    weights = Weights(checkpoint, found.names, target)
    built = Decoder(spec, weights)
    weights.check_all_used()
    return built
