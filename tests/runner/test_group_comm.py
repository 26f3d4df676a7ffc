"""Sums over ranks: in real processes over gloo and over made-up symmetric memory, and every way back."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait.partition import Rank
from plait.runner.ranks.group_comm import GroupComm
from plait.runner.ranks.one_shot import GROUP, OneShot, TorchSymmetric, bucket_nbytes
from tests.runner.file_symmetric import CPU, SHAPES, FileSymmetric, numbers_of, sum_all

ROOT = Path(__file__).resolve().parents[2]


def run_processes(size: int, folder: Path) -> list[dict[str, Any]]:
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.runner.file_symmetric", str(index), str(size), str(folder)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        for index in range(size)
    ]
    outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * size
    return [json.loads(output) for output in outputs]


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_processes_get_the_same_bits_of_every_sum_whatever_sums_it(size: int, tmp_path: Path) -> None:
    first, *others = run_processes(size, tmp_path)
    assert all(other == first for other in others)
    for name in ("gloo", "symmetric", "tree"):
        assert first[f"{name} torch.float32 off"] < 1e-5
        assert first[f"{name} torch.bfloat16 off"] < 0.1
    # Of float32 up to 128 rows of 1,024 numbers are 512 KiB, of bfloat16 twice as many.
    assert (first["gloo adds"], first["symmetric adds"], first["tree adds"]) == (0, 3 + 5, 0)
    assert first["gloo bound"] == "gloo"
    assert first["symmetric bound"] == "symmetric memory, gloo"
    assert first["tree bound"] == "gathered over gloo"


def run_threads(folder: Path, backends: list[FileSymmetric], shares: int = 0) -> list[GroupComm]:
    """The comms of two ranks, after each has summed numbers of every shape."""
    comms: list[GroupComm | None] = [None, None]
    sums: list[Any] = [None, None]

    def run(index: int) -> None:
        comm = comms[index] = GroupComm(Rank(index, 2, shares), str(folder / "meeting"), CPU, backends[index])
        sums[index] = sum_all(comm, torch.float32)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for one, other, shape in zip(*sums, SHAPES, strict=True):
        assert torch.equal(one, other)
        assert torch.equal(one, sum(numbers_of(index, shape, torch.float32) for index in range(2)))
    return [comm for comm in comms if comm is not None]


def test_small_buckets_are_summed_over_symmetric_memory_and_others_are_not(tmp_path: Path) -> None:
    backends = [FileSymmetric(tmp_path), FileSymmetric(tmp_path)]
    comms = run_threads(tmp_path, backends)
    assert [backend.adds for backend in backends] == [2 + 3, 2 + 3]  # a trial of each dtype, then three
    assert {comm.bind().variant for comm in comms} == {"symmetric memory, gloo"}


@pytest.mark.parametrize("where", ["empty", "meet", "add"])
def test_all_ranks_do_without_symmetric_memory_if_one_cannot(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest_s = 2.0 if where == "add" else 0.2  # of the rank that waits alone; in `add` both must meet first
    monkeypatch.setattr("tests.runner.file_symmetric.LONGEST_S", longest_s)
    backends = [FileSymmetric(tmp_path), FileSymmetric(tmp_path, fails_in=where)]
    with caplog.at_level(logging.INFO, "plait"):
        comms = run_threads(tmp_path, backends)
    assert {comm.bind().variant for comm in comms} == {"gloo"}
    assert all(comm.bind().skipped[0][1] for comm in comms)
    lines = [record.getMessage() for record in caplog.records if "symmetric memory" in record.getMessage()]
    assert len(lines) == 2  # one of each rank
    wanted = "a trial sum of torch.float32 is wrong" if where == "add" else f"no memory in {where}"
    assert any(wanted in line for line in lines)


def test_deterministic_ranks_never_open_symmetric_memory(tmp_path: Path) -> None:
    backends = [FileSymmetric(tmp_path, fails_in="empty"), FileSymmetric(tmp_path, fails_in="empty")]
    comms = run_threads(tmp_path, backends, shares=4)
    assert [backend.adds for backend in backends] == [0, 0]
    assert comms[0].bind().skipped == (("symmetric memory", "--deterministic adds in the tree's order"),)


class MemoryOfOne:
    """What one rank alone would have: sums are what it passed."""

    def open_group(self, name: str, rank: Rank, store: Any) -> None: ...

    def empty(self, count: int, device: torch.device, name: str) -> torch.Tensor:
        return torch.empty(count, dtype=torch.uint8)

    def meet(self, memory: torch.Tensor, name: str) -> object:
        return memory

    def add(self, part: torch.Tensor, name: str) -> torch.Tensor:
        assert name == GROUP
        return part.clone()


def test_what_sums_is_chosen_by_the_bucket_and_the_dtype() -> None:
    one_shot = OneShot(Rank(0, 2), None, CPU, MemoryOfOne())
    assert bucket_nbytes(torch.empty(65, 4096, dtype=torch.bfloat16)) == 128 * 8192
    taken = [
        one_shot.takes(torch.empty(rows, 4096, dtype=torch.bfloat16)) for rows in (1, 33, 64, 65, 127, 128)
    ]
    assert taken == [True, True, True, False, False, False]
    assert not one_shot.takes(torch.empty(1, 64, dtype=torch.float16))
    x = torch.randn(3, 5)
    assert torch.equal(one_shot.sum(x), x)
    with pytest.raises(Exception, match="3 ranks: sums in one launch are of 2, 4 or 8"):
        OneShot(Rank(0, 3), None, CPU, MemoryOfOne())


def test_torch_has_what_the_backend_calls() -> None:
    memory = TorchSymmetric._memory()
    assert all(hasattr(memory, name) for name in ("set_group_info", "empty_strided_p2p", "rendezvous"))
    schema = torch.ops.symm_mem.one_shot_all_reduce.default._schema
    assert [argument.name for argument in schema.arguments] == ["input", "reduce_op", "group_name"]


def test_a_sum_over_symmetric_memory_is_launched_on_the_gpu_that_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch launches it on the selected GPU: of every rank the first one, but where steps are captured."""
    gpu, selected, seen = torch.device("cuda", 1), list[torch.device](), list[tuple[str, object]]()
    part: Any = SimpleNamespace(device=gpu)

    @contextlib.contextmanager
    def select(device: torch.device) -> Iterator[None]:
        selected.append(device)
        yield
        selected.pop()

    def call(name: str) -> Callable[..., Any]:
        return lambda *args: seen.append((name, selected[-1:])) or part

    memory = SimpleNamespace(empty_strided_p2p=call("empty"), rendezvous=call("meet"))
    monkeypatch.setattr(torch.cuda, "device", select)
    monkeypatch.setattr(TorchSymmetric, "_memory", staticmethod(lambda: memory))
    monkeypatch.setattr(
        torch, "ops", SimpleNamespace(symm_mem=SimpleNamespace(one_shot_all_reduce=call("add")))
    )
    backend = TorchSymmetric()
    backend.meet(backend.add(backend.empty(64, gpu, GROUP), GROUP), GROUP)
    assert seen == [("empty", [gpu]), ("add", [gpu]), ("meet", [gpu])]
