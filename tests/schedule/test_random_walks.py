"""Random lives of a scheduler beside a dictionary of what was asked and what was computed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from plait.memory import BlockGroup
from plait.request import SamplingParams
from plait.schedule.allocation import Allocation
from plait.schedule.plan import Plan, Sampled
from plait.schedule.scheduler import Limits, Scheduler
from plait.schedule.sequence import Sequence

BLOCK = 4
GROUPS = (BlockGroup("full", None, ("a",)), BlockGroup("window:5", 5, ("b",)))


def next_token(tokens: list[int]) -> int:
    return hash(tuple(tokens)) % 97


@dataclass
class Story:
    """What one sequence should be: all its tokens so far, and its end."""

    tokens: list[int]
    prompt_len: int
    max_tokens: int
    arrival: int
    computed: int = 0
    started: bool = False
    memory: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


class World:
    """A scheduler and a runner that checks what it is given.

    The runner's memory is one dictionary: (group, block, offset) -> (sequence, position), and for slots the
    number of tokens they have seen.
    """

    def __init__(self, blocks: int, seqs: int, budget: int, *, causal: bool) -> None:
        limits = Limits(
            max_num_seqs=seqs,
            max_num_batched_tokens=budget,
            max_waiting=1000,
            max_model_len=24 if causal else min(budget, 24),
            causal=causal,
        )
        memory = Allocation(
            GROUPS,
            [blocks, blocks],
            BLOCK,
            num_slots=seqs + 1,
            max_step_len=budget,
            trims=causal,
        )
        self.s, self.limits, self.causal = Scheduler(limits, memory), limits, causal
        self.stories: dict[int, Story] = {}
        self.pages: dict[tuple[int, int, int], tuple[int, int]] = {}
        self.slots: dict[int, tuple[int, int]] = {}
        self.plan: Plan | None = None
        self.done = self.arrivals = 0

    def add(self, prompt: list[int], max_tokens: int) -> None:
        seq_id = self.arrivals = self.arrivals + 1
        max_len = min(len(prompt) + max_tokens, self.limits.max_model_len)
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
        self.s.add(Sequence(seq_id, f"r{seq_id}", 0, list(prompt), params, frozenset(), max_len))
        self.stories[seq_id] = Story(list(prompt), len(prompt), max_len - len(prompt), seq_id)

    def cancel(self, seq_id: int) -> None:
        self.s.cancel(seq_id)
        del self.stories[seq_id]

    def make_plan(self) -> None:
        self.plan = self.s.plan()
        assert (self.plan is None) == (not self.stories), "there is work and nobody works"
        if self.plan is None:
            return
        assert 0 < self.plan.num_tokens <= self.limits.max_num_batched_tokens
        assert len({c.seq_id for c in self.plan.chunks}) == len(self.plan.chunks) <= self.limits.max_num_seqs
        decodes = [len(c.token_ids) == 1 and c.start > 0 for c in self.plan.chunks]
        assert decodes == sorted(decodes, reverse=True)

    def execute(self) -> None:
        assert self.plan is not None
        for slot in self.plan.fresh:
            self.slots[slot] = (0, 0)
        sampled = []
        for c in self.plan.chunks:
            story = self.stories.get(c.seq_id)
            if story is None:  # cancelled after the plan: its memory may be another's already
                sampled += [Sampled(0)] * (c.num_logits > 0)
                continue
            assert list(c.token_ids) == story.tokens[c.start : c.end]
            owner, seen = self.slots[c.slot]
            assert seen == c.start
            assert owner in {0, c.seq_id}
            self.slots[c.slot] = (c.seq_id, c.end)
            self._write_and_read(c.seq_id, c.start, c.end, c.blocks)
            assert c.num_logits == (c.end == len(story.tokens))
            sampled += [Sampled(next_token(story.tokens))] * c.num_logits
        for update in self.s.commit(self.plan, sampled):
            self._learn(update.seq_id, update.token_ids, update.finish_reason)
        self.plan = None

    def fail(self) -> None:
        """The step failed half-way: every state it touched is rubbish."""
        assert self.plan is not None
        for slot in self.slots:
            self.slots[slot] = (-1, -1)
        self.pages.clear()
        if len(self.plan.chunks) > 1:
            self.s.isolate()
        else:
            culprit = self.plan.chunks[0].seq_id
            if culprit in self.stories:
                self.cancel(culprit)
            self.s.isolate()
        self.plan = None

    def check(self) -> None:
        self.s.check()
        if not self.stories:
            stats = self.s.stats()
            assert stats["num_free_blocks"] == stats["num_blocks"]
            assert stats["num_free_slots"] == stats["num_slots"]

    def _write_and_read(self, seq_id: int, start: int, end: int, blocks: tuple[tuple[int, ...], ...]) -> None:
        for g, table in enumerate(blocks):
            for p in range(start, end):
                assert table[p // BLOCK] > 0
                self.pages[g, table[p // BLOCK], p % BLOCK] = (seq_id, p)
            window = GROUPS[g].window
            for p in range(0 if window is None else max(start - window + 1, 0), end):
                assert self.pages[g, table[p // BLOCK], p % BLOCK] == (seq_id, p)

    def _learn(self, seq_id: int, token_ids: tuple[int, ...], finish_reason: str | None) -> None:
        story = self.stories[seq_id]
        assert token_ids == (() if story.max_tokens == 0 else (next_token(story.tokens),))
        story.tokens += token_ids
        ended = len(story.tokens) - story.prompt_len == story.max_tokens
        assert (finish_reason == "length") == ended
        if ended:
            del self.stories[seq_id]
            self.done += 1


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        blocks=st.integers(8, 14),
        seqs=st.integers(1, 5),
        budget=st.integers(5, 24),
        causal=st.sampled_from([True, True, True, False]),
    )
    def start(self, blocks: int, seqs: int, budget: int, causal: bool) -> None:
        self.world = World(blocks, seqs, budget, causal=causal)

    @rule(length=st.integers(1, 20), max_tokens=st.integers(0, 12))
    def add(self, length: int, max_tokens: int) -> None:
        longest = self.world.limits.max_model_len
        self.world.add([length * 7 + i for i in range(min(length, longest))], max_tokens)

    @precondition(lambda self: self.world.stories)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.world.cancel(data.draw(st.sampled_from(sorted(self.world.stories))))

    @precondition(lambda self: self.world.plan is None)
    @rule()
    def plan(self) -> None:
        self.world.make_plan()

    @precondition(lambda self: self.world.plan is not None)
    @rule()
    def execute(self) -> None:
        self.world.execute()

    @precondition(lambda self: self.world.plan is not None)
    @rule()
    def fail(self) -> None:
        self.world.fail()

    @invariant()
    def everything_is_explained(self) -> None:
        if hasattr(self, "world"):
            self.world.check()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(5000):  # whatever happened, everybody is served in the end
            if self.world.plan is None:
                self.world.make_plan()
            if self.world.plan is None:
                break
            self.world.execute()
            self.world.check()
        assert not self.world.stories


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.parametrize("seed", range(6))
def test_thousands_of_steps_serve_everybody_with_the_right_tokens(seed: int) -> None:
    rng = random.Random(seed)
    causal = seed != 5
    world = World(rng.randint(8, 20), rng.randint(2, 6), rng.randint(8, 24), causal=causal)
    cancelled = faults = 0
    for _ in range(3000):
        if rng.random() < 0.2 and len(world.stories) < 30:
            length = rng.randint(1, min(20, world.limits.max_model_len))
            world.add([rng.randrange(50) for _ in range(length)], rng.randint(0, 15))
        world.make_plan()
        if world.stories and rng.random() < 0.02:
            world.cancel(rng.choice(sorted(world.stories)))
            cancelled += 1
        if world.plan is not None and rng.random() < 0.01:
            world.fail()
            faults += 1
        elif world.plan is not None:
            world.execute()
        world.check()
    while world.stories:
        world.make_plan()
        world.execute()
        world.check()
    assert world.done > 100
    assert cancelled > 10
    assert faults > 5


def test_the_earliest_request_is_never_delayed_by_later_ones() -> None:
    """Under constant pressure the first sequence takes exactly the steps it would take alone."""
    world = World(8, 4, 8, causal=True)
    world.add(list(range(12)), 12)
    steps = 0
    while 1 in world.stories:
        world.add([1, 2, 3], 20)
        world.make_plan()
        assert world.plan is not None
        assert 1 in {c.seq_id for c in world.plan.chunks}
        world.execute()
        world.check()
        steps += 1
    assert steps == 2 + 11
    assert world.s.num_preemptions > 0
