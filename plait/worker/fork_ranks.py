"""Forks the processes of ranks from the engine's process, before that has threads.

    the engine's process    imports torch, Numba, kernels and modules of ranks │ fork │ loads, is rank 0
    rank 1, 2, …                                                               └────── loads, is rank n

All of them read the same pages of what was imported. A page becomes a process's own when that process writes
to it, and Python writes to an object when it counts references. The collector would write to every object, so
what exists here is frozen.

Three things do not survive a fork, and `why_not` looks for two of them: threads, and a GPU's context. The
third is descriptors: a rank closes all but its own, so that an end of a socket still closes with its process.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import sys
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from plait.config import EngineConfig
from plait.kernels.load import forget_lock, has_numba, list_loops, load_kernels, why_not_cached
from plait.loading.image.lookup import has_gpu
from plait.loading.image.release import release_libraries
from plait.loading.torch_preload import die_with, finish_torch
from plait.resource_limits import trim_heap
from plait.runner.ranks.processes import ForkedProcess, StartedRank, offer_ranks

TASKS = Path("/proc/self/task")
DESCRIPTORS = Path("/proc/self/fd")
STANDARD = {0, 1, 2}
# What a rank imports late, besides kernels.
LATE = ("plait.worker.rank", "plait.loading.build", "torch.distributed")


def fork_ranks(config: EngineConfig) -> str | None:
    """Have the `RankGroup` of this process take ranks that are forked here, where they can be.

    Where they cannot, it starts them anew. Returns why. Raises ConfigError for an `isa` that cannot be.
    """
    if config.num_ranks == 1:
        return None
    finish_torch()  # the thread that has been reading its files ends
    if (why := why_not(config)) is not None:
        return why
    import_all(config)
    if (why := why_not(config)) is not None:  # a library has started a thread
        return why
    trim_heap()
    release_libraries()
    gc.freeze()
    ranks = []
    try:
        for _ in range(1, config.num_ranks):
            ranks.append(_fork_rank())
    finally:
        offer_ranks(ranks)
    return None


def why_not(config: EngineConfig) -> str | None:
    """Why ranks cannot be forked from this process; None: they can."""
    if config.device != "cpu" and (config.device != "auto" or has_gpu()):
        return "a GPU's context cannot be forked"
    if not TASKS.is_dir():
        return "the system does not list the threads of a process"
    if (count := len(os.listdir(TASKS))) > 1:
        return f"this process has {count} threads"
    return None


def import_all(config: EngineConfig) -> None:
    """Import all that a rank on a CPU needs, whatever its model. Raises as `load_kernels`."""
    for name in LATE:
        with suppress(ImportError):  # of what a build of torch lacks
            importlib.import_module(name)
    load_kernels(cache_dir=Path(config.cache_dir) if config.cache_dir else None, isa=config.isa)
    if config.ops != "reference" and has_numba() and why_not_cached() is None:
        for loop in list_loops().values():
            _ = loop.address


def _fork_rank() -> StartedRank:
    ours, theirs = socket.socketpair()
    alive, held = socket.socketpair()
    parent = os.getpid()
    pid = os.fork()
    if not pid:
        _be_rank(parent, theirs.fileno(), alive.fileno())
    theirs.close()
    alive.close()
    return StartedRank(ForkedProcess(pid), Connection(ours.detach()), held)


def _be_rank(parent: int, socket_fd: int, alive_fd: int) -> NoReturn:
    """Be the rank's process until its end: frames of the engine's process are below, and never go on here."""
    try:
        from plait.worker.rank import main

        die_with(parent)
        _close_others({*STANDARD, socket_fd, alive_fd})
        forget_lock()
        gc.enable()
        main(socket_fd, alive_fd)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(1)


def _close_others(kept: set[int]) -> None:
    for fd in [int(name) for name in os.listdir(DESCRIPTORS)]:
        if fd not in kept:
            with suppress(OSError):  # the one that has listed them is closed already
                os.close(fd)
