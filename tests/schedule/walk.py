"""A harness for random walks: a scheduler, a model of its memory, and the expected reply of each sequence."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from plait.errors import EngineError
from plait.memory import BlockGroup
from plait.request import SamplingParams
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits
from plait.schedule.plan import Drop, SamplingBatch, Save, StepPlan
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler
from plait.schedule.sequence import TokenSequence
from plait.schedule.turns import Update
from plait.state.blocks import PrefixIndex, extend
from tests.schedule.memory_model import (
    BLOCK_NBYTES,
    POISON,
    SLOT_NBYTES,
    VOCAB_SIZE,
    Ask,
    ModelMemory,
    Story,
    prompt_scores,
)

FULL = BlockGroup("full", None, ("a",))
WINDOW = BlockGroup("window:6", 6, ("b",))
WIDE = BlockGroup("window:9", 9, ("c",))


@dataclass(frozen=True, slots=True)
class Shape:
    """What kinds of memory a model has."""

    groups: tuple[BlockGroup, ...]
    has_slots: bool


SHAPES: Mapping[str, Shape] = {
    "full": Shape((FULL,), False),  # Llama, DeepSeek's MLA
    "windows": Shape((WINDOW, WIDE), False),
    "full+window": Shape((FULL, WINDOW), False),  # Gemma
    "slots": Shape((), True),  # Mamba
    "full+slots": Shape((FULL,), True),  # Bamba
    "full+window+slots": Shape((FULL, WINDOW), True),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Capacities of a walk; tokens per block, blocks of every group without the garbage block."""

    num_blocks: int = 20
    num_spare_slots: int = 2
    num_seqs: int = 4
    budget: int = 16
    max_model_len: int = 32
    block_size: int = 4
    snapshot_interval: int = 8
    host_nbytes: int = 0
    shares: bool = True
    causal: bool = True
    num_steps: int = 1


@dataclass(frozen=True, slots=True)
class Wish:
    """What a client asks for; `length` 0: no token at all is to be generated."""

    prompt: tuple[int, ...]
    length: int = 8
    num_choices: int = 1
    params: Mapping[str, object] = field(default_factory=dict)
    seed: int = 0
    stops: frozenset[int] = frozenset()
    salt: str = ""
    boundaries: tuple[int, ...] = ()
    priority: int = 0
    deadline: float | None = None
    scores: bool = False
    watched: bool = True


