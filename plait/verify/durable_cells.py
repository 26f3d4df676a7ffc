"""More cells of `plait verify`: caches in host memory and on the disk, restarts, kills, drafts, threads."""

from __future__ import annotations

from collections.abc import Iterator

from plait.config import GIB
from plait.verify.matrix import Cell

OFTEN, SELDOM = 5, 23  # steps between two restarts
THREADS = (1, 2, 3)
MANY = 500  # blocks: enough for all prompts, so that slots alone are few


def durable_cells(batch: int, block_size: int, *, has_slots: bool) -> Iterator[Cell]:
    """Caches outside of memory, and engines that begin again, all in this process.

    `has_slots`: some state is recurrent, so there are snapshots, which host memory keeps.
    """
    keeps: dict[str, object] = {"prefix_cache": True, "snapshot_interval": block_size}
    together = keeps | {"max_num_seqs": batch}
    if has_slots:
        name = "snapshots in host memory"
        swap = keeps | {"swap_memory": GIB}
        yield Cell(name, swap, (1, 1, 2), spared=MANY, is_quick=True, proof="host_hits")
    yield Cell("disk cache, after a restart", keeps, (1, 2), disk=True, is_quick=True, proof="disk_reads")
    name = "disk cache, together, hot"
    yield Cell(name, together, (1, 1, 2), disk=True, proof="disk_reads")
    name = "disk cache, together, little memory"
    yield Cell(name, together, (1, 1, 2), spared=1, disk=True, proof="disk_reads")
    cut = together | {"max_num_batched_tokens": max(block_size + 1, batch)}
    yield Cell("disk cache, together, in chunks", cut, (1, 2), disk=True, proof="disk_reads")
    yield Cell("restarts, alone", restarts=OFTEN, proof="restarts")
    name = "restarts, together"
    yield Cell(name, {"max_num_seqs": batch}, (1, 2), restarts=OFTEN, is_quick=True, proof="restarts")
    name = "restarts, with a disk cache"
    yield Cell(name, together, (1, 2), disk=True, restarts=SELDOM, proof="disk_reads")
    name = "restarts, with drafts"
    yield Cell(name, {"max_num_seqs": batch}, restarts=OFTEN, drafts="known", proof="accepted")


def second_load_cells(batch: int, block_size: int, *, drafts: bool) -> Iterator[Cell]:
    """Cells with a draft model, where there is one, and those that load the model again."""
    together: dict[str, object] = {"max_num_seqs": batch}
    keeps = together | {"prefix_cache": True, "snapshot_interval": block_size}
    if drafts:
        yield Cell("a draft model, alone", drafts="model", proof="drafted")
        yield Cell("a draft model, together", keeps, (1, 2), drafts="model", proof="drafted")
    for n in THREADS:
        yield Cell(f"{n} threads, alone", threads=n)
        yield Cell(f"{n} threads, together", keeps, (1, 2), threads=n)
    yield Cell("killed in mid-reply", together, (1,), kills=True, proof="kills")
    yield Cell("killed, with a disk cache", keeps, (1, 2), kills=True, disk=True, proof="disk_reads")
