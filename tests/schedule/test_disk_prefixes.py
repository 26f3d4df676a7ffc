"""Prefixes that come back from a disk: in random lives every text is that of a sequence alone."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from plait.schedule.costs import StepCosts
from plait.schedule.disk_prefixes import DiskPrefixes
from plait.schedule.plan import Drop, Load, Move, Save
from plait.state.disk.file_format import DiskNames
from plait.state.disk.index import DiskFile, DiskIndex, DiskRead, Rows
from plait.state.host_store import RowLayout
from tests.schedule.memory_model import POISON, ModelMemory
from tests.schedule.walk import SHAPES, Shape, Size, Wish, World, branch, wander


@dataclass
class Copy:
    """What `ModelMemory` saves, with what a `SavedState` says of it."""

    content: Any

    @property
    def tables(self) -> tuple[int, ...]:
        return tuple(map(len, self.content[0]))

    @property
    def has_slot(self) -> bool:
        return bool(self.content[1] != POISON)


class FakeDisk:
    """A disk without files or threads. `advance` completes reads; each fails with a chance of `faults`."""

    def __init__(self, shape: Shape, block_size: int, rng: random.Random, faults: float = 0.0) -> None:
        slot = (1,) if shape.has_slots else ()
        self.layout = RowLayout(tuple((1,) for _ in shape.groups), slot, block_size)
        self.index, self.rng, self.faults = DiskIndex(len(shape.groups)), rng, faults
        self.counts: Counter[str] = Counter()
        self.is_scanning = False
        self.contents: dict[Path, Copy] = {}
        self.offers: dict[int, DiskNames] = {}
        self.open: dict[int, DiskRead] = {}
        self.last = 0
        self.block = lambda group, name: self.index.blocks[group].get(name)
        self.snapshots = lambda parent: tuple(self.index.snapshots(parent))
        self.has_snapshot = lambda *place: self.index.snapshot(*place) is not None

    def missing(self, group: int, hashes: Sequence[bytes]) -> set[bytes]:
        return {one for one in hashes if one not in self.index.blocks[group]}

    def offer(self, names: DiskNames) -> int | None:
        if self.rng.random() < self.faults:
            return None
        self.last -= 1
        self.offers[self.last] = names
        return self.last

    def write(self, handle: int, copy: Copy) -> None:
        if (names := self.offers.pop(handle, None)) is None:
            return
        assert copy.tables == names.tables(self.layout)
        assert copy.has_slot == names.has_slot(self.layout)
        path = Path(names.file_name)
        self.contents[path] = copy
        self.index.add(DiskFile(path, 1, names))
        self.counts["written"] += 1

    def withdraw(self) -> None:
        self.offers.clear()

    def read(self, file: DiskFile, rows: Rows, *, is_ahead: bool = False) -> DiskRead | None:
        if len(self.open) > (1 if is_ahead else 3):
            return None
        assert file.names is not None
        self.last -= 1
        read = self.open[self.last] = DiskRead(self.last, file, file.names, rows)
        return read

    def advance(self) -> None:
        for read in [*self.open.values()]:
            if read.saved is not None or self.rng.random() < 0.3:
                continue
            if self.rng.random() < self.faults:
                read.has_failed = True
                self.index.remove(read.file)
                continue
            copy = self.contents[read.file.path]
            if not read.names.parent:
                picked = zip(copy.content[0], read.rows, strict=True)
                tables = tuple(tuple(table[row] for row in rows) for table, rows in picked)
                copy = Copy((tables, POISON))
            read.saved = copy  # type: ignore[assignment]
            self.counts["read"] += 1

    def get(self, handle: int) -> Any:
        return self.open[handle].saved

    def drop(self, handle: int) -> None:
        self.open.pop(handle, None)


class DiskMemory(ModelMemory):
    """Copies with handles below 0 are the disk's."""

    disk: FakeDisk

    def _move(self, move: Move) -> None:
        match move:
            case Save(handle, _, _) if handle < 0:
                limit, self.host_nbytes = self.host_nbytes, 1 << 30
                super()._move(move)
                self.host_nbytes = limit
                self.disk.write(handle, Copy(self.host.pop(handle)))
            case Load(handle, _, _) if handle < 0:
                self.host[handle] = self.disk.get(handle).content
                super()._move(move)
                del self.host[handle]
            case Drop(handle) if handle < 0:
                self.disk.drop(handle)
            case _:
                super()._move(move)


