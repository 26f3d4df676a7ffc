"""Pools of blocks, slots and host memory, and the cached content that no sequence holds. Integers only.

What is cached is evicted when a sequence needs the memory, the least recently used first. A snapshot's slot
goes to host memory if there is space. `moves` are what the device has to copy, in order, before the next
pass.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from msgspec import Struct

from plait.schedule.plan import CopyBlock, CopySlot, Drop, Load, Move, Save, StepPlan
from plait.schedule.sequence import SavedSequence, TokenSequence
from plait.state.blocks import GARBAGE, BlockPool, PrefixIndex, PrefixListener, PrefixPlace, Snapshot


class CacheOptions(Struct, frozen=True, kw_only=True):
    """Settings of the prefix cache and of swapping.

    `shares` False: only the choices of one request share. `host_nbytes` 0: nothing is ever swapped.
    `block_nbytes` (by group) and `slot_nbytes`: bytes that one takes in host memory.
    """

    shares: bool = True
    snapshot_interval: int = 512
    block_nbytes: tuple[int, ...] = ()
    slot_nbytes: int = 0
    host_nbytes: int = 0


class Pools:
    """The pools of blocks, one per group, and of slots.

    `num_blocks`: one number per group, the garbage block included; `num_slots` 0: there are no slots.
    """

    def __init__(
        self,
        windows: Sequence[int | None],
        num_blocks: Sequence[int],
        num_slots: int,
        block_size: int,
        options: CacheOptions,
        listener: PrefixListener | None = None,
    ) -> None:
        self.options, self.block_size = options, block_size
        self.blocks = tuple(BlockPool(n, partial(self._evict_block, g)) for g, n in enumerate(num_blocks))
        slots = BlockPool(num_slots, self._evict_slot, what="slot", option="--max-num-seqs")
        self.slots = slots if num_slots else None
        self.index = PrefixIndex(windows, block_size, self.slots is not None, listener)
        if listener is not None:
            listener.clear()
        self.host = HostSpace(options.host_nbytes, lambda handle: self._lose(self._spilled[handle]))
        self.moves: list[Move] = []
        self._spilled: dict[int, Snapshot] = {}
        self.num_host_hits = 0  # sequences that began with a snapshot from host memory
        self._nowhere: tuple[tuple[int, ...], ...] = tuple(() for _ in num_blocks)

    def introduce(self, seq: TokenSequence, num_blocks: int) -> None:
        """Give an index's listener the names of a sequence's first blocks: something is kept behind them."""
        if self.index.listener is not None:
            self.index.listener.introduce(seq.chain, seq.token_ids, num_blocks)

    def take_slot(self) -> int:
        """A slot, or 0 if the model has no use for one. Raises OutOfBlocks."""
        return self.slots.take(1)[0] if self.slots else GARBAGE

    def give_slot(self, slot: int) -> None:
        if self.slots and slot:
            self.slots.give((slot,))

    def start_from(self, snapshot: Snapshot | None) -> int:
        """A slot for a sequence, with the snapshot's state copied into it."""
        if not self.slots:
            return GARBAGE
        if snapshot and snapshot.handle:
            self.num_host_hits += 1
            self.host.pin(snapshot.handle)
            slot = self.take_slot()
            self.host.unpin(snapshot.handle)
            self.moves.append(Load(snapshot.handle, self._nowhere, slot))
            return slot
        source = snapshot.slot if snapshot else GARBAGE
        self.slots.touch(source)
        slot = self.take_slot()
        if source not in (GARBAGE, slot):  # if it was the only one left, what is in it is there already
            self.moves.append(CopySlot(source, slot))
        return slot

    def copy_of(self, group: int, block: int) -> int:
        """A private copy of a block, for the sequence that writes to it."""
        self.blocks[group].touch(block)
        (own,) = self.blocks[group].take(1)
        if own != block:
            self.moves.append(CopyBlock(group, block, own))
        return own

    def take_snapshot(self, place: PrefixPlace, slot: int, partial: Sequence[int], *, is_spare: bool) -> None:
        """Copy a slot and partly filled blocks, so that others can start there, if there is capacity."""
        if (known := self.index.find(*place)) is not None:
            self.touch(known)
            return
        crowded = self.slots is not None and not self.slots.num_available
        if crowded or (partial and any(not pool.num_available for pool in self.blocks)):
            return
        copies = tuple(self.copy_of(g, block) for g, block in enumerate(partial))
        own = self.take_slot()
        if own:
            self.moves.append(CopySlot(slot, own))
        self.keep(Snapshot(*place, own, copies, is_spare=is_spare))
        for pool, block in zip(self.blocks, copies, strict=False):
            pool.give((block,))
        self.give_slot(own)
        if self.slots and is_spare:
            self.slots.cool(own)

    def keep(self, snapshot: Snapshot) -> None:
        """Make what a sequence still holds a snapshot, which stays cached when the sequence releases it."""
        self.index.add(snapshot)
        for pool, block in self._places(snapshot):
            pool.keep(block)

    def touch(self, snapshot: Snapshot) -> None:
        """Mark a snapshot as recently used."""
        snapshot.is_spare = False
        for pool, block in self._places(snapshot):
            pool.touch(block)

    def _places(self, snapshot: Snapshot) -> Iterator[tuple[BlockPool, int]]:
        if self.slots and snapshot.slot:
            yield self.slots, snapshot.slot
        yield from zip(self.blocks, snapshot.blocks, strict=False)

    # Host memory

    def nbytes(self, tables: Iterable[Sequence[int]]) -> int:
        """Bytes of host memory that a sequence with these tables takes."""
        sizes = zip(tables, self.options.block_nbytes, strict=True)
        blocks = sum(nbytes * sum(map(bool, table)) for table, nbytes in sizes)
        return blocks + (self.options.slot_nbytes if self.slots else 0)

    def can_save(self, tables: Sequence[Sequence[int]]) -> bool:
        return bool(self.options.host_nbytes) and self.host.can_take(self.nbytes(tables))

    def save(self, tables: Sequence[Sequence[int]], slot: int, length: int) -> SavedSequence:
        """Copy a sequence's state of `length` tokens to host memory, where `can_save`."""
        handle = self.host.take(self.nbytes(tables))
        assert handle is not None, "there is no memory to save a sequence"
        blocks = tuple(tuple(b for b in table if b) for table in tables)
        holes = tuple(len(table) - len(b) for table, b in zip(tables, blocks, strict=True))
        self.moves.append(Save(handle, blocks, slot))
        return SavedSequence(handle, length, self.nbytes(tables), holes, tuple(map(len, blocks)))

    def load(self, saved: SavedSequence) -> tuple[tuple[list[int], ...], int]:
        """Block tables and a slot with what was saved."""
        taken = tuple(pool.take(n) for pool, n in zip(self.blocks, saved.num_blocks, strict=True))
        slot = self.take_slot()
        self.moves.append(Load(saved.handle, taken, slot))
        return tuple([GARBAGE] * n + [*t] for n, t in zip(saved.holes, taken, strict=True)), slot

    def drop(self, handle: int) -> None:
        """Free a saved copy."""
        self.host.give(handle)
        self.moves.append(Drop(handle))

    def count_moved(self, plan: StepPlan) -> int:
        """Bytes that a plan moves to or from host memory."""
        total = 0
        for move in plan.moves:
            if isinstance(move, Save | Load):
                total += sum(len(b) * n for b, n in zip(move.blocks, self.options.block_nbytes, strict=False))
                total += self.options.slot_nbytes if move.slot else 0
        return total

    def stats(self) -> dict[str, int]:
        """Numbers of blocks (of all groups) and slots, bytes of host memory."""
        slots = self.slots or BlockPool(1)
        return {
            "num_blocks": sum(max(pool.num_blocks - 1, 0) for pool in self.blocks),
            "num_free_blocks": sum(pool.num_free for pool in self.blocks),
            "num_cached_blocks": sum(pool.num_cached for pool in self.blocks),
            "num_slots": slots.num_blocks - 1,
            "num_free_slots": slots.num_free,
            "num_snapshots": slots.num_cached,
            "host_nbytes": self.host.num_used_bytes,
        }

    # Eviction

    def _evict_block(self, group: int, block: int) -> None:
        if snapshot := self.index.forget(group, block):
            self._lose(snapshot)

    def _evict_slot(self, slot: int) -> None:
        snapshot = self.index.in_slot(slot)
        assert snapshot is not None, f"slot {slot} is cached and holds no snapshot"
        goes = not snapshot.is_spare and self.options.host_nbytes > 0
        handle = self.host.take(self.options.slot_nbytes, spare=True) if goes else None
        if handle is None:
            self._lose(snapshot)
            return
        self.moves.append(Save(handle, self._nowhere, slot))
        self.index.move_to_host(snapshot, handle)
        self._spilled[handle] = snapshot

    def _lose(self, snapshot: Snapshot) -> None:
        """Remove a snapshot of which one part is gone, because the others are of no use."""
        self.index.remove(snapshot)
        for pool, block in self._places(snapshot):
            pool.drop(block)
        if snapshot.handle:
            del self._spilled[snapshot.handle]
            self.drop(snapshot.handle)

    # Invariants

    def check(self, held: Sequence[Counter[int]], slots: Counter[int], handles: set[int]) -> None:
        """Every block (by group), slot and handle is explained by its holder; else AssertionError."""
        self.index.check()
        for g, (pool, refs) in enumerate(zip(self.blocks, held, strict=True)):
            _check_pool(pool, refs, self.index.list_kept(g), f"block of group {g}")
        if self.slots:
            _check_pool(self.slots, slots, self.index.kept_slots, "slot")
        assert self.host.handles == handles | self._spilled.keys(), "a saved copy is lost"
        assert not handles & self._spilled.keys(), "a saved copy is a sequence's and a snapshot's"


