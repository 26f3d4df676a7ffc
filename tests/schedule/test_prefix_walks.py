"""Random lives with a prefix cache, swaps, forks and drafts: every text is that of a sequence alone."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.schedule.plan import Drop, Save
from tests.schedule.memory_model import VOCAB_SIZE
from tests.schedule.walk import SHAPES, Size, Wish, World, branch, wander

PROMPTS = st.builds(
    branch, st.integers(0, 1), st.sampled_from([3, 4, 8, 11, 16]), st.integers(0, 2), st.integers(1, 24)
)
WISHES = st.builds(
    Wish,
    PROMPTS,
    length=st.integers(0, 12),
    num_choices=st.sampled_from([1, 1, 2, 4]),
    params=st.sampled_from([{}, {}, {"temperature": 1.0}, {"logprobs": 0}, {"presence_penalty": 1.0}]),
    stops=st.sampled_from([frozenset(), frozenset({1})]),
    salt=st.sampled_from(["", "", "mine"]),
    boundaries=st.sampled_from([(), (5,), (8, 13)]),
    priority=st.sampled_from([0, 0, 1]),
    scores=st.sampled_from([False, False, False, True]),
)
SIZES = st.builds(
    Size,
    num_blocks=st.integers(10, 24),
    num_spare_slots=st.integers(1, 4),
    num_seqs=st.integers(1, 4),
    budget=st.integers(5, 24),
    snapshot_interval=st.sampled_from([4, 8, 64]),
    host_nbytes=st.sampled_from([0, 1000, 100_000]),
)


class PrefixMachine(RuleBasedStateMachine):
    @initialize(shape=st.sampled_from(sorted(SHAPES)), size=SIZES)
    def start(self, shape: str, size: Size) -> None:
        self.world = World(SHAPES[shape], size)

    @rule(requested=WISHES)
    def submit(self, requested: Wish) -> None:
        self.world.submit(requested)

    @precondition(lambda self: self.world.told)
    @rule(requested=WISHES, data=st.data())
    def go_on(self, requested: Wish, data: st.DataObject) -> None:
        """The next turn of a conversation."""
        told = data.draw(st.sampled_from(self.world.told[-3:]))
        self.world.submit(Wish((*told, *requested.prompt[:3]), requested.length, salt=requested.salt))

    @precondition(lambda self: self.world.stories)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.stories))))

    @precondition(lambda self: self.world.plan is None)
    @rule(seed=st.integers(0, 9))
    def plan(self, seed: int) -> None:
        self.world.make_plan(self.world.drafts(random.Random(seed)) if seed else None)

    @precondition(lambda self: self.world.plan is None)
    @rule(steps=st.integers(1, 5))
    def walk(self, steps: int) -> None:
        for _ in range(steps):
            self.world.make_plan()
            if self.world.plan is not None:
                self.world.execute()

    @precondition(lambda self: self.world.plan is not None)
    @rule()
    def execute(self) -> None:
        self.world.execute()

    @precondition(lambda self: self.world.plan is not None)
    @rule(num_moves=st.integers(0, 3))
    def fail(self, num_moves: int) -> None:
        self.world.fail(num_moves)

    @invariant()
    def everything_is_explained(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.drain()


TestPrefixMachine = PrefixMachine.TestCase
TestPrefixMachine.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


def life(shape: str, seed: int, num_steps: int) -> Counter[str]:
    """A random world of this shape, walked to its end; what happened in it."""
    rng = random.Random(f"{shape} {seed}")
    size = Size(
        num_blocks=rng.choice([10, 12, 16, 30]),
        num_spare_slots=rng.choice([1, 2, 6]),
        num_seqs=rng.randint(1, 5),
        budget=rng.randint(6, 24),
        snapshot_interval=rng.choice([4, 8, 64]),
        host_nbytes=rng.choice([0, 600, 100_000]),
    )
    world = World(SHAPES[shape], size)
    wander(world, rng, num_steps, busy=rng.choice([0.1, 0.3]), faults=rng.choice([0.0, 0.005, 0.05]))
    world.drain()
    stats = world.s.stats()
    world.counts.update({name: stats[name] for name in ("num_preemptions", "num_swaps")})
    world.counts.update({f"asked: {cause}": n for cause, n in world.s.cache_counts.items()})
    world.counts.update({f"moved: {kind.__name__}": n for kind, n in world.device.num_moves.items()})
    return world.counts


@pytest.mark.parametrize("shape", SHAPES)
def test_every_text_is_that_of_a_sequence_alone(shape: str) -> None:
    counts = sum((life(shape, seed, 100) for seed in range(6)), Counter())
    assert counts["finished"] > 100
    assert counts["hit tokens"] > 100
    assert counts["num_preemptions"] > 0 or shape in {"windows", "slots"}  # these are sized for all that run
    assert counts["accepted"] > 10


def test_a_saved_copy_that_a_failed_step_should_have_dropped_is_dropped_later() -> None:
    world = World(SHAPES["full"], Size(num_blocks=8, num_seqs=2, host_nbytes=100_000))
    for trunk in (0, 1):
        world.submit(Wish(branch(trunk, 24, 0, 12), 15))
    world.make_plan()
    while world.plan is not None and not any(isinstance(move, Drop) for move in world.plan.moves):
        world.execute()
        world.make_plan()
    world.fail(0)
    world.drain()  # and at rest nothing is left in host memory
    assert world.device.num_moves[Save] > 0


def test_blocks_of_a_wrong_draft_are_not_needed_when_its_sequence_resumes() -> None:
    size = Size(num_blocks=7, num_seqs=2, budget=24, max_model_len=26, host_nbytes=100_000)
    world = World(SHAPES["full"], size)
    for trunk, length in ((1, 6), (2, 12)):
        world.submit(Wish(branch(trunk, 24, 0, length), 13))
    while world.stories:
        world.make_plan({seq.id: (VOCAB_SIZE,) * 6 for seq in world.s.list_drafting()})  # no such token
        world.execute()
        world.check()
    assert world.s.stats()["num_swaps"] > 0


@pytest.mark.parametrize("shape", ["full", "windows"])
def test_blocks_that_wrong_drafts_had_are_there_for_the_next_request(shape: str) -> None:
    world = World(SHAPES[shape], Size(num_blocks=8, num_seqs=4, budget=40, block_size=8))
    for trunk in range(3):
        world.submit(Wish(branch(trunk, 24, 0, 5), 10))
    for _ in range(2):
        world.make_plan({seq.id: (VOCAB_SIZE,) * 6 for seq in world.s.list_drafting()})
        world.execute()
    (late,) = world.submit(Wish(branch(4, 24, 0, 20), 4))
    world.make_plan()
    assert world.plan is not None
    assert late in {chunk.seq_id for chunk in world.plan.chunks}
    world.check()
    world.drain()


@pytest.mark.parametrize("shape", SHAPES)
def test_repair_of_wrong_block_tables_changes_no_text(shape: str) -> None:
    rng = random.Random(shape)
    world = World(SHAPES[shape], Size(num_blocks=16, host_nbytes=1000))
    spoiled = 0
    for _ in range(30):
        wander(world, rng, 10, busy=0.4, faults=0.0)
        pools = world.memory.pools
        pool = rng.choice([*pools.blocks, *([pools.slots] if pools.slots else [])])
        held = [block for block in range(1, pool.num_blocks) if pool.refs(block)]
        match rng.randrange(4):
            case 0 if held:
                pool._refs[rng.choice(held)] += 1
            case 1 if pool._free:
                pool._free.pop()
            case 2 if pool._free:
                pool._free.append(pool._free[0])
            case 3 if pool._cached:
                pool._cached.popitem()
            case _:
                continue
        assert world.s.repair()
        world.check()
        assert not world.s.repair()
        spoiled += 1
    world.drain()
    assert spoiled > 10


def test_after_a_failed_step_what_was_saved_before_it_is_not_trusted_either() -> None:
    world = World(SHAPES["full"], Size(num_blocks=8, num_seqs=2, host_nbytes=100_000))
    for trunk in (0, 1):
        world.submit(Wish(branch(trunk, 24, 0, 12), 15))
    while not world.device.host:
        world.make_plan()
        world.execute()
    world.make_plan()
    world.fail(0)
    world.check()
    world.drain()
    assert world.device.num_moves[Save] > 0


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("shares", [True, False])
def test_a_prompt_is_computed_once_for_all_choices(shape: str, shares: bool) -> None:
    """Four choices of 19 tokens: the first computes them all, the others their last one."""
    size = Size(num_blocks=60, num_spare_slots=12, budget=64, snapshot_interval=64, shares=shares)
    world = World(SHAPES[shape], size)
    world.submit(Wish(branch(0, 24, 0, 19), 8, num_choices=4, params={"temperature": 1.0}))
    world.drain()
    assert world.counts["tokens"] == 19 + 3 + 4 * 7


@pytest.mark.parametrize("shape", SHAPES)
def test_conversation_computes_every_token_once_if_all_fits(shape: str) -> None:
    size = Size(num_blocks=200, num_spare_slots=50, budget=64, max_model_len=100)
    world = World(SHAPES[shape], size)
    text, extra = branch(0, 24, 0, 17), (1, 2, 3, 4, 0, 1)
    for _ in range(4):
        world.submit(Wish(text, 8))
        world.drain()
        text = (*world.told[-1], *extra)
    known = len(text) - len(extra)
    if SHAPES[shape].has_slots:  # the slot that a sequence leaves is of its very end
        assert world.counts["tokens"] == known - 1
    else:  # the block that was partly filled is computed again
        assert known - 1 <= world.counts["tokens"] <= known - 1 + 3 * (size.block_size - 1)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_same_calls_lead_to_the_same_plans(shape: str) -> None:
    lives = []
    for _ in range(2):
        world = World(SHAPES[shape], Size(num_blocks=12, host_nbytes=1000))
        wander(world, random.Random(3), 150, busy=0.4)
        lives.append(world.plans)
    assert lives[0] == lives[1]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_hundred_thousand_steps(shape: str) -> None:
    """One sixth of them for each shape."""
    counts, seed = Counter[str](), 1000
    while counts["steps"] < 17_000:
        counts, seed = counts + life(shape, seed, 1000), seed + 1
    assert counts["finished"] > 5000
    assert counts["failed"] > 50
