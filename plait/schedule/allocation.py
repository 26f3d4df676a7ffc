"""The memory of running sequences: one pool and one table per block group, and slots. Integers only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from plait.memory import BlockGroup
from plait.schedule.sequence import Sequence as TokenSequence
from plait.state.blocks import GARBAGE, BlockPool, SlotPool


def num_window_blocks(window: int, block_size: int) -> int:
    """The most blocks of a windowed group that a sequence holds beside those of the tokens it computes."""
    return -(-(window - 1) // block_size) + 2


class Allocation:
    """Gives blocks and slots to sequences and takes them back.

    `num_blocks`: one number per group, the garbage block included; `num_slots` 0: the model has no state of
    fixed size and every sequence's slot is 0. `max_step_len`: the most tokens in one step. `trims` False:
    windows are never given back, because a model that is not causal reads everything again.
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
    ) -> None:
        self.groups, self.block_size, self.max_step_len = tuple(groups), block_size, max_step_len
        self.windows = tuple(group.window if trims else None for group in self.groups)
        self.pools = tuple(BlockPool(n) for n in num_blocks)
        assert len(self.pools) == len(self.groups)
        self.slots = SlotPool(num_slots) if num_slots else None

    def needed(self, group: int, lengths: Iterable[int]) -> int:
        """The most blocks of a group that sequences of these lengths hold together in any step."""
        blocks, window = [-(-length // self.block_size) for length in lengths], self.windows[group]
        if window is None:
            return sum(blocks)
        beside = num_window_blocks(window, self.block_size)
        new = sum(max(n - beside, 0) for n in blocks)
        return sum(min(n, beside) for n in blocks) + min(new, -(-self.max_step_len // self.block_size))

    def shortage(self, length: int) -> tuple[int, int] | None:
        """(blocks needed, blocks there are) in the first group where `length` tokens can never fit."""
        for g, pool in enumerate(self.pools):
            if (needed := self.needed(g, [length])) > pool.num_blocks - 1:
                return needed, pool.num_blocks - 1
        return None

    def can_hold(self, seq: TokenSequence, running: Iterable[TokenSequence]) -> bool:
        """Whether all known tokens of `seq` fit beside all known tokens of the running sequences."""
        if self.slots and not self.slots.num_free:
            return False
        lengths = [seq.num_tokens, *(other.num_tokens for other in running)]
        return all(self.needed(g, lengths) <= pool.num_blocks - 1 for g, pool in enumerate(self.pools))

    def open(self, seq: TokenSequence) -> None:
        """Empty tables and a slot for a sequence that starts."""
        seq.tables = tuple([] for _ in self.groups)
        seq.slot = self.slots.take() if self.slots else GARBAGE

    def reserve(self, seq: TokenSequence, length: int) -> bool:
        """Blocks for the first `length` tokens, in every group or in none."""
        missing = [max(-(-length // self.block_size) - len(table), 0) for table in seq.tables]
        if any(n > pool.num_free for n, pool in zip(missing, self.pools, strict=True)):
            return False
        for n, pool, table in zip(missing, self.pools, seq.tables, strict=True):
            table.extend(pool.take(n))
        return True

    def trim(self, seq: TokenSequence) -> None:
        """Give back the blocks that no later query of a windowed group can see."""
        for window, pool, table in zip(self.windows, self.pools, seq.tables, strict=True):
            if window is None:
                continue
            behind = max(seq.num_computed_tokens - window + 1, 0) // self.block_size
            for i in range(min(behind, len(table)) - 1, -1, -1):
                if table[i] == GARBAGE:
                    break
                pool.give((table[i],))
                table[i] = GARBAGE

    def release(self, seq: TokenSequence) -> None:
        """Give back everything a sequence holds."""
        for pool, table in zip(self.pools, seq.tables, strict=False):
            pool.give(block for block in table if block != GARBAGE)
        if self.slots and seq.slot != GARBAGE:
            self.slots.give(seq.slot)
        seq.tables, seq.slot = (), GARBAGE

    def check(self, running: Iterable[TokenSequence]) -> None:
        """Every held block and slot is explained by the running sequences; AssertionError if not."""
        sequences = list(running)
        for g, pool in enumerate(self.pools):
            pool.check()
            held = [block for seq in sequences for block in seq.tables[g] if block != GARBAGE]
            assert len(held) == len(set(held)) == pool.num_held, (
                f"group {g}: a block is lost or in two tables"
            )
            assert all(pool.refs(block) == 1 for block in held)
        if self.slots:
            self.slots.check()
            slots = [seq.slot for seq in sequences]
            assert len(slots) == len(set(slots)) == self.slots.num_held, "a slot is lost or used twice"
            assert all(self.slots.is_held(slot) for slot in slots)
