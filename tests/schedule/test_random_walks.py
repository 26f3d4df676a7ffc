"""Thousands of random steps of a scheduler without a cache: every sequence gets the right tokens."""

from __future__ import annotations

import random

import pytest

from tests.schedule.walk import SHAPES, Size, Wish, World, wander


@pytest.mark.parametrize("shape", SHAPES)
def test_every_sequence_gets_its_own_tokens_and_nothing_is_shared(shape: str) -> None:
    rng = random.Random(shape)
    size = Size(num_blocks=rng.randint(10, 14), num_seqs=3, budget=rng.randint(6, 20), shares=False)
    world = World(SHAPES[shape], size)
    wander(world, rng, 400, busy=0.3)
    world.drain()
    assert world.counts["finished"] > 20
    assert world.counts["failed"] > 0
    assert all(start == 0 or world.wishes[i].num_choices > 1 for i, start in world.starts.items())


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("shape", ["full", "windows", "full+window", "full+slots"])
def test_several_steps_of_a_plan_are_as_many_plans(shape: str, shares: bool) -> None:
    rng = random.Random(shape)
    size = Size(num_blocks=rng.randint(12, 20), num_steps=rng.choice([3, 8]), shares=shares)
    world = World(SHAPES[shape], size)
    wander(world, rng, 1200, busy=0.06, faults=0.02)
    world.drain()
    assert world.counts["finished"] > 20
    assert world.counts["failed"] > 0
    assert world.counts["multi-steps"] > 10


def test_a_model_that_is_not_causal_computes_every_sequence_whole_in_every_step() -> None:
    rng = random.Random(5)
    world = World(SHAPES["full+window+slots"], Size(num_blocks=14, budget=24, causal=False))
    for _ in range(300):
        if rng.random() < 0.3:
            world.submit(Wish(tuple(rng.randrange(5) for _ in range(rng.randint(1, 20))), rng.randint(0, 12)))
        world.make_plan()
        if world.stories and rng.random() < 0.05:
            world.cancel(rng.choice(sorted(world.stories)))
        if world.plan is not None:
            world.execute()
        world.check()
    world.drain()
    assert world.counts["finished"] > 20


@pytest.mark.parametrize("shares", [False, True])
def test_the_earliest_request_is_never_delayed_by_later_ones(shares: bool) -> None:
    """Under constant pressure the first sequence takes exactly the steps it would take alone."""
    world = World(SHAPES["full+window"], Size(num_blocks=8, budget=8, shares=shares))
    (first,) = world.submit(Wish(tuple(range(12)), 12))
    steps = 0
    while first in world.stories:
        world.submit(Wish((1, 2, 3), 20, seed=steps, params={"temperature": 1.0}))
        world.make_plan()
        assert world.plan is not None
        assert first in {c.seq_id for c in world.plan.chunks}
        world.execute()
        world.check()
        steps += 1
    assert steps == 2 + 11
    assert world.s.stats()["num_preemptions"] > 0


def test_a_lower_priority_number_goes_before_earlier_arrivals() -> None:
    world = World(SHAPES["full"], Size(num_seqs=1))
    late, soon = world.submit(Wish((1, 2, 3), 4, priority=1)), world.submit(Wish((1, 2, 3), 4, priority=0))
    order: list[int] = []
    while world.stories:
        world.make_plan()
        assert world.plan is not None
        order += [c.seq_id for c in world.plan.chunks]
        world.execute()
    assert sorted(order, key=[*soon, *late].index) == order