class World:
    """Everything that can happen to a scheduler, each checked against the stories.

    `stories`: the open sequences, by id. `counts`: what has happened, by name.
    """

    def __init__(self, shape: Shape, size: Size) -> None:
        self.shape, self.size = shape, size
        self.limits = SchedulerLimits(
            max_num_seqs=size.num_seqs,
            max_num_batched_tokens=size.budget,
            max_waiting=1000,
            max_model_len=size.max_model_len if size.causal else min(size.max_model_len, size.budget),
            num_steps=size.num_steps,
            causal=size.causal,
        )
        num_blocks = tuple(size.num_blocks + 1 for _ in shape.groups)
        num_slots = size.num_seqs + size.num_spare_slots + 1 if shape.has_slots else 0
        self.memory = Allocation(
            shape.groups,
            num_blocks,
            size.block_size,
            num_slots=num_slots,
            max_step_len=size.budget,
            trims=size.causal,
            cache=CacheOptions(
                shares=size.shares and size.causal,
                snapshot_interval=size.snapshot_interval,
                block_nbytes=(BLOCK_NBYTES,) * len(shape.groups),
                slot_nbytes=SLOT_NBYTES if shape.has_slots else 0,
                host_nbytes=size.host_nbytes,
            ),
        )
        self.now = 0.0
        self.s = Scheduler(self.limits, self.memory, clock=lambda: self.now)
        self.s.costs.observe(1, 1e-4)
        self.device = ModelMemory(
            shape.groups, num_blocks, size.block_size, num_slots, self.limits, size.host_nbytes
        )
        self.stories: dict[int, Story] = {}
        self.wishes: dict[int, Wish] = {}
        self.told: list[tuple[int, ...]] = []  # whole texts, prompts included: conversations that may go on
        self.plan: StepPlan | None = None
        self.plans: list[StepPlan] = []
        self.counts: Counter[str] = Counter()
        self.suspects: set[int] = set()
        self._batch = SamplingBatch(())
        self._planned: dict[int, Story] = {}
        self._sequences: dict[int, TokenSequence] = {}
        self.starts: dict[int, int] = {}
        self._digests: dict[bytes, list[int]] = {}  # by chain hash: what a block with this name holds
        self._ids = 0
        self.may_wait = False  # for a disk: then there may be work and no plan

    def submit(self, requested: Wish) -> list[int]:
        """A request arrives, with all its choices."""
        prompt = requested.prompt[: self.limits.max_model_len]
        max_len = min(len(prompt) + requested.length, self.limits.max_model_len)
        ids = [*range(self._ids + 1, self._ids + 1 + requested.num_choices)]
        params = SamplingParams(**{"temperature": 0.0, **requested.params, "max_tokens": requested.length})  # type: ignore[arg-type]
        sequences = []
        for index, seq_id in enumerate(ids):
            ask = Ask(prompt, params, max_len, requested.seed * 100 + index, requested.stops, requested.salt)
            sequences.append(
                ask.sequence(
                    seq_id,
                    f"r{ids[0]}",
                    index,
                    wants_prompt_logprobs=requested.scores and index == 0,
                    boundaries=tuple(b for b in requested.boundaries if b <= len(prompt)),
                    priority=requested.priority,
                    deadline=requested.deadline,
                    is_watched=requested.watched,
                )
            )
            self.stories[seq_id], self.wishes[seq_id] = Story.of(ask), requested
        self._ids = ids[-1]
        self.s.add(*sequences)
        self._sequences.update({seq.id: seq for seq in sequences})
        return ids

    def cancel(self, seq_id: int) -> None:
        self.s.cancel(seq_id)
        del self.stories[seq_id]
        self.counts["cancelled"] += 1

    def pass_time(self, seconds: float) -> None:
        """Exactly the sequences past their deadlines are reported, and the caller ends them."""
        self.now += seconds
        late = {i for i in self.stories if (d := self.wishes[i].deadline) is not None and d <= self.now}
        assert set(self.s.expire(self.now)) == late
        for seq_id in sorted(late):
            self.cancel(seq_id)
        self.counts["expired"] += len(late)

    def make_plan(self, drafts: Mapping[int, tuple[int, ...]] | None = None) -> None:
        """The scheduler decides; there is always something to do for open sequences."""
        for seq_id, story in self.stories.items():
            story.draft = (drafts or {}).get(seq_id, ())
        had_work = self.s.has_work
        self.plan = self.s.plan(drafts or {})
        assert (self.plan is not None) == had_work or self.may_wait
        if self.plan is None:
            assert not self.stories or self.may_wait, "there is work and nobody works"
            return
        self.plans.append(self.plan)
        self._batch = self.s.sampling(self.plan)
        self._planned = {c.seq_id: self.stories[c.seq_id] for c in self.plan.chunks}
        self._name_blocks()
        if self.suspects & self._planned.keys():
            assert len(self.plan.chunks) == 1, "who may have failed a step is not alone"
        for chunk in self.plan.chunks:
            self.starts.setdefault(chunk.seq_id, chunk.start)
        self._check_sharing(self.plan)

    def execute(self) -> None:
        """The plan runs, also for those who were cancelled since; its answers are committed and checked."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        sampled = self.device.execute(plan, self._batch, self._planned)
        self._check_claims()
        if sampled:
            with pytest.raises(EngineError):  # and nothing is changed
                self.s.commit(plan, sampled[1:])
        for update in self.s.commit(plan, sampled):
            self._learn(update)
        self._name_blocks()
        self.counts["steps"] += plan.num_steps
        self.counts["multi-steps"] += plan.num_steps > 1
        self.counts["tokens"] += plan.num_tokens * plan.num_steps

    def fail(self, num_moves: int) -> None:
        """The step fails half-way. A sequence alone in it was the cause; of several, the cause is unknown."""
        assert self.plan is not None
        plan, self.plan = self.plan, None
        self.device.fail(plan, num_moves)
        if len(plan.chunks) == 1 and plan.chunks[0].seq_id in self.stories:
            self.cancel(plan.chunks[0].seq_id)
        self.suspects |= {chunk.seq_id for chunk in plan.chunks}
        self.s.isolate()
        self.counts["failed"] += 1

    def drafts(self, rng: random.Random) -> dict[int, tuple[int, ...]]:
        """Proposals for running sequences: right, wrong, right at first, or none."""
        found = {}
        for seq in self.s.list_drafting():
            story, room = self.stories[seq.id], seq.max_len - seq.num_tokens - 1
            stop = story.reply.stop_token_id
            truth = [*story.reply.token_ids[story.num_output_tokens :], *([] if stop is None else [stop])]
            right = rng.choice([0, 1, 2, 5])
            guess = truth[:right] + [rng.randrange(VOCAB_SIZE) for _ in range(rng.choice([0, 0, 1, 3]))]
            if guess[:room] and rng.random() < 0.8:
                found[seq.id] = tuple(guess[:room])
        return found

    def check(self) -> None:
        """The scheduler's own invariants, and that free, cached and held make up the whole."""
        self.s.check()
        stats = self.s.stats()
        assert stats["num_free_blocks"] + stats["num_cached_blocks"] <= stats["num_blocks"]
        assert len(self.s.running) <= self.size.num_seqs
        assert stats["num_running"] + stats["num_waiting"] == len(self.stories)

    def drain(self) -> None:
        """Every sequence is served in the end, and then nothing is held without a holder."""
        for _ in range(200 + 100 * len(self.stories)):
            if self.plan is None:
                self.make_plan()
            if self.plan is None:
                if not self.may_wait or not self.stories:
                    break
                self.now += 0.1
                continue
            self.execute()
            self.check()
        assert not self.stories, "somebody is never served"
        self.check_at_rest()

    def check_at_rest(self) -> None:
        """With no sequence left, everything is free or cached, here and in host memory."""
        stats = self.s.stats()
        assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"]
        assert stats["num_free_slots"] + stats["num_snapshots"] == stats["num_slots"]
        index = self.index
        cached = {s.handle for places in index.snapshots.values() for s in places if s.handle}
        assert self.device.host.keys() <= cached, "host memory is held by nobody"

    @property
    def index(self) -> PrefixIndex:
        return self.memory.pools.index

    def _learn(self, update: Update) -> None:
        """A client gets the same text as from a sequence that runs alone."""
        story = self.stories[update.seq_id]
        self.suspects.discard(update.seq_id)
        said, reply = story.num_output_tokens, story.reply
        assert update.event.token_ids == reply.token_ids[said : said + len(update.event.token_ids)]
        if story.ask.params.logprobs is not None:
            expected = reply.logprobs[said : said + len(update.event.token_ids)]
            assert (update.event.logprobs or ()) == expected
        if said == 0 and self.wishes[update.seq_id].scores and update.event.index == 0:
            assert update.event.prompt_logprobs == prompt_scores(story.ask)
        story.extend(update.event.token_ids)
        self.counts["accepted"] += max(len(update.event.token_ids) - 1, 0)
        finished = story.num_output_tokens == len(reply.token_ids)
        if update.event.finish_reason is None:
            assert update.event.token_ids
            assert not finished or reply.finish_reason == "stop"
            return
        assert finished
        assert (update.event.finish_reason, update.event.stop_token_id) == (
            reply.finish_reason,
            reply.stop_token_id,
        )
        assert update.event.num_cached_tokens == self.starts[update.seq_id]
        self.counts["hit tokens"] += update.event.num_cached_tokens
        self.counts["finished"] += 1
        self.told.append(tuple(story.tokens))
        del self.stories[update.seq_id]

    def _name_blocks(self) -> None:
        """Remember what a block holds that is known under a hash; hashes begin where the sequence's do."""
        size = self.size.block_size
        for seq_id, story in self._planned.items():
            chain = [self._sequences[seq_id].chain[0]]
            extend(chain, story.tokens, size)
            for i, name in enumerate(chain):
                self._digests[name] = story.digests[max(i - 1, 0) * size + (i > 0) : i * size + 1]

    def _check_claims(self) -> None:
        """After the pass, before anything is committed, all that the index claims is there."""
        for group, blocks in enumerate(self.index.blocks):
            for name, block in blocks.items():
                held = self.device.blocks[group][block]
                assert held == self._digests[name], f"group {group}: block {block} is not what it is called"
        for parent, places in self.index.snapshots.items():
            for snapshot in places:
                digests = self._digests[parent][-1:]
                for token in snapshot.rest:
                    digests.append(hash((digests[-1], token)))
                if snapshot.slot:
                    assert self.device.slots[snapshot.slot] == digests[-1], "a snapshot is not what it says"
                if snapshot.handle:
                    assert self.device.host[snapshot.handle][1] in {digests[-1], POISON}
                for group, block in enumerate(snapshot.blocks):
                    if block:
                        assert self.device.blocks[group][block][: len(digests) - 1] == digests[1:]

    def _check_sharing(self, plan: StepPlan) -> None:
        """No sequence writes to a block or a slot that another running sequence has."""
        for chunk in plan.chunks:
            others = [seq for seq in self.s.running if seq.id != chunk.seq_id]
            assert not chunk.slot or all(seq.slot != chunk.slot for seq in others)
            for group in range(len(self.shape.groups)):
                written = set(self.device.written(chunk, group))
                shared = [seq.id for seq in others if written & set(seq.tables[group])]
                assert not shared, f"{chunk} writes to blocks of {shared}"
        assert all(m.handle for m in plan.moves if isinstance(m, Save | Drop))