class HostSpace:
    """Gives out handles while their bytes fit into `nbytes`.

    A handle is *needed* (a sequence resumes from it) or *spare*. The oldest spare ones are evicted when space
    runs out, and `on_evict(handle)` is called.
    """

    def __init__(self, nbytes: int, on_evict: Callable[[int], None]) -> None:
        self.nbytes, self._on_evict = nbytes, on_evict
        self.num_used_bytes = 0
        self._sizes: dict[int, int] = {}
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._last = 0

    @property
    def handles(self) -> set[int]:
        return set(self._sizes)

    def can_take(self, nbytes: int) -> bool:
        """Whether so many bytes fit once spare ones are evicted."""
        spare = sum(self._sizes[handle] for handle in self._spare)
        return self.num_used_bytes - spare + nbytes <= self.nbytes

    def take(self, nbytes: int, *, spare: bool = False) -> int | None:
        """A new handle, or None if it does not fit."""
        if not self.can_take(nbytes):
            return None
        while self.num_used_bytes + nbytes > self.nbytes:
            self._on_evict(next(iter(self._spare)))
        self._last += 1
        self._sizes[self._last] = nbytes
        self.num_used_bytes += nbytes
        if spare:
            self._spare[self._last] = None
        return self._last

    def pin(self, handle: int) -> None:
        """Protect a spare handle from eviction while it is in use."""
        del self._spare[handle]

    def unpin(self, handle: int) -> None:
        """Make a handle spare again, and the last to be evicted."""
        self._spare[handle] = None

    def give(self, handle: int) -> None:
        """Free a handle that is not needed any more."""
        self.num_used_bytes -= self._sizes.pop(handle)
        self._spare.pop(handle, None)


def _check_pool(pool: BlockPool, refs: Counter[int], kept: set[int], what: str) -> None:
    pool.check()
    for block in range(1, pool.num_blocks):
        assert pool.refs(block) == refs[block], (
            f"{what} {block}: {pool.refs(block)} references, {refs[block]} holders"
        )
        if pool.is_cached(block):
            assert block in kept, f"{what} {block} is cached and cannot be found"
    assert all(pool.refs(b) or pool.is_cached(b) for b in kept), f"a {what} that is known was given away"
