from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from plait.errors import OutOfBlocks
from plait.state.blocks import BlockPool, SlotPool


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
    assert (pool.num_free, pool.num_held) == (0, 0)


def test_slots_run_out_with_advice() -> None:
    slots = SlotPool(3)
    assert [slots.take(), slots.take()] == [1, 2]
    with pytest.raises(OutOfBlocks, match=r"all 2 slots are taken.*--max-num-seqs"):
        slots.take()
    slots.give(1)
    assert (slots.is_held(1), slots.is_held(2), slots.take()) == (False, True, 1)
    slots.check()


class Pools(RuleBasedStateMachine):
    """A pool beside a dictionary of who holds what."""

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
        assert self.pool.num_held == len(self.held)
        assert self.pool.num_free == 8 - len(self.held)
        assert all(self.pool.refs(block) == n for block, n in self.held.items())


TestPools = Pools.TestCase
TestPools.settings = settings(max_examples=50, stateful_step_count=60, deadline=None)
