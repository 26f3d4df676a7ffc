"""Allocates block tables and slots to sequences, shares cached prefixes, takes snapshots. Integers only."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from plait.memory import BlockGroup
from plait.schedule.branching import branch, drop_draft, settle_draft
from plait.schedule.disk_prefixes import MOST_AHEAD, DiskPrefixes
from plait.schedule.plan import Drop, Move, Save
from plait.schedule.pools import CacheOptions, Pools
from plait.schedule.sequence import TokenSequence
from plait.state.blocks import GARBAGE, Hit, PrefixListener, PrefixPlace, Snapshot, extend, root


def num_window_blocks(window: int, block_size: int) -> int:
    """The most blocks of a windowed group that a sequence holds, without those of the tokens it computes."""
    return -(-(window - 1) // block_size) + 2


class Allocation:
    """Gives blocks and slots to sequences and takes them back.

    `num_blocks`: one number per group, the garbage block included. `num_slots` 0: the model has no recurrent
    state, and every sequence's slot is 0. `max_step_len`: the most tokens in one step. `trims` False: windows
    are never given back and nothing is cached, because a model that is not causal reads all again.
    """

    def __init__(
        self,
        groups: Sequence[BlockGroup],
        num_blocks: Sequence[int],
        block_size: int,
        *,
        num_slots: int,
        max_step_len: int,
        trims: bool = True,
        cache: CacheOptions | None = None,
    ) -> None:
        assert len(groups) == len(num_blocks)
        self.groups, self.block_size, self.max_step_len = tuple(groups), block_size, max_step_len
        self.windows = tuple(group.window if trims else None for group in self.groups)
        self.options, self._caches = cache or CacheOptions(), trims
        self._trims = any(window is not None for window in self.windows)
        self._num_blocks, self._num_slots, self.has_slots = num_blocks, num_slots, num_slots > 0
        self._computing: dict[bytes, TokenSequence] = {}
        self.disk: DiskPrefixes | None = None
        self.listener: PrefixListener | None = None  # set by `follow_prefixes`
        self.keeps_rows = False  # whether a step can keep recurrent state behind single rows
        self.ends_steps = False  # whether several steps of a plan can end behind a stop token
        self.pools = self._new_pools()

    def _new_pools(self) -> Pools:
        sizes = self._num_blocks, self._num_slots, self.block_size
        return Pools(self.windows, *sizes, self.options, self.listener)

    # What fits

    def count_needed(self, group: int, lengths: Iterable[int]) -> int:
        """The most blocks of a group that sequences of these lengths hold together in any step."""
        blocks, window = [-(-length // self.block_size) for length in lengths], self.windows[group]
        if window is None:
            return sum(blocks)
        most = num_window_blocks(window, self.block_size)
        new = sum(max(n - most, 0) for n in blocks)
        return sum(min(n, most) for n in blocks) + min(new, -(-self.max_step_len // self.block_size))

    def shortage(self, *lengths: int) -> tuple[int, int] | None:
        """(blocks needed, blocks there are) in the first group where sequences of these lengths never fit."""
        for g, pool in enumerate(self.pools.blocks):
            if (needed := self.count_needed(g, lengths)) > pool.num_blocks - 1:
                return needed, pool.num_blocks - 1
        return None

    def can_hold(
        self,
        seq: TokenSequence,
        hit: Hit,
        running: Sequence[TokenSequence],
        others: Sequence[TokenSequence] = (),
    ) -> bool:
        """Whether all known tokens of `seq`, of `others` (which share nothing) and of the running sequences
        fit together."""
        if self.pools.slots and self.pools.slots.num_available <= len(others):
            return False
        for g, pool in enumerate(self.pools.blocks):
            if self.windows[g] is not None:
                lengths = [other.length for other in (seq, *others, *running)]
                if self.count_needed(g, lengths) > pool.num_blocks - 1:
                    return False
                continue
            shared = hit.blocks[g] if hit.length and not self._is_restored(seq, hit) else ()
            held = [(-(-other.length // self.block_size), other.tables[g]) for other in running]
            missing = sum(max(needed - len(table), 0) for needed, table in held)
            missing += sum(-(-one.length // self.block_size) for one in (seq, *others)) - len(shared)
            if missing > pool.num_available - sum(pool.is_cached(block) for block in shared):
                return False
        return True

    # What is known already

    def lookup(self, seq: TokenSequence) -> Hit:
        """The cached prefix of a waiting sequence, which it need not compute."""
        if not self._caches:
            return Hit()
        self._extend(seq)
        if seq.needs_all_tokens:
            return Hit()
        if self.disk:
            self.disk.insert_arrived(self.pools, seq)
        hit = self.pools.index.lookup(seq.chain, seq.token_ids, seq.num_tokens - 1)
        return self.disk.explain(seq, hit) if self.disk else hit

    def awaits_prefix(self, seq: TokenSequence, hit: Hit) -> bool:
        """Whether `seq` should wait, because more of its prefix is about to be computed or read."""
        if self.leader(seq, hit) is not None:
            return True
        return self.disk is not None and self.disk.awaits(self.pools, seq, hit)

    def read_ahead(self, waiting: Sequence[TokenSequence]) -> None:
        """Begin to read from the disk for the first sequences that wait, in their order."""
        if self.disk is None or not self._caches:
            return
        first = [seq for seq in waiting[:MOST_AHEAD] if not (seq.saved or seq.needs_all_tokens)]
        for seq in first:
            self._extend(seq)
        self.disk.read_ahead(self.pools, first)

    def leader(self, seq: TokenSequence, hit: Hit) -> TokenSequence | None:
        """The running sequence that is about to compute a prefix of `seq`, which should wait for it."""
        whole = hit.length // self.block_size
        if seq.saved or hit.cause == "off" or whole + 1 >= len(seq.chain):
            return None
        leader = self._computing.get(seq.chain[whole + 1])
        if leader is None or leader is seq:
            return None
        forks = seq.request_id == leader.request_id and seq.canvas is None
        point = self._common_length(seq, leader)
        if not self.has_slots and not forks:
            point -= point % self.block_size
        if point < hit.length + self.block_size or leader.num_computed_tokens >= point:
            return None
        if self.has_slots or forks:
            leader.marks.add(point)
        return leader

    def _common_length(self, seq: TokenSequence, other: TokenSequence) -> int:
        most = min(len(seq.chain), len(other.chain))
        whole = next((i for i in range(1, most) if seq.chain[i] != other.chain[i]), most) - 1
        length, limit = whole * self.block_size, min(seq.num_tokens - 1, other.num_tokens)
        while length < limit and seq.token_ids[length] == other.token_ids[length]:
            length += 1
        return min(length, limit)

    def _extend(self, seq: TokenSequence) -> None:
        if not self.options.shares and len(seq.chain) == 1:
            seq.chain[0] = root(f"{seq.cache_salt}\0{seq.request_id}")
        extend(seq.chain, seq.token_ids, self.block_size)

    # A sequence's life

    def open(self, seq: TokenSequence, hit: Hit) -> None:
        """Give tables and a slot to a sequence that starts or resumes, with its cached or saved state."""
        if seq.saved and self._is_restored(seq, hit):
            seq.tables, seq.slot = self.pools.load(seq.saved)
            seq.num_computed_tokens = seq.saved.length
        else:
            self._start(seq, hit)
        self.forget_saved(seq)
        seq.num_recorded = seq.num_computed_tokens // self.block_size
        if not self._caches:
            return
        for chain_hash in seq.chain[seq.num_recorded + 1 :]:
            self._computing.setdefault(chain_hash, seq)
        if self.has_slots:
            junction = hit.seen if hit.seen + self.block_size < seq.prompt_len else 0
            places = {seq.prompt_len - 1, *seq.boundaries, junction}
            first = max(self.block_size, seq.num_computed_tokens + 1)
            seq.marks |= {p for p in places if first <= p < seq.prompt_len}

    def _is_restored(self, seq: TokenSequence, hit: Hit) -> bool:
        """Whether the sequence's saved state covers more tokens than the cached prefix."""
        return seq.saved is not None and hit.length < seq.saved.length

    def _start(self, seq: TokenSequence, hit: Hit) -> None:
        seq.tables = tuple(list(blocks) for blocks in hit.blocks) or tuple([] for _ in self.groups)
        for pool, table in zip(self.pools.blocks, seq.tables, strict=True):
            pool.ref(block for block in table if block)
        seq.num_computed_tokens = hit.length
        partial = hit.snapshot.blocks if hit.snapshot else ()
        seq.slot = self.pools.start_from(hit.snapshot)
        for g, block in enumerate(partial):
            seq.tables[g].append(self.pools.copy_of(g, block))

    def forget_saved(self, seq: TokenSequence) -> None:
        """Drop the sequence's copy in host memory and what is read for it: neither is needed any more."""
        if self.disk:
            self.disk.forget(seq)
        if seq.saved:
            self.pools.drop(seq.saved.handle)
            seq.saved = None

    def reserve(self, seq: TokenSequence, length: int) -> bool:
        """Reserve blocks for the first `length` tokens, in every group or in none."""
        blocks = -(-length // self.block_size)
        return all(len(table) >= blocks for table in seq.tables) or self._lengthen([seq], [blocks])

    def reserve_ahead(self, sequences: Sequence[TokenSequence], count: int) -> bool:
        """Reserve blocks for `count` more tokens of each sequence, in every group: for all or for none."""
        return self.reserve_all(sequences, [seq.num_computed_tokens + count for seq in sequences])

    def limit_ahead(self, sequences: Sequence[TokenSequence], most: int, *, is_copied: bool) -> int:
        """How many steps one plan can have, at most `most`: blocks are reserved, slots can be copied."""
        if (slots := self.pools.slots) and most > 1:  # a plan ends where a snapshot is needed
            can_copy = not is_copied or slots.num_available >= len(sequences)
            most = min(most, *map(self.until_mark, sequences)) if can_copy else 1
        return most if most > 1 and self.reserve_ahead(sequences, most) else 1

    def reserve_all(self, sequences: Sequence[TokenSequence], lengths: Sequence[int]) -> bool:
        """Reserve blocks for so many tokens of each sequence, in every group: for all or for none."""
        return self._lengthen(sequences, [-(-length // self.block_size) for length in lengths])

    def _lengthen(self, sequences: Sequence[TokenSequence], blocks: Sequence[int]) -> bool:
        pools, pairs = self.pools.blocks, list(zip(sequences, blocks, strict=True))
        for g, pool in enumerate(pools):
            if sum(max(n - len(seq.tables[g]), 0) for seq, n in pairs) > pool.num_available:
                return False
        for seq, n in pairs:
            for pool, table in zip(pools, seq.tables, strict=True):
                table.extend(pool.take(max(n - len(table), 0)))
        return True

    def until_mark(self, seq: TokenSequence) -> int:
        """Tokens up to the next position where a snapshot is needed: a chunk ends there at the latest."""
        start, interval = seq.num_computed_tokens, self.options.snapshot_interval
        if not self.has_slots or not self._caches:
            return seq.max_len
        every = (start // interval + 1) * interval
        return min((mark for mark in (*seq.marks, every) if mark > start), default=every) - start

    def branch(self, seq: TokenSequence, num_drafted: int = 0) -> bool:
        """Take slots for recurrent state around a draft or several steps. False: none is available."""
        return branch(self.pools, seq, num_drafted, keeps_rows=self.keeps_rows)

    def settle(self, seq: TokenSequence, end: int, *, accepted: bool) -> None:
        """Commit a chunk that was computed up to `end`; what was computed behind that does not count."""
        if (reached := settle_draft(self.pools, seq, end, accepted=accepted)) > seq.num_computed_tokens:
            self.advance(seq, reached)
        if accepted:
            return
        needed = -(-seq.num_tokens // self.block_size)  # the rest was reserved for tokens that did not come
        for pool, table in zip(self.pools.blocks, seq.tables, strict=True):
            pool.give(block for block in reversed(table[needed:]) if block)
            del table[needed:]

    def advance(self, seq: TokenSequence, end: int) -> None:
        """Record that `end` tokens are computed: cache them, and give back blocks that left the window."""
        begin, seq.num_computed_tokens = seq.num_computed_tokens, end
        if not self._caches:
            return
        if end // self.block_size != seq.num_recorded:
            self._record(seq)
        if self.disk:
            self.disk.keep_blocks(self.pools, seq)
        if seq.marks or self.has_slots:
            self._take_snapshots(seq, begin, end)
        if self._trims:
            self._trim(seq)

    def _take_snapshots(self, seq: TokenSequence, begin: int, end: int) -> None:
        marks = {mark for mark in seq.marks if begin < mark <= end}
        seq.marks -= marks
        if not self.has_slots:
            for mark in marks:
                self._snapshot(seq, mark, is_spare=False)
        elif end in marks or not end % self.options.snapshot_interval:
            self._snapshot(seq, end, is_spare=end not in marks)

    def _record(self, seq: TokenSequence) -> None:
        whole = seq.num_computed_tokens // self.block_size
        self._extend(seq)
        self.pools.introduce(seq, whole)
        index = self.pools.index
        for i in range(seq.num_recorded, whole):
            chain_hash = seq.chain[i + 1]
            index.saw(chain_hash)
            if self._computing.get(chain_hash) is seq:
                del self._computing[chain_hash]
            for g, (pool, table) in enumerate(zip(self.pools.blocks, seq.tables, strict=True)):
                if table[i] and index.record(g, chain_hash, table[i]):
                    pool.keep(table[i])
        seq.num_recorded = whole

    def _snapshot(self, seq: TokenSequence, at: int, *, is_spare: bool) -> None:
        if place := self._place(seq, at):
            partial = [table[at // self.block_size] for table in seq.tables] if place[1] else []
            self.pools.introduce(seq, at // self.block_size)
            self.pools.take_snapshot(place, seq.slot, partial, is_spare=is_spare)
            # A chat has the end of a message close to that of its prompt, and each is as large as a slot.
            is_near = at == seq.prompt_len - 1 and seq.boundaries and at not in seq.boundaries
            if self.disk and self.has_slots and not is_spare and not is_near:
                self.disk.keep_snapshot(self.pools, seq, place, partial)

    def _place(self, seq: TokenSequence, at: int) -> PrefixPlace | None:
        """The name of a position in this sequence; None where no sequence could start."""
        whole, rest = divmod(at, self.block_size)
        if not whole or (rest and any(not table[whole] for table in seq.tables)):
            return None
        return seq.chain[whole], tuple(seq.token_ids[at - rest : at])

    def _trim(self, seq: TokenSequence) -> None:
        """Give back the blocks that no later query of a windowed group can see."""
        for window, pool, table in zip(self.windows, self.pools.blocks, seq.tables, strict=True):
            if window is None:
                continue
            behind = max(seq.num_computed_tokens - window + 1, 0) // self.block_size
            for i in range(min(behind, len(table)) - 1, -1, -1):
                if table[i] == GARBAGE:
                    break
                pool.give((table[i],))
                table[i] = GARBAGE

    def state_nbytes(self, seq: TokenSequence) -> int:
        """Bytes of host memory that a running sequence's state would take."""
        return self.pools.nbytes(self._list_computed(seq))

    def can_save(self, seq: TokenSequence) -> bool:
        return self.pools.can_save(self._list_computed(seq))

    def save(self, seq: TokenSequence) -> None:
        """Copy a running sequence's state to host memory, where `can_save`; then it can be released."""
        seq.saved = self.pools.save(self._list_computed(seq), seq.slot, seq.num_computed_tokens)

    def _list_computed(self, seq: TokenSequence) -> list[list[int]]:
        """The sequence's block tables without the blocks that are reserved for tokens to come."""
        blocks = -(-seq.num_computed_tokens // self.block_size)
        return [table[:blocks] for table in seq.tables]

    def release(self, seq: TokenSequence) -> None:
        """Give back the blocks and the slot of a sequence; its known prefix stays cached."""
        for chain_hash in seq.chain[seq.num_recorded + 1 :]:
            if self._computing.get(chain_hash) is seq:
                del self._computing[chain_hash]
        is_known = drop_draft(self.pools, seq) or not seq.in_step
        if self._caches and seq.slot and is_known and (place := self._place(seq, seq.num_computed_tokens)):
            self._leave(seq, place)
        if self.disk and self._caches:
            self.disk.keep_blocks(self.pools, seq, all_of_them=True)
        for pool, table in zip(self.pools.blocks, seq.tables, strict=False):
            pool.give(block for block in reversed(table) if block)
        self.pools.give_slot(seq.slot)
        seq.forget_memory()

    def _leave(self, seq: TokenSequence, place: PrefixPlace) -> None:
        """Turn the sequence's own slot into a snapshot, if there is none at this place."""
        at = seq.num_computed_tokens // self.block_size
        partial = tuple(table[at] for table in seq.tables) if place[1] else ()
        if self.disk:
            self.disk.keep_snapshot(self.pools, seq, place, partial)
        if known := self.pools.index.find(*place):
            self.pools.touch(known)
            return
        self.pools.introduce(seq, at)
        self.pools.keep(Snapshot(*place, seq.slot, partial))

    def reset(self, moves: Sequence[Move]) -> None:
        """Begin again with empty memory, because its content or its accounting cannot be trusted any more.

        No sequence may hold any. It is unknown which `moves` of a failed step were made, so what they were to
        drop is dropped again.
        """
        drops = {move.handle for move in [*moves, *self.pools.moves] if isinstance(move, Drop)}
        unsaved = {move.handle for move in self.pools.moves if isinstance(move, Save)}
        handles = (drops | self.pools.host.handles) - unsaved
        self.pools = self._new_pools()
        self.pools.moves += [Drop(handle) for handle in sorted(handles)]
        self._computing.clear()
        if self.disk:
            self.disk.reset()

    def stats(self) -> dict[str, int]:
        """Numbers of blocks (of all groups) and slots, bytes of host memory; of the disk cache, if any."""
        return {**self.pools.stats(), **(self.disk.disk.stats() if self.disk else {})}

    # Invariants

    def check(self, running: Iterable[TokenSequence], waiting: Iterable[TokenSequence]) -> None:
        """Every held block, slot and saved copy is explained; AssertionError if not."""
        blocks, slots = [Counter[int]() for _ in self.groups], Counter[int]()
        for seq in running:
            for held, table in zip(blocks, seq.tables, strict=True):
                held.update(block for block in table if block)
            slots.update((seq.slot,) if seq.slot else ())
            slots.update(seq.draft_slots.slots if seq.draft_slots else ())
        self.pools.check(blocks, slots, {seq.saved.handle for seq in waiting if seq.saved})
