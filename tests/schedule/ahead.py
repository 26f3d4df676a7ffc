"""The harness of random walks with steps that are planned while the one before them runs."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass

from msgspec import structs

from plait.schedule.plan import FOLLOW, Sampled, SamplingBatch, StepPlan
from tests.schedule.memory_model import Story
from tests.schedule.walk import Shape, Size, World, any_wish


@dataclass(frozen=True, slots=True)
class Launched:
    """A plan that the device has computed and the scheduler has not committed. `told`: what clients know."""

    plan: StepPlan
    batch: SamplingBatch
    sampled: list[Sampled]
    told: Mapping[int, Story]

    @property
    def can_be_followed(self) -> bool:
        """Whether nothing of its sampling has to be done on the host."""
        return all(not row.history and row.params.logprobs is None for row in self.batch.rows)


class AheadWorld(World):
    """A world that commits one step behind. `flight`: the step that runs.

    The device computes in the order of launches, so it does so at once; only the scheduler learns it later.
    """

    def __init__(self, shape: Shape, size: Size) -> None:
        super().__init__(shape, size)
        self.flight: Launched | None = None

    def launch(self, drafts: Mapping[int, tuple[int, ...]] | None = None) -> bool:
        """Plan with nothing under way. False: there is nothing to do."""
        assert self.flight is None
        self.make_plan(drafts)
        if self.plan is None:
            return False
        plan, self.plan = self.plan, None
        self.flight = self._ran(plan, self._batch, dict(self._planned))
        return True

    def launch_ahead(self) -> Launched | None:
        """Plan and run the next step, with what the device has sampled in the place of FOLLOW."""
        flight = self.flight
        assert flight is not None
        if not flight.can_be_followed or (plan := self.s.plan_ahead(flight.plan)) is None:
            return None
        self.plans.append(plan)
        batch, stories = self.s.sampling(plan), {}
        answering = [chunk.seq_id for chunk in flight.plan.chunks if chunk.has_answer]
        said = {i: answer.token_ids for i, answer in zip(answering, flight.sampled, strict=True)}
        chunks = []
        for chunk in plan.chunks:
            told = self.stories[chunk.seq_id]
            story = Story(told.ask, [*told.tokens], [*told.digests], told.reply)
            if self._sequences[chunk.seq_id].awaited:
                story.extend(said.get(chunk.seq_id, ()))
            if chunk.token_ids == (FOLLOW,):
                chunk = structs.replace(chunk, token_ids=said[chunk.seq_id])
                self.counts["followed"] += 1
            chunks.append(chunk)
            stories[chunk.seq_id] = story
            self.starts.setdefault(chunk.seq_id, chunk.start)
        self._planned = dict(stories)
        self._name_blocks()
        self._check_sharing(plan)
        seen = StepPlan(plan.step, tuple(chunks), plan.moves, plan.fresh, plan.num_steps)
        return self._ran(plan, batch, stories, seen)

    def land(self, ahead: Launched | None) -> None:
        """Commit the step that runs; `ahead` is the one that runs from now on."""
        flight, self.flight = self.flight, ahead
        assert flight is not None
        for update in self.s.commit(flight.plan, flight.sampled):
            self._learn(update)
        self._planned = dict(flight.told)
        self._name_blocks()
        self.counts["steps"] += 1
        self.counts["multi-steps"] += flight.plan.num_steps > 1

    def lose(self, num_moves: int) -> None:
        """The step that runs fails. What was launched after it is void, too."""
        flight, self.flight = self.flight, None
        assert flight is not None
        self.plan = flight.plan
        self.fail(num_moves)

    def settle(self) -> None:
        """Serve every sequence."""
        for _ in range(200 + 100 * len(self.stories)):
            if self.flight is None and not self.launch():
                break
            self.land(self.launch_ahead())
            self.check()
        assert not self.stories, "a sequence is never served"
        self.check_at_rest()

    def _ran(
        self, plan: StepPlan, batch: SamplingBatch, stories: Mapping[int, Story], seen: StepPlan | None = None
    ) -> Launched:
        sampled = self.device.execute(seen or plan, batch, stories)
        self._check_claims()
        return Launched(plan, batch, sampled, {i: self.stories[i] for i in stories})


def wander_ahead(
    world: AheadWorld, rng: random.Random, num_steps: int, *, busy: float = 0.2, faults: float = 0.01
) -> None:
    """That many steps of random life, some with drafts, which no step can follow before they are checked."""
    for _ in range(num_steps):
        if rng.random() < busy and len(world.stories) < 4 * world.size.num_seqs:
            world.submit(any_wish(world, rng))
        world.pass_time(1.0)
        if world.stories and rng.random() < 0.02:
            world.cancel(rng.choice(sorted(world.stories)))
        if world.flight is None and not world.launch(world.drafts(rng) if rng.random() < 0.2 else None):
            continue
        while world.stories and rng.random() < 0.04:
            world.cancel(rng.choice(sorted(world.stories)))
        if rng.random() < 0.05:
            world.submit(any_wish(world, rng))
        ahead = world.launch_ahead() if rng.random() < 0.9 else None
        if rng.random() < faults:
            world.lose(0)
        else:
            world.land(ahead)
        world.check()
