"""The block pool and the prefix cache, which finds blocks by the hashes of tokens. Integers only, no torch.

The pool allocates blocks and slots, and counts references. A slot is a block that is never shared. Id 0 is
never given out. Padding rows write there, and the entries of a windowed table point there when their blocks
were given back.

One hash chain over blocks of tokens names every prefix. h(0) is the hash of a salt, h(i) that of h(i-1) and
the tokens of block i. Blocks of paged state are found by (group, h(i)). Recurrent state is found where a
*snapshot* of it exists, which may be inside a block. It is named by h(i) and the tokens that follow.

    h(0) = H(salt)    h(1) = H(h(0), block 1)    h(2) = H(h(1), block 2)    rest: the tokens behind block 2
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Protocol

from msgspec import Struct

from plait.errors import OutOfBlocks

GARBAGE = 0
DIGEST_BYTES = 16
NUM_SEEN = 1 << 16  # hashes remembered beyond what is in memory: they distinguish evicted from new prefixes

Tokens = Sequence[int]
PrefixPlace = tuple[bytes, tuple[int, ...]]  # where a prefix ends: `parent` and `rest` of a `Snapshot`


class BlockPool:
    """The blocks 1..num_blocks-1 of one group, counted by reference so that prefixes can be shared.

    A block is *free*, *held* (it has references), or *cached*: no sequence holds it, and its content is worth
    keeping (`keep`). When none is free, the least recently used cached one is given out, and
    `on_evict(block)` is called first. The same calls give the same ids. `what` and `option` are for messages.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int], None] | None = None,
        *,
        what: str = "block",
        option: str = "--memory-limit",
    ) -> None:
        self.num_blocks, self.on_evict, self._what, self._option = num_blocks, on_evict, what, option
        self._free = list(range(num_blocks - 1, 0, -1))
        self._refs = [0] * max(num_blocks, 1)
        self._kept: set[int] = set()
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """How many can be taken: free ones, and cached ones, which are evicted."""
        return len(self._free) + len(self._cached)

    def take(self, n: int) -> tuple[int, ...]:
        """n blocks, each with one reference. Raises OutOfBlocks, taking none, if there are not so many."""
        if n > self.num_available:
            raise OutOfBlocks(
                f"{n} {self._what}s are needed and {self.num_available} of {max(self.num_blocks - 1, 0)} are "
                f"free; wait for a sequence to finish, or start with a larger {self._option}"
            )
        return tuple(self._take() for _ in range(n))

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._kept.discard(block)
            self._refs[block] = 1  # before `on_evict`: what it gives back must not include this block
            if self.on_evict is not None:
                self.on_evict(block)
        self._refs[block] = 1
        return block

    def ref(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these held or cached blocks: they are shared, or used again."""
        for block in blocks:
            if not self._refs[block]:
                assert block in self._cached, f"block {block} is shared, and is neither held nor kept"
                del self._cached[block]
            self._refs[block] += 1

    def give(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each; a block without any is cached if it is kept, else free again."""
        for block in blocks:
            assert block != GARBAGE, "block 0 is never taken, so it cannot be given back"
            assert self._refs[block] > 0, f"block {block} is given back twice"
            self._refs[block] -= 1
            if self._refs[block]:
                continue
            if block in self._kept:
                self._cached[block] = None
            else:
                self._free.append(block)

    def keep(self, block: int) -> None:
        """Cache this held block, instead of freeing it, when its last reference is given back."""
        assert self._refs[block] > 0, f"block {block} is kept, and no sequence holds it"
        self._kept.add(block)

    def drop(self, block: int) -> None:
        """Do not cache this block any more; it is free if it has no references."""
        self._kept.discard(block)
        if block in self._cached:
            del self._cached[block]
            self._free.append(block)

    def touch(self, block: int) -> None:
        """Mark a cached block as recently used: it is evicted last. Other blocks are left alone."""
        if block in self._cached:
            self._cached.move_to_end(block)

    def cool(self, block: int) -> None:
        """Mark a cached block as of little use: it is evicted first."""
        self._cached.move_to_end(block, last=False)

    def is_cached(self, block: int) -> bool:
        return block in self._cached

    def refs(self, block: int) -> int:
        """The number of references to this block."""
        return self._refs[block]

    def check(self) -> None:
        """Every block is free, held or cached, and only one of them; AssertionError names one that is not."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert GARBAGE not in free, "block 0 is free"
        assert GARBAGE not in self._cached, "block 0 is cached"
        assert self._refs[GARBAGE] == 0, "block 0 is held"
        for block in range(1, self.num_blocks):
            states = (block in free) + (block in self._cached) + (self._refs[block] > 0)
            assert states == 1, f"block {block} is lost, or more than one of free, held and cached"
        assert self._kept >= self._cached.keys(), "a cached block is not kept"
        assert not self._kept & free, "a kept block is free"


def root(salt: str) -> bytes:
    """h(0), the hash of a salt: prefixes with different salts have nothing in common."""
    return blake2b(salt.encode(), digest_size=DIGEST_BYTES).digest()


def extend(chain: list[bytes], token_ids: Tokens, block_size: int) -> None:
    """Append the hashes of all whole blocks of `token_ids` that the chain does not have yet."""
    for end in range(len(chain) * block_size, len(token_ids) + 1, block_size):
        block = array("q", token_ids[end - block_size : end]).tobytes()
        chain.append(blake2b(chain[-1] + block, digest_size=DIGEST_BYTES).digest())


def window_start(window: int | None, length: int, block_size: int, whole: int) -> int:
    """The first of `whole` blocks that a query behind `length` tokens can see."""
    return 0 if window is None else min(max(length - window + 1, 0) // block_size, whole)


class Snapshot(Struct, eq=False):
    """State after the blocks up to `parent` and the tokens in `rest`: less than one block of them.

    `slot`: where the recurrent state is, or 0: the model has none, or it is in host memory as `handle`.
    `blocks`: the partly filled block of every group, or none if there are no tokens in `rest`. `is_spare`:
    it was taken at no particular place, and is the first to be evicted.
    """

    parent: bytes
    rest: tuple[int, ...]
    slot: int = GARBAGE
    blocks: tuple[int, ...] = ()
    handle: int = 0
    is_spare: bool = False


@dataclass(frozen=True, slots=True)
class Hit:
    """The longest known prefix: `length` tokens, in these blocks of every group (0: behind the window).

    `cause` is "hit", or why nothing was found:

    * "new": never seen; "evicted": it was cached once; "short": less than a block; "off": no lookup was made.
    * "no_snapshot": the blocks are there and the recurrent state is not.
    * "window": blocks in the window are gone.

    `seen`: how many of its tokens were in an earlier prompt or reply.
    """

    length: int = 0
    blocks: tuple[tuple[int, ...], ...] = ()
    snapshot: Snapshot | None = None
    cause: str = "off"
    seen: int = 0


class PrefixListener(Protocol):
    """Gets the changes of an index as they happen: `state.prefix_tree`."""

    def introduce(self, chain: Sequence[bytes], token_ids: Tokens, num_blocks: int) -> None:
        """Called before something is added behind a block of this chain: the names and tokens up to it."""

    def add_block(self, group: int, name: bytes) -> None: ...
    def remove_block(self, group: int, name: bytes) -> None: ...
    def add_snapshot(self, parent: bytes) -> None: ...
    def remove_snapshot(self, parent: bytes) -> None: ...
    def clear(self) -> None:
        """The index is empty again."""


@dataclass(slots=True)
class PrefixIndex:
    """Maps prefixes to blocks and snapshots. It knows no holders: `forget` a block before it is reused.

    `windows`: by group, None for full attention. `has_slots`: a prefix is of use only where a snapshot is.
    """

    windows: Sequence[int | None]
    block_size: int
    has_slots: bool
    listener: PrefixListener | None = None
    blocks: list[dict[bytes, int]] = field(init=False)  # by group: hash -> block
    snapshots: dict[bytes, list[Snapshot]] = field(default_factory=dict)  # by parent, the longest rest first
    _hash_of: list[dict[int, bytes]] = field(init=False)  # by group: block -> hash
    _snapshot_of: list[dict[int, Snapshot]] = field(init=False)  # by group: partly filled block -> snapshot
    _by_slot: dict[int, Snapshot] = field(default_factory=dict)
    _seen: OrderedDict[bytes, None] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self.blocks, self._hash_of = [{} for _ in self.windows], [{} for _ in self.windows]
        self._snapshot_of = [{} for _ in self.windows]

    def lookup(self, chain: Sequence[bytes], token_ids: Tokens, limit: int) -> Hit:
        """The longest prefix of at most `limit` tokens on which all groups agree. `chain`: their hashes."""
        whole = min(limit // self.block_size, len(chain) - 1)
        seen = next((i for i in range(whole) if chain[i + 1] not in self._seen), whole)
        known = self._count_known(chain, whole)
        blocked = ""
        for i in range(known, -1, -1):
            for snapshot in self._candidates(chain, i, token_ids, limit):
                rest = len(snapshot.rest) if snapshot else 0
                length = i * self.block_size + rest
                if not length:
                    continue
                if (tables := self._tables(chain, i, length)) is not None:
                    return Hit(length, tables, snapshot, "hit", max(seen * self.block_size, length))
                blocked = "window"
        cause = blocked or self._cause(whole, known, seen)
        return Hit(0, tuple(() for _ in self.windows), None, cause, seen * self.block_size)

    def record(self, group: int, chain_hash: bytes, block: int) -> bool:
        """Record a block that is full up to this hash. False: another block is already known for it."""
        if chain_hash in self.blocks[group] or block in self._hash_of[group]:
            return self.blocks[group].get(chain_hash) == block
        self.blocks[group][chain_hash], self._hash_of[group][block] = block, chain_hash
        if self.listener is not None:
            self.listener.add_block(group, chain_hash)
        return True

    def saw(self, chain_hash: bytes) -> None:
        """Remember that the tokens up to this hash were computed once."""
        self._seen[chain_hash] = None
        self._seen.move_to_end(chain_hash)
        if len(self._seen) > NUM_SEEN:
            self._seen.popitem(last=False)

    def find(self, parent: bytes, rest: tuple[int, ...]) -> Snapshot | None:
        """The snapshot at exactly this place."""
        return next((s for s in self.snapshots.get(parent, ()) if s.rest == rest), None)

    def add(self, snapshot: Snapshot) -> None:
        """Add a snapshot that was taken; `find` must not know one at its place."""
        assert self.find(snapshot.parent, snapshot.rest) is None, "a place has two snapshots"
        places = self.snapshots.setdefault(snapshot.parent, [])
        places.append(snapshot)
        places.sort(key=lambda s: -len(s.rest))
        if snapshot.slot:
            self._by_slot[snapshot.slot] = snapshot
        for group, block in enumerate(snapshot.blocks):
            if block:
                self._snapshot_of[group][block] = snapshot
        if self.listener is not None:
            self.listener.add_snapshot(snapshot.parent)

    def remove(self, snapshot: Snapshot) -> None:
        """Remove a snapshot that is lost; the owner of its slot and blocks gives them back."""
        places = self.snapshots[snapshot.parent]
        places.remove(snapshot)
        if not places:
            del self.snapshots[snapshot.parent]
        self._by_slot.pop(snapshot.slot, None)
        for group, block in enumerate(snapshot.blocks):
            if block:
                del self._snapshot_of[group][block]
        if self.listener is not None:
            self.listener.remove_snapshot(snapshot.parent)

    def move_to_host(self, snapshot: Snapshot, handle: int) -> None:
        """Record that a snapshot was saved to host memory, because its slot is about to be reused."""
        del self._by_slot[snapshot.slot]
        snapshot.slot, snapshot.handle = GARBAGE, handle

    def forget(self, group: int, block: int) -> Snapshot | None:
        """Remove a block that is about to be reused. Returns the snapshot that is lost, not yet removed."""
        if (chain_hash := self._hash_of[group].pop(block, None)) is not None:
            del self.blocks[group][chain_hash]
            if self.listener is not None:
                self.listener.remove_block(group, chain_hash)
        return self._snapshot_of[group].get(block)

    def in_slot(self, slot: int) -> Snapshot | None:
        return self._by_slot.get(slot)

    def list_kept(self, group: int) -> set[int]:
        """Every block of a group that has known content."""
        return {*self._hash_of[group], *self._snapshot_of[group]}

    @property
    def kept_slots(self) -> set[int]:
        return set(self._by_slot)

    def check(self) -> None:
        """The maps agree with each other; AssertionError names the place where they do not."""
        for group, blocks in enumerate(self.blocks):
            assert {b: h for h, b in blocks.items()} == self._hash_of[group], "a block has two names"
            assert not self._hash_of[group].keys() & self._snapshot_of[group].keys(), "full and partly filled"
        listed = [s for places in self.snapshots.values() for s in places]
        assert {s.slot: s for s in listed if s.slot} == self._by_slot, "a slot's snapshot is lost"
        for group in range(len(self.windows)):
            partial = {s.blocks[group]: s for s in listed if s.blocks and s.blocks[group]}
            assert partial == self._snapshot_of[group], "a partly filled block's snapshot is lost"
        assert all((s.slot or s.handle or not self.has_slots) for s in listed), "a snapshot without state"

    def _count_known(self, chain: Sequence[bytes], whole: int) -> int:
        """How many whole blocks every group of full attention has."""
        full = [self.blocks[g] for g, window in enumerate(self.windows) if window is None]
        return next((i for i in range(whole) if any(chain[i + 1] not in b for b in full)), whole)

    def _candidates(
        self, chain: Sequence[bytes], i: int, token_ids: Tokens, limit: int
    ) -> list[Snapshot | None]:
        """Snapshots to start from behind i whole blocks, the longest first; None: the blocks alone."""
        start = i * self.block_size
        found: list[Snapshot | None] = []
        for snapshot in self.snapshots.get(chain[i], ()):
            end = start + len(snapshot.rest)
            if end <= limit and tuple(token_ids[start:end]) == snapshot.rest:
                found.append(snapshot)
        if not self.has_slots:
            found.append(None)
        return found

    def _tables(self, chain: Sequence[bytes], whole: int, length: int) -> tuple[tuple[int, ...], ...] | None:
        """Block tables of the whole blocks; None if a window has a hole."""
        tables = []
        for group, window in enumerate(self.windows):
            first = window_start(window, length, self.block_size, whole)
            found = [self.blocks[group].get(chain[i + 1], GARBAGE) for i in range(first, whole)]
            if GARBAGE in found:
                return None
            tables.append((*[GARBAGE] * first, *found))
        return tuple(tables)

    def _cause(self, whole: int, known: int, seen: int) -> str:
        if not whole:
            return "short"
        if not seen:
            return "new"
        has_full = any(window is None for window in self.windows)
        if self.has_slots and (known or not has_full):
            return "no_snapshot"
        return "evicted"
