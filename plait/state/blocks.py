"""Who holds which block and which slot: integers only, no torch.

Id 0 is never given out: it is where padding rows write and where a windowed table points to what was given
back.
"""

from __future__ import annotations

from collections.abc import Iterable

from plait.errors import OutOfBlocks

GARBAGE = 0


class BlockPool:
    """The blocks 1..num_blocks-1 of one group, counted by reference so that prefixes can be shared.

    Deterministic: the same calls give the same ids. Lowest ids first, then last given back first.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, 0, -1))
        self._refs = [0] * max(num_blocks, 1)

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return max(self.num_blocks - 1, 0) - len(self._free)

    def take(self, n: int) -> tuple[int, ...]:
        """n blocks, each with one reference. Raises OutOfBlocks, taking none, if there are not so many."""
        if n > len(self._free):
            raise OutOfBlocks(
                f"{n} blocks are needed and {len(self._free)} of {self.num_blocks - 1} are free; "
                "wait for a sequence to finish, or start with a larger --memory-limit"
            )
        taken = tuple(self._free.pop() for _ in range(n))
        for block in taken:
            self._refs[block] = 1
        return taken

    def ref(self, blocks: Iterable[int]) -> None:
        """One reference more to each of these held blocks: they are shared."""
        for block in blocks:
            assert self._refs[block] > 0, f"block {block} is shared but nobody holds it"
            self._refs[block] += 1

    def give(self, blocks: Iterable[int]) -> None:
        """One reference less; a block without any is free again."""
        for block in blocks:
            assert block != GARBAGE, "block 0 is nobody's to give back"
            assert self._refs[block] > 0, f"block {block} is given back twice"
            self._refs[block] -= 1
            if not self._refs[block]:
                self._free.append(block)

    def refs(self, block: int) -> int:
        """How many hold this block."""
        return self._refs[block]

    def check(self) -> None:
        """Every block is either free or held, never both; AssertionError tells which is not."""
        free = set(self._free)
        assert len(free) == len(self._free), "a block is free twice"
        assert GARBAGE not in free, "block 0 is free"
        assert self._refs[GARBAGE] == 0, "block 0 is held"
        for block in range(1, self.num_blocks):
            assert (block in free) == (self._refs[block] == 0), f"block {block} is lost or both free and held"


class SlotPool:
    """The slots 1..num_slots-1: each a sequence's place for state of fixed size. Never shared."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._slots = BlockPool(num_slots)

    @property
    def num_free(self) -> int:
        return self._slots.num_free

    @property
    def num_held(self) -> int:
        return self._slots.num_held

    def take(self) -> int:
        """One slot. Raises OutOfBlocks if none is free."""
        if not self._slots.num_free:
            raise OutOfBlocks(
                f"all {self.num_slots - 1} slots are taken; wait for a sequence to finish, or start with a "
                "larger --max-num-seqs"
            )
        return self._slots.take(1)[0]

    def give(self, slot: int) -> None:
        self._slots.give((slot,))

    def is_held(self, slot: int) -> bool:
        return self._slots.refs(slot) > 0

    def check(self) -> None:
        """Every slot is either free or held by exactly one; AssertionError tells which is not."""
        self._slots.check()
        for slot in range(1, self.num_slots):
            assert self._slots.refs(slot) <= 1, f"slot {slot} is held twice"
