from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.errors import OutOfBlocks
from plait.state.blocks import BlockPool


def test_the_garbage_block_is_never_given_out() -> None:
    assert BlockPool(5).take(4) == (1, 2, 3, 4)


def test_taking_too_many_takes_none_and_says_both_numbers() -> None:
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(OutOfBlocks, match=r"3 blocks are needed and 2 of 3 are free"):
        pool.take(3)
    assert pool.num_free == 2


def test_a_shared_block_is_free_when_the_last_holder_gives_it_back() -> None:
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.ref((block,))
    pool.give((block,))
    assert (pool.refs(block), pool.num_free) == (1, 1)
    pool.give((block,))
    assert (pool.refs(block), pool.num_free) == (0, 2)


@pytest.mark.parametrize("blocks", [(0,), (2,), (1, 1)])
def test_giving_back_what_is_not_held_is_our_own_fault(blocks: tuple[int, ...]) -> None:
    pool = BlockPool(4)
    pool.take(1)
    with pytest.raises(AssertionError):
        pool.give(blocks)


@pytest.mark.parametrize("num_blocks", [0, 1])
def test_an_empty_pool_is_consistent(num_blocks: int) -> None:
    pool = BlockPool(num_blocks)
    pool.check()
    assert (pool.num_free, pool.num_available) == (0, 0)


def test_slots_run_out_with_advice() -> None:
    slots = BlockPool(3, what="slot", option="--max-num-seqs")
    assert slots.take(2) == (1, 2)
    with pytest.raises(OutOfBlocks, match=r"1 slots are needed and 0 of 2 are free.*--max-num-seqs"):
        slots.take(1)
    slots.give((1,))
    assert slots.take(1) == (1,)
    slots.check()


def test_what_is_kept_is_cached_when_given_back_and_evicted_oldest_first() -> None:
    evicted: list[int] = []
    pool = BlockPool(4, evicted.append)
    first, second, third = pool.take(3)
    pool.keep(first)
    pool.keep(second)
    pool.give((second, first, third))
    assert (pool.num_free, pool.num_cached, pool.num_available) == (1, 2, 3)
    assert pool.take(2) == (third, second)
    assert evicted == [second]
    pool.ref((first,))
    assert (pool.num_cached, pool.refs(first)) == (0, 1)
    pool.drop(first)
    pool.give((first,))
    assert (pool.num_free, pool.num_cached) == (1, 0)
    pool.check()


def test_touched_blocks_are_evicted_last_and_cooled_ones_first() -> None:
    pool = BlockPool(4)
    for block in pool.take(3):
        pool.keep(block)
    pool.give((1, 2, 3))
    pool.touch(1)
    pool.cool(3)
    assert pool.take(3) == (3, 2, 1)


class Pools(RuleBasedStateMachine):
    """A pool compared with a dictionary of holders and what they hold."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.held = BlockPool(9), Counter[int]()

    @rule(n=st.integers(0, 10))
    def take(self, n: int) -> None:
        if n > 8 - len(self.held):
            with pytest.raises(OutOfBlocks):
                self.pool.take(n)
            return
        blocks = self.pool.take(n)
        assert len(set(blocks)) == n
        assert not set(blocks) & {0, *self.held}
        self.held.update(blocks)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.ref((block,))
        self.held[block] += 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def give(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.held)))
        self.pool.give((block,))
        self.held[block] -= 1
        self.held += Counter()

    @invariant()
    def free_and_held_are_everything(self) -> None:
        self.pool.check()
        assert self.pool.num_blocks - 1 - self.pool.num_available == len(self.held)
        assert self.pool.num_free == 8 - len(self.held)
        assert all(self.pool.refs(block) == n for block, n in self.held.items())


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