class DiskWorld(World):
    def __init__(self, shape: Shape, size: Size, disk: FakeDisk) -> None:
        super().__init__(shape, size)
        self.disk, self.may_wait = disk, True
        self.device.__class__ = DiskMemory
        self.device.disk = disk  # type: ignore[attr-defined]
        prefixes = DiskPrefixes(disk, self.s.costs, lambda: self.now)  # type: ignore[arg-type]
        self.s.memory.disk = prefixes
        self.memory.stats = self.memory.pools.stats  # type: ignore[method-assign]
        prefixes._per_file = 2

    def make_plan(self, drafts: Any = None) -> None:
        self.disk.advance()
        self.memory.stats = self.memory.pools.stats  # type: ignore[method-assign]
        super().make_plan(drafts)


def restart(world: DiskWorld) -> DiskWorld:
    """Another process with the same files: nothing else is left."""
    other = DiskWorld(world.shape, world.size, world.disk)
    world.disk.open.clear()
    world.disk.offers.clear()
    other._digests, other.told = world._digests, world.told
    other._ids = world._ids
    set_step_s(other, 10.0)  # seconds of a step of one token: no prompt gives up
    return other


def set_step_s(world: DiskWorld, seconds: float) -> None:
    costs = StepCosts()
    costs.observe(1, seconds)
    assert world.memory.disk is not None
    world.s.costs = world.memory.disk.costs = costs


def life(shape: str, seed: int, num_steps: int, faults: float) -> Counter[str]:
    rng = random.Random(f"{shape} {seed}")
    size = Size(
        num_blocks=rng.choice([10, 12, 16, 30]),
        num_spare_slots=rng.choice([1, 2, 6]),
        num_seqs=rng.randint(1, 4),
        budget=rng.randint(6, 24),
        snapshot_interval=rng.choice([4, 8, 64]),
        host_nbytes=rng.choice([0, 600, 100_000]),
    )
    world = DiskWorld(SHAPES[shape], size, FakeDisk(SHAPES[shape], size.block_size, rng, faults))
    counts: Counter[str] = Counter()
    for _ in range(3):
        wander(world, rng, num_steps, busy=0.2, faults=rng.choice([0.0, 0.02]))
        world.drain()
        assert not world.disk.open, "what was read is held by nobody"
        counts += world.counts
        world = restart(world)
    return counts + world.disk.counts


@pytest.mark.parametrize("shape", SHAPES)
def test_every_text_is_that_of_a_sequence_alone_with_a_disk_and_restarts(shape: str) -> None:
    counts = sum((life(shape, seed, 40, faults=0.1 * (seed % 2)) for seed in range(3)), Counter())
    assert counts["finished"] > 50
    assert counts["written"] > 20
    assert counts["read"] > 20


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_every_text_is_that_of_a_sequence_alone_in_long_lives(shape: str) -> None:
    for seed in range(100, 160):
        life(shape, seed, 150, faults=0.1 * (seed % 2))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_conversation_goes_on_after_a_restart_where_it_ended(shape: str) -> None:
    size = Size(num_blocks=30, num_seqs=2, max_model_len=60, budget=60)
    disk = FakeDisk(SHAPES[shape], size.block_size, random.Random(0))
    world = DiskWorld(SHAPES[shape], size, disk)
    world.submit(Wish(branch(0, 40, 0, 21), 8))
    world.drain()
    world = restart(world)
    (told,) = world.told
    (seq_id,) = world.submit(Wish((*told, 1, 2, 3), 4))
    world.drain()
    ended = len(told) - 1  # the last token of a reply is never computed
    assert world.starts[seq_id] == (ended if SHAPES[shape].has_slots else ended - ended % size.block_size)
    assert disk.counts["read"]


