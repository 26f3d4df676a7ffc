"""Symmetric memory that is made up of files; and a process that sums over it, as a rank does.

python -m tests.runner.file_symmetric INDEX SIZE FOLDER prints what it summed, as JSON.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from plait.ops.ranks import sum_ranks
from plait.partition import Rank
from plait.runner.ranks.group_comm import GroupComm

LONGEST_S = 30.0
CPU = torch.device("cpu")
SHAPES = ((1, 7), (3, 33), (128, 1024), (129, 1024), (256, 1024))


class FileSymmetric:
    """A `SymmetricBackend`: every rank maps the files of all. `fails_in`: the call that raises."""

    def __init__(self, folder: Path, fails_in: str = "") -> None:
        self._folder, self._fails_in = folder, fails_in
        self._met = 0
        self.adds = 0

    def open_group(self, name: str, rank: Rank, store: Any) -> None:
        self._rank, self._store = rank, store

    def empty(self, count: int, device: torch.device, name: str) -> Tensor:
        self._fail("empty")
        self._count = count
        return self._map(self._rank.index)

    def meet(self, memory: Tensor, name: str) -> object:
        self._fail("meet")
        self._wait()
        self._all = [self._map(index) for index in range(self._rank.size)]
        return self._all

    def add(self, part: Tensor, name: str) -> Tensor:
        assert part.numel() * part.element_size() % 16 == 0
        self.adds += 1
        self._wait()
        nbytes = part.numel() * part.element_size()
        first, *others = (memory[:nbytes].view(part.dtype) for memory in self._all)
        total = first.clone()
        for other in others:
            total = total + other
        self._wait()
        return total + 1 if self._fails_in == "add" else total

    def _fail(self, where: str) -> None:
        if self._fails_in == where:
            raise RuntimeError(f"no memory in {where}")

    def _map(self, index: int) -> Tensor:
        path = str(self._folder / f"memory-{index}")
        return torch.from_file(path, shared=True, size=self._count, dtype=torch.uint8)

    def _wait(self) -> None:
        self._met += 1
        key, deadline = f"met-{self._met}", time.monotonic() + LONGEST_S
        self._store.add(key, 1)
        while self._store.add(key, 0) < self._rank.size:
            if time.monotonic() > deadline:
                raise RuntimeError("a rank did not come")
            time.sleep(0.001)


def numbers_of(index: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """What a rank passes: other numbers on each, the same in every process."""
    generator = torch.Generator().manual_seed(index)
    return torch.randn(shape, generator=generator).to(dtype)


def sum_all(comm: GroupComm, dtype: torch.dtype) -> list[Tensor]:
    """The sums of every shape; what was passed must be as it was."""
    found = []
    for shape in SHAPES:
        x = numbers_of(comm.rank.index, shape, dtype)
        found.append(sum_ranks(x, comm, dtype))
        assert torch.equal(x, numbers_of(comm.rank.index, shape, dtype))
    return found


def main() -> None:
    index, size, folder = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3])
    found: dict[str, Any] = {}
    for name, shares in (("gloo", 0), ("symmetric", 0), ("tree", 8)):
        backend = FileSymmetric(folder)
        rank = Rank(index, size, shares)
        comm = GroupComm(rank, str(folder / name), CPU, backend if name != "gloo" else None)
        before = backend.adds
        for dtype in (torch.float32, torch.bfloat16):
            sums = sum_all(comm, dtype)
            found[f"{name} {dtype}"] = [total.view(torch.uint8).flatten().tolist()[:4096] for total in sums]
            wanted = [sum(numbers_of(i, s, dtype).double() for i in range(size)) for s in SHAPES]
            off = max(float((a.double() - b).abs().max()) for a, b in zip(sums, wanted, strict=True))
            found[f"{name} {dtype} off"] = off
        found[f"{name} adds"] = backend.adds - before
        found[f"{name} bound"] = comm.bind().variant
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main()
