"""The block pool: allocates blocks and slots and counts references. Integers only, no torch.

A slot is a block that is never shared. Id 0 is never given out. Padding rows write there, and the entries of
a windowed table point there when their blocks were given back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Mapping

from plait.errors import OutOfBlocks

GARBAGE = 0


def _nobody(_: int) -> None:
    """The default `on_evict`: does nothing."""


class BlockPool:
    """The blocks 1..num_blocks-1 of one group, counted by reference so that prefixes can be shared.

    A block is *free*, *held* (it has references), or *cached*: no sequence holds it, and its content is worth
    keeping (`keep`). When no free one is left, the least recently used cached one is given out, and
    `on_evict(block)` is called first. Deterministic: the same calls give the same ids. `what` they are, and
    which `option` makes more of them, is for messages.
    """

    def __init__(
        self,
        num_blocks: int,
        on_evict: Callable[[int], None] = _nobody,
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

    @property
    def num_held(self) -> int:
        return max(self.num_blocks - 1, 0) - self.num_available

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
            self.on_evict(block)
        self._refs[block] = 1
        return block

    def ref(self, blocks: Iterable[int]) -> None:
        """Add a reference to each of these held or cached blocks: they are shared, or used again."""
        for block in blocks:
            if not self._refs[block]:
                assert block in self._cached, f"block {block} is shared, and nobody holds or keeps it"
                del self._cached[block]
            self._refs[block] += 1

    def give(self, blocks: Iterable[int]) -> None:
        """Remove a reference from each; a block without any is cached if it is kept, else free again."""
        for block in blocks:
            assert block != GARBAGE, "block 0 is nobody's to give back"
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
        assert self._refs[block] > 0, f"block {block} is kept and nobody holds it"
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

    def rebuild(self, refs: Mapping[int, int], kept: Collection[int]) -> None:
        """Rebuild the lists from the references of each block and the kept blocks."""
        self._refs = [refs.get(block, 0) for block in range(max(self.num_blocks, 1))]
        self._kept = set(kept)
        order = [*self._cached, *sorted(self._kept - set(self._cached))]
        self._cached = OrderedDict((b, None) for b in order if b in self._kept and not self._refs[b])
        taken = self._cached.keys() | {block for block, n in refs.items() if n}
        self._free = [block for block in range(self.num_blocks - 1, 0, -1) if block not in taken]

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