def test_choices_of_one_prompt_read_it_once() -> None:
    size = Size(num_blocks=30, num_seqs=4, max_model_len=60, budget=60)
    disk = FakeDisk(SHAPES["full+slots"], size.block_size, random.Random(0))
    world = DiskWorld(SHAPES["full+slots"], size, disk)
    world.submit(Wish(branch(0, 40, 0, 21), 8))
    world.drain()
    world = restart(world)
    ids = world.submit(Wish((*world.told[0], 1, 2, 3), 4, num_choices=4))
    before = disk.counts["read"]
    world.drain()
    assert disk.counts["read"] - before <= len(disk.contents)
    assert all(world.starts[one] >= len(world.told[0]) - 1 for one in ids)


def test_a_prompt_gives_up_a_disk_that_is_slower_than_computing() -> None:
    size = Size(num_blocks=30, max_model_len=60, budget=60)
    disk = FakeDisk(SHAPES["full+slots"], size.block_size, random.Random(0))
    world = DiskWorld(SHAPES["full+slots"], size, disk)
    world.submit(Wish(branch(0, 40, 0, 21), 8))
    world.drain()
    other = restart(world)
    disk.advance = lambda: None  # type: ignore[method-assign]
    (seq_id,) = other.submit(Wish((*other.told[0], 1, 2, 3), 4))
    set_step_s(other, 0.001)
    other.make_plan()
    assert other.plan is None
    other.now += 1.0  # longer than 29 tokens take
    other.make_plan()
    other.make_plan()
    assert other.starts[seq_id] == 0
    assert disk.counts["late"] == 1
    assert not disk.open
    other.drain()
    assert other.s.cache_counts["disk"] == 1


def test_files_are_read_ahead_while_a_prompt_waits_in_the_queue() -> None:
    """One place: the second conversation is read while the first runs, and begins at once in its turn."""
    size = Size(num_blocks=60, num_seqs=1, max_model_len=60, budget=60)
    disk = FakeDisk(SHAPES["full+slots"], size.block_size, random.Random(0))
    world = DiskWorld(SHAPES["full+slots"], size, disk)
    for seed in (0, 1):
        world.submit(Wish(branch(seed, 40, seed, 21), 8))
    world.drain()
    told = [*world.told]
    other = restart(world)
    (running,) = other.submit(Wish(branch(5, 40, 5, 21), 20))
    other.make_plan()
    other.execute()
    (waiting,) = other.submit(Wish((*told[1], 1, 2, 3), 4))
    set_step_s(other, 1e-9)  # in its turn it would not wait for the disk at all
    for _ in range(8):
        other.make_plan()
        other.execute()
    assert running in other.starts
    assert waiting not in other.starts
    assert disk.counts["read"] >= 2
    other.drain()
    assert other.starts[waiting] >= len(told[1]) - 1
    assert disk.counts["late"] == 0


def test_a_prompt_in_its_turn_takes_the_memory_of_what_was_read_ahead() -> None:
    size = Size(num_blocks=60, num_seqs=2, max_model_len=60, budget=60)
    disk = FakeDisk(SHAPES["full"], size.block_size, random.Random(0))
    world = DiskWorld(SHAPES["full"], size, disk)
    for seed in (0, 1):
        world.submit(Wish(branch(seed, 40, seed, 21), 8))
    world.drain()
    told = [*world.told]
    other = restart(world)
    prefixes = other.s.memory.disk
    assert prefixes is not None
    ids = [one for ids in told for one in other.submit(Wish((*ids, 1, 2, 3), 4))]
    first, second = other.s.waiting
    other.s.memory.read_ahead([second])
    assert prefixes._waits[second.id].reads
    real = disk.read
    disk.read = lambda *given, is_ahead=False: (  # type: ignore[method-assign]
        None if disk.open else real(*given, is_ahead=is_ahead)
    )
    assert prefixes.awaits(other.s.memory.pools, first, other.s.memory.lookup(first))
    assert second.id not in prefixes._waits
    disk.read = real  # type: ignore[method-assign]
    other.drain()
    assert all(other.starts[one] for one in ids)
