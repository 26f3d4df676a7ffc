"""Prefixes on the disk: what sequences compute is written behind the steps, and found again by later ones.

A copy is made by a `Save` with a handle below 0, and what was read comes back by `Load`. Both are moves
before a pass, in their order, so no block is copied after it was given to another sequence. What comes back
becomes cached memory, as if it had been computed here, and the prompt's next lookup finds it. Until then the
sequence waits in the queue: no longer than computing would take, by the measured costs of steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from msgspec import Struct, field

from plait.schedule.costs import StepCosts
from plait.schedule.plan import Drop, Load, Save
from plait.schedule.pools import Pools
from plait.schedule.sequence import TokenSequence
from plait.state.blocks import GARBAGE, Hit, PrefixPlace, Snapshot, window_start
from plait.state.disk.cache import DiskCache
from plait.state.disk.file_format import DiskNames
from plait.state.disk.index import DiskFile, DiskRead, Rows

FILE_NBYTES = 4 << 20  # of a file with blocks, about
MOST_BLOCKS = 256  # of a group in a file
SCAN_S = 2.0  # that a prompt waits for the list of files, at startup
UNMEASURED_S = 10.0  # that a prompt waits while no step was measured
MOST_AHEAD = 4  # sequences of the queue that are read for before their turn
LOOK_AGAIN_S = 0.05  # between two searches for the same sequence
Tables = Sequence[Sequence[int]]
# Tokens of a prefix, where it ends, and the files and rows to be read for it, the first one last.
Found = tuple[int, PrefixPlace, list[tuple[DiskFile, Rows]]]


class DiskWait(Struct):
    """A sequence that waits for files. `left`: files and rows to be read, the first one last."""

    until: float
    left: list[tuple[DiskFile, Rows]] = field(default_factory=list)
    reads: list[DiskRead] = field(default_factory=list)
    seconds: float = 0.0  # that it may take, from when its turn comes
    is_ahead: bool = False  # its turn has not come yet
    next_look: float = 0.0
    target: PrefixPlace = (b"", ())  # where its prefix ends
    follows: DiskWait | None = None  # one with the same target, which reads for both
    has_failed: bool = False
    is_over: bool = False

    @property
    def is_active(self) -> bool:
        return bool(self.reads or self.left)


class DiskPrefixes:
    """Writes and finds prefixes of sequences. `costs` and `clock` are the scheduler's."""

    def __init__(self, disk: DiskCache, costs: StepCosts, clock: Callable[[], float]) -> None:
        self.disk, self.costs, self.clock = disk, costs, clock
        self._scan_until = clock() + SCAN_S
        self._written: dict[int, int] = {}  # by sequence id: blocks that were offered
        self._waits: dict[int, DiskWait] = {}  # by sequence id
        sizes = [sum(widths) for widths in disk.layout.groups]
        self._per_file = min(max(FILE_NBYTES // max(sum(sizes), 1), 1), MOST_BLOCKS)

    # To the disk

    def keep_blocks(self, pools: Pools, seq: TokenSequence, *, all_of_them: bool = False) -> None:
        """Write the whole blocks that are new on the disk, once they fill a file or one leaves its window."""
        first, whole = self._written.get(seq.id, 0), seq.num_recorded
        if not seq.tables or whole <= first:
            return
        length, size = seq.num_computed_tokens, pools.block_size
        leaves = any(w and window_start(w, length, size, whole) > first for w in pools.index.windows)
        if whole - first < self._per_file and not leaves and not all_of_them:
            return
        hashes = seq.chain[1 : whole + 1]
        new = [self.disk.missing(g, hashes[first:]) for g in range(len(seq.tables))]
        for start in range(first, whole, self._per_file):
            places = range(start, min(start + self._per_file, whole))
            rows = [
                [i for i in places if table[i] and hashes[i] in missing]
                for table, missing in zip(seq.tables, new, strict=True)
            ]
            names = DiskNames(tuple(tuple([hashes[i] for i in chosen]) for chosen in rows))
            blocks = [[table[i] for i in chosen] for table, chosen in zip(seq.tables, rows, strict=True)]
            if any(rows) and not self._save(pools, names, blocks, GARBAGE):
                return
            self._written[seq.id] = places.stop

    def keep_snapshot(
        self, pools: Pools, seq: TokenSequence, place: PrefixPlace, partial: Sequence[int]
    ) -> None:
        """Write the state of a sequence as it is now, and the blocks before it."""
        self.keep_blocks(pools, seq, all_of_them=True)
        if not self.disk.has_snapshot(*place):
            tables = [[block] for block in partial] or [[] for _ in seq.tables]
            self._save(pools, DiskNames(parent=place[0], rest=place[1]), tables, seq.slot)

    def _save(self, pools: Pools, names: DiskNames, blocks: Tables, slot: int) -> bool:
        if (handle := self.disk.offer(names)) is None:
            return False
        pools.moves.append(Save(handle, tuple(map(tuple, blocks)), slot))
        return True

    # From the disk

    def insert_arrived(self, pools: Pools, seq: TokenSequence) -> None:
        """Make what was read for a sequence cached memory."""
        if (wait := self._waits.get(seq.id)) is None or wait.is_over:
            return
        if wait.reads:
            pools.introduce(seq, len(seq.chain) - 1)
        while wait.reads and wait.reads[0].saved is not None and self._insert(pools, wait.reads[0]):
            wait.reads.pop(0)

    def explain(self, seq: TokenSequence, hit: Hit) -> Hit:
        """A miss with the cause "disk", if the prefix was there and could not be read."""
        wait = self._waits.get(seq.id)
        return replace(hit, cause="disk") if wait and wait.has_failed and not hit.length else hit

    def awaits(self, pools: Pools, seq: TokenSequence, hit: Hit) -> bool:
        """Whether a sequence should wait, because the disk has more of its prefix than `hit`."""
        wait, now = self._waits.get(seq.id), self.clock()
        if hit.cause == "off" or seq.saved or (wait and wait.is_over):
            return False
        if wait is None:
            if self.disk.is_scanning and now < self._scan_until:
                return True
            wait = self._waits[seq.id] = DiskWait(0.0)
        wait.is_ahead = False
        self._read_on(wait)
        if failed := any(read.has_failed for read in wait.reads):
            wait.has_failed = True
            self._give_up(wait)
        is_read = wait.is_active or (wait.follows is not None and wait.follows.is_active)
        if not is_read and now >= wait.next_look:
            is_read = self._look(pools, seq, hit, wait)
        if is_read and not wait.until:
            wait.until = now + wait.seconds
        if not is_read or now < wait.until:
            return is_read or failed  # the next lookup explains the miss
        self.disk.counts["late"] += 1
        wait.has_failed = wait.is_over = True
        self._give_up(wait)
        return True

    def read_ahead(self, pools: Pools, waiting: Sequence[TokenSequence]) -> None:
        """Begin to read for sequences with others before them, so that the files are there in their turn."""
        if self.disk.is_scanning:
            return
        for seq in waiting:
            if (known := self._waits.get(seq.id)) is None:
                wait = self._waits[seq.id] = DiskWait(0.0, is_ahead=True)
                hit = pools.index.lookup(seq.chain, seq.token_ids, seq.num_tokens - 1)
                self._look(pools, seq, hit, wait)
            elif known.is_ahead:
                self._read_on(known)

    def forget(self, seq: TokenSequence) -> None:
        """A sequence starts, or is gone: nothing is read for it any more."""
        self._written.pop(seq.id, None)
        if (wait := self._waits.pop(seq.id, None)) is not None:
            self._give_up(wait)

    def reset(self) -> None:
        """Memory begins again: copies that were to be made are not made."""
        self._written.clear()
        self.disk.withdraw()

    def _give_up(self, wait: DiskWait) -> None:
        for read in wait.reads:
            self.disk.drop(read.handle)
        wait.reads, wait.left = [], []

    def _give_up_ahead(self) -> None:
        """Free the memory of what was read ahead, because a sequence needs it in its turn."""
        for seq_id in [seq_id for seq_id, wait in self._waits.items() if wait.is_ahead]:
            self._give_up(self._waits.pop(seq_id))

    def _read_on(self, wait: DiskWait) -> None:
        """Begin to read as many files as there is memory for."""
        while wait.left:
            read = self.disk.read(*wait.left[-1], is_ahead=wait.is_ahead)
            if read is None and not wait.is_ahead and not wait.reads:
                self._give_up_ahead()
                read = self.disk.read(*wait.left[-1])
            if read is None:
                return
            wait.reads.append(read)
            wait.left.pop()

    def _look(self, pools: Pools, seq: TokenSequence, hit: Hit, wait: DiskWait) -> bool:
        """Search for more than `hit`, and begin to read it. False: there is nothing."""
        wait.next_look = self.clock() + LOOK_AGAIN_S
        if (found := self._find(pools, seq, hit)) is None:
            return False
        length, wait.target, files = found
        if not wait.until:
            seconds = self.costs.step_s(length - hit.length)
            wait.seconds = UNMEASURED_S if seconds is None else seconds
        others = (one for one in self._waits.values() if one is not wait and one.is_active)
        wait.follows = next((one for one in others if one.target == wait.target), None)
        if wait.follows is None:
            wait.left = files
            self._read_on(wait)
        else:
            wait.next_look = 0.0  # as soon as that one is done
        return True

    def _find(self, pools: Pools, seq: TokenSequence, hit: Hit) -> Found | None:
        """The longest prefix beyond `hit` that memory and disk have together, if there is memory for it."""
        index, chain, size = pools.index, seq.chain, pools.block_size
        limit = seq.num_tokens - 1
        whole = min(limit // size, len(chain) - 1)
        for i in range(self._count_known(pools, chain, whole), hit.length // size - 1, -1):
            for rest, file in self._starts(pools, seq, i, limit):
                length = i * size + len(rest)
                if length <= hit.length or (blocks := self._missing(pools, chain, i, length)) is None:
                    continue
                if file is None and not blocks:
                    continue
                if not self._fits(pools, blocks, file):
                    return None
                for pool, known in zip(pools.blocks, index.blocks, strict=True):
                    for one in chain[1 : i + 1]:
                        pool.touch(known.get(one, GARBAGE))
                files = [(one, _rows(one, hashes)) for one, hashes in blocks.items()]
                nothing: Rows = tuple(() for _ in pools.blocks)
                first = [(file, nothing)] if file is not None else []
                return length, (chain[i], rest), [*reversed(files), *first]
        return None

    def _count_known(self, pools: Pools, chain: Sequence[bytes], whole: int) -> int:
        """How many whole blocks every group of full attention has, in memory or on the disk."""
        full = [g for g, window in enumerate(pools.index.windows) if window is None]
        blocks, find = pools.index.blocks, self.disk.block
        for i in range(whole):
            if any(chain[i + 1] not in blocks[g] and find(g, chain[i + 1]) is None for g in full):
                return i
        return whole

    def _starts(
        self, pools: Pools, seq: TokenSequence, i: int, limit: int
    ) -> list[tuple[tuple[int, ...], DiskFile | None]]:
        """(tokens behind i whole blocks, file of a snapshot, if it is on the disk) where a prefix may end."""
        index, start, parent = pools.index, i * pools.block_size, seq.chain[i]
        found: dict[tuple[int, ...], DiskFile | None] = dict(self.disk.snapshots(parent))
        found.update({s.rest: None for s in index.snapshots.get(parent, ())})
        if not index.has_slots:
            found = {(): None}
        places = sorted(found.items(), key=lambda item: -len(item[0]))
        return [
            (rest, file)
            for rest, file in places
            if start + len(rest) <= limit and tuple(seq.token_ids[start : start + len(rest)]) == rest
        ]

    def _missing(
        self, pools: Pools, chain: Sequence[bytes], whole: int, length: int
    ) -> dict[DiskFile, list[list[bytes]]] | None:
        """Of the blocks that a prefix needs those not in memory, by file and group; None: one is nowhere."""
        found: dict[DiskFile, list[list[bytes]]] = {}
        for g, window in enumerate(pools.index.windows):
            first, known = window_start(window, length, pools.block_size, whole), pools.index.blocks[g]
            for chain_hash in chain[first + 1 : whole + 1]:
                if chain_hash in known:
                    continue
                if (file := self.disk.block(g, chain_hash)) is None:
                    return None
                found.setdefault(file, [[] for _ in pools.blocks])[g].append(chain_hash)
        return found

    def _fits(
        self, pools: Pools, blocks: Mapping[DiskFile, list[list[bytes]]], file: DiskFile | None
    ) -> bool:
        """Whether there is memory that no sequence holds for all that is missing."""
        beside = int(file is not None)
        for g, pool in enumerate(pools.blocks):
            if sum(len(hashes[g]) for hashes in blocks.values()) + beside > pool.num_available:
                return False
        return pools.slots is None or pools.slots.num_available > 0

    def _insert(self, pools: Pools, read: DiskRead) -> bool:
        """Put what was read into memory that becomes cached; False: there is none that is not in use."""
        saved, names, index = read.saved, read.names, pools.index
        assert saved is not None
        if names.parent and index.find(names.parent, names.rest) is not None:
            pools.moves.append(Drop(read.handle))
            return True
        if any(n > pool.num_available for n, pool in zip(saved.tables, pools.blocks, strict=True)):
            return False
        if saved.has_slot and not (pools.slots and pools.slots.num_available):
            return False
        taken = tuple(pool.take(n) for pool, n in zip(pools.blocks, saved.tables, strict=True))
        slot = pools.take_slot() if saved.has_slot else GARBAGE
        pools.moves += [Load(read.handle, taken, slot), Drop(read.handle)]
        if names.parent:
            partial = tuple(block for table in taken for block in table)
            pools.keep(Snapshot(names.parent, names.rest, slot, partial))
        else:
            for g, (pool, chosen) in enumerate(zip(pools.blocks, read.rows, strict=True)):
                for row, block in zip(chosen, taken[g], strict=True):
                    chain_hash = names.blocks[g][row]
                    index.saw(chain_hash)
                    if index.record(g, chain_hash, block):
                        pool.keep(block)
        for pool, blocks in zip(pools.blocks, taken, strict=True):
            pool.give(reversed(blocks))
        pools.give_slot(slot)
        return True


def _rows(file: DiskFile, hashes: Sequence[Sequence[bytes]]) -> Rows:
    """Where in a file's blocks these are, by group."""
    assert file.names is not None
    found = []
    for known, chosen in zip(file.names.blocks, hashes, strict=True):
        row_of = {chain_hash: row for row, chain_hash in enumerate(known)}
        found.append(tuple([row_of[chain_hash] for chain_hash in chosen]))
    return tuple(found)