def branch(trunk: int, fork: int, number: int, length: int) -> tuple[int, ...]:
    """A prompt of a tree: like every other of its trunk up to `fork`, then like those of the same number."""
    names = [(trunk, p) if p < fork else (trunk, fork, number, p) for p in range(length)]
    return tuple(hash(name) % VOCAB_SIZE for name in names)


def any_wish(world: World, rng: random.Random) -> Wish:
    """A request like others before it, or one that goes on where another ended."""
    prompt = branch(rng.randrange(2), rng.choice([3, 4, 8, 11, 16, 21]), rng.randrange(3), rng.randint(1, 24))
    if world.told and rng.random() < 0.3:
        prompt = (*rng.choice(world.told[-8:]), *prompt[: rng.randint(1, 5)])
    params: dict[str, object] = {"temperature": rng.choice([0.0, 0.0, 0.0, 1.0])}
    if rng.random() < 0.2:
        params |= {"logprobs": 0, "presence_penalty": rng.choice([0.0, 0.5])}
    if rng.random() < 0.2:
        params["min_tokens"] = rng.randint(0, 3)
    return Wish(
        prompt,
        length=rng.choice([0, 1, 3, 8, 15]) if "min_tokens" not in params else rng.randint(3, 15),
        num_choices=rng.choice([1, 1, 1, 2, 4]),
        params=params,
        seed=rng.randrange(3),
        stops=frozenset(rng.choice([[], [], [1], [1, 3]])),
        salt=rng.choice(["", "", "", "mine"]),
        boundaries=tuple(sorted(rng.sample(range(1, 25), rng.randint(0, 2)))),
        priority=rng.choice([0, 0, 0, 1, -1]),
        deadline=world.now + rng.randint(1, 60) if rng.random() < 0.05 else None,
        scores=rng.random() < 0.1,
        watched=world.size.num_steps == 1 or rng.random() < 0.1,
    )


def wander(
    world: World, rng: random.Random, num_steps: int, *, busy: float = 0.2, faults: float = 0.01
) -> None:
    """That many steps of random life. `busy`: requests per step; `faults`: failed steps per step."""
    for _ in range(num_steps):
        if rng.random() < busy and len(world.stories) < 4 * world.size.num_seqs:
            world.submit(any_wish(world, rng))
        world.pass_time(1.0)
        if world.stories and rng.random() < 0.02:
            world.cancel(rng.choice(sorted(world.stories)))
        world.make_plan(world.drafts(rng) if rng.random() < 0.7 else None)
        while world.stories and rng.random() < 0.04:
            world.cancel(rng.choice(sorted(world.stories)))
        if rng.random() < 0.05:
            world.submit(any_wish(world, rng))
        if world.plan is not None and rng.random() < faults:
            world.fail(rng.randint(0, len(world.plan.moves)))
        elif world.plan is not None:
            world.execute()
        world.check()
