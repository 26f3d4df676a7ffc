"""Plans that verify drafts and move memory: every row of logits is the one of a plain decode, bit for bit."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from plait.errors import EngineError
from plait.loading.build import Loaded
from plait.memory import has_slots
from plait.runner.host.pooling import add_pooled
from plait.runner.host.static_batch import Capacity
from plait.runner.runner import ModelRunner
from plait.schedule.plan import (
    Chunk,
    CopyBlock,
    CopySlot,
    Drop,
    Load,
    Move,
    Sampled,
    SamplingBatch,
    Save,
    StepPlan,
)
from tests.runner.recordings import BLOCK, SEQS, loaded, memory
from tests.runner.test_program import checkpoints as checkpoints
from tests.runner.test_program import folder_of, options_of

# Shared heads, windows alone and with full attention, MLA with experts, Mamba1, 2 and 3, hybrids of them.
NAMES = (
    "llama", "mistral", "gemma3", "deepseek_v3", "mamba2", "bamba", "nemotron_h",
    "oxidizr_hybrid", "oxidizr_mamba1", "oxidizr_mamba3_mimo_conv",
)  # fmt: skip
MOST = 9  # tokens of a later chunk


class Keeper:
    """A sampler that keeps the logits."""

    plain_largest = None

    def __init__(self) -> None:
        self.logits = torch.empty(0)

    @property
    def host(self) -> Keeper:
        return self

    def sample(self, logits: Any, batch: SamplingBatch, largest: None = None) -> list[Sampled]:
        self.logits = torch.as_tensor(logits).clone()
        return []


@dataclass
class Life:
    """A sequence: what it says, the logits after each token, and where its memory is."""

    ids: tuple[int, ...]
    want: Tensor
    tables: list[list[int]] = field(default_factory=list)
    slot: int = 0
    done: int = 0
    saved: int = 0


class World:
    """Sequences that are swapped, moved and given wrong draft tokens, next to each other in one memory."""

    def __init__(self, model: Loaded, seed: int, length: int, piece: int) -> None:
        """Each of `length` tokens, of which the first step takes up to `piece`."""
        self.rng, self.model = random.Random(seed), model
        engine, decoder = model.runner, model.runner.decoder
        self.keeper, self.groups = Keeper(), engine.groups
        self.length, self.piece = length, piece
        num_blocks, num_slots = -(-length // BLOCK), 2 * SEQS + 2
        tokens = SEQS * max(piece, MOST)
        sizes = Capacity(tokens, tokens + 1, SEQS, num_blocks)
        store = memory(model, num_slots, length)
        sampler: Any = self.keeper
        self.runner = ModelRunner(
            decoder, store, sampler, engine.device, executor=engine.executor, capacity=sizes
        )
        self.has_slots = has_slots(decoder.states)
        self.free = [self._shuffled(SEQS * num_blocks + 2) for _ in self.groups]
        self.slots = self._shuffled(num_slots)
        self.refs = [Counter[int]() for _ in self.groups]
        self.handles, self.moves = 0, list[Move]()
        self.counts: dict[str, int] = {}
        vocab = decoder.spec.vocab_size
        self.lives, prefix = [], ()
        for _ in range(SEQS):  # the first tokens are the same
            ids = (*prefix, *(self.rng.randrange(1, vocab) for _ in range(length - len(prefix))))
            self.lives.append(Life(ids, self._decoded(ids)))
            prefix = ids[: length // 2]

    def _shuffled(self, count: int) -> list[int]:
        return self.rng.sample(range(1, count), count - 1)

    def _decoded(self, ids: tuple[int, ...]) -> Tensor:
        """Logits after each token, which are given one by one."""
        tables = tuple(tuple(range(1, -(-self.length // BLOCK) + 1)) for _ in self.groups)
        rows = []
        for i, token in enumerate(ids):
            plan = StepPlan(0, (Chunk(0, i, (token,), tables, 1, 1),), fresh=() if i else (1,))
            self.runner.launch(plan, SamplingBatch(()))
            rows.append(self.keeper.logits)
        return torch.cat(rows)

    def _take(self, g: int) -> int:
        block = self.free[g].pop()
        self.refs[g][block] = 1
        return block

    def _release(self, g: int, block: int) -> None:
        self.refs[g][block] -= 1
        if not self.refs[g][block]:
            self.free[g].insert(0, block)

    def count(self, what: str) -> None:
        self.counts[what] = self.counts.get(what, 0) + 1

    def step(self) -> None:
        """One plan, and its logits compared."""
        self.moves, wanted, chunks, fresh = [], [], [], []
        for life in self.rng.sample(self.lives, SEQS):
            self._move(life)
            late = life.done == 0 and life is not self.lives[0]
            if life.saved or life.done == self.length or self.rng.random() < (0.7 if late else 0.1):
                continue
            if life.done == 0 and self.has_slots:
                life.slot = life.slot or self.slots.pop()
                fresh.append(life.slot)
            chunk, good, scratch = self._chunk(life)
            chunks.append(chunk)
            wanted.append((life, chunk, good, scratch))
        plan = StepPlan(0, tuple(chunks), tuple(self.moves), tuple(fresh))
        self.runner.launch(plan, SamplingBatch(()))
        row = 0
        for life, chunk, good, scratch in wanted:
            got = self.keeper.logits[row : row + chunk.num_logits]
            row += chunk.num_logits
            assert torch.equal(got[:good], life.want[chunk.start : chunk.start + good]), chunk
            self._settle(life, chunk.start + good, scratch)

    def _chunk(self, life: Life) -> tuple[Chunk, int, int]:
        """(the chunk, how many of its tokens are right, the slot to go back to after a wrong draft)."""
        count = self.rng.choice((1, 1, 2, 5, MOST)) if life.done else self.rng.randint(1, self.piece)
        count = min(count, self.length - life.done)
        good, ids, scratch = count, list(life.ids[life.done : life.done + count]), 0
        if life.done and count > 1 and self.rng.random() < 0.5:
            good = self.rng.randrange(1, count)
            ids[good] = 1 + ids[good] % 7  # never the same
            self.count("wrong guesses")
            if life.slot:
                scratch = self.slots.pop()
                self.moves.append(CopySlot(life.slot, scratch))
        end = life.done + count
        life.tables = life.tables or [[] for _ in self.groups]
        for g, table in enumerate(life.tables):
            table += [self._take(g) for _ in range(-(-end // BLOCK) - len(table))]
        tables = tuple(map(tuple, life.tables))
        return Chunk(0, life.done, tuple(ids), tables, life.slot, count), good, scratch

    def _settle(self, life: Life, end: int, scratch: int) -> None:
        """What the chunk has reached; behind a wrong draft a slot's tokens are computed again."""
        if scratch:
            self.slots.insert(0, life.slot)
            life.slot = scratch
        else:
            life.done = end
        for g, group in enumerate(self.groups):  # what lies wholly behind the window goes back
            behind = max(life.done - group.window + 1, 0) // BLOCK if group.window else 0
            for i, block in enumerate(life.tables[g][:behind]):
                if block:
                    self._release(g, block)
                    life.tables[g][i] = 0

    def _move(self, life: Life) -> None:
        chance = self.rng.random()
        if life.saved:
            if chance < 0.5:
                self._load(life)
        elif not life.done:
            self._fork(life)
        elif 0 < life.done < self.length and chance < 0.2:
            self._save(life)
        elif 0 < life.done < self.length and chance < 0.5:
            self._move_house(life)

    def _fork(self, life: Life) -> None:
        """Begin behind what another has computed of the same tokens: share blocks, copy the last one."""
        for other in self.lives:
            done = other.done
            if not done or other.saved or life.ids[:done] != other.ids[:done] or done == self.length:
                continue
            self.count("forks")
            life.done, life.tables = done, [list(table[: -(-done // BLOCK)]) for table in other.tables]
            for g, table in enumerate(life.tables):
                for i, block in enumerate(table):
                    if block and i < done // BLOCK:
                        self.refs[g][block] += 1
                    elif block:
                        table[i] = self._take(g)
                        self.moves.append(CopyBlock(g, block, table[i]))
            if other.slot:
                life.slot = self.slots.pop()
                self.moves.append(CopySlot(other.slot, life.slot))
            return

    def _save(self, life: Life) -> None:
        self.handles += 1
        self.count("swaps")
        blocks = tuple(tuple(block for block in table if block) for table in life.tables)
        self.moves.append(Save(self.handles, blocks, life.slot))
        life.saved = self.handles
        for g, some in enumerate(blocks):
            for block in some:
                self._release(g, block)
        if life.slot:
            self.slots.insert(0, life.slot)

    def _load(self, life: Life) -> None:
        life.tables = [
            [self._take(g) if block else 0 for block in table] for g, table in enumerate(life.tables)
        ]
        life.slot = self.slots.pop() if self.has_slots else 0
        blocks = tuple(tuple(block for block in table if block) for table in life.tables)
        self.moves += [Load(life.saved, blocks, life.slot), Drop(life.saved)]
        life.saved = 0

    def _move_house(self, life: Life) -> None:
        """Another slot and other blocks: any of them, in the middle too."""
        self.count("moves")
        for g, table in enumerate(life.tables):
            for i in [i for i, block in enumerate(table) if block and self.rng.random() < 0.7]:
                if self.free[g]:
                    new = self._take(g)
                    self.moves.append(CopyBlock(g, table[i], new))
                    self._release(g, table[i])
                    table[i] = new
        if life.slot:
            new = self.slots.pop()
            self.moves.append(CopySlot(life.slot, new))
            self.slots.insert(0, life.slot)
            life.slot = new


def assert_walked(model: Loaded, seed: int, length: int = 45, piece: int = 14) -> dict[str, int]:
    """All logits of a walk; what happened in it, by name."""
    world = World(model, seed, length, piece)
    assert world.runner.is_recorded, world.runner.step_kind
    for _ in range(20 * length):
        if all(life.done == length for life in world.lives):
            break
        world.step()
    assert all(life.done == length for life in world.lives)
    assert world.runner.store.nbytes_saved == 0
    assert set(world.counts) >= {"wrong guesses", "swaps", "moves"}, world.counts
    return world.counts


@pytest.fixture(scope="module", params=NAMES)
def model(request: pytest.FixtureRequest, checkpoints: Path) -> Iterator[Loaded]:
    with loaded(folder_of(request.param, checkpoints), **options_of(request.param)) as found:
        yield found


def test_drafts_and_moves_change_no_bit(model: Loaded) -> None:
    counts = [assert_walked(model, seed) for seed in range(5)]
    assert sum(some.get("forks", 0) for some in counts) > 2


@pytest.mark.parametrize("name", ["gemma3", "deepseek_v3", "nemotron_h"])
@pytest.mark.parametrize(
    "options", [{"quantize": "q8_0", "kv_dtype": "bfloat16"}, {"quantize": "q4_1"}, {"kv_dtype": "int8"}]
)
def test_nor_do_they_with_quantized_weights(name: str, options: dict[str, Any], checkpoints: Path) -> None:
    with loaded(folder_of(name, checkpoints), **options_of(name), **options) as model:
        assert_walked(model, 0)


@pytest.mark.parametrize("name", ["llama", "deepseek_v3", "bamba"])
def test_nor_do_they_in_long_sequences(name: str, checkpoints: Path) -> None:
    """Attention adds up the past in splits of 256 tokens, MLA of 128; scans take long chunks another way."""
    longer = {"set": ("max_position_embeddings=512",), "max_model_len": 512}
    with loaded(folder_of(name, checkpoints), **longer) as model:
        for seed in range(2):
            assert_walked(model, seed, length=300, piece=247)


def test_nor_do_they_in_a_trained_hybrid(nano_hybrid: Path) -> None:
    with loaded(nano_hybrid) as model:
        assert_walked(model, 0)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
@pytest.mark.parametrize("precise", [False, True])
def test_nor_do_they_in_real_models(name: str, precise: bool, request: pytest.FixtureRequest) -> None:
    with loaded(request.getfixturevalue(name), precise=precise, max_model_len=512) as model:
        assert_walked(model, 0, length=300, piece=247)


@pytest.fixture(scope="module")
def one(checkpoints: Path) -> Iterator[Loaded]:
    with loaded(folder_of("bamba", checkpoints)) as found:
        yield found


class Order:
    """A store that records its calls."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *arguments: self.calls.append(
            (name, *(a if isinstance(a, int | tuple) else list(a) for a in arguments))
        )


def test_moves_are_made_in_order_and_before_fresh_slots_are_zeroed(one: Loaded) -> None:
    """Neighbours of one kind in one call; a plan that only moves has no pass and no answers."""
    engine = one.runner
    runner = ModelRunner(engine.decoder, engine.store, engine.sampler, engine.device)
    store: Any = Order()
    runner.store = store
    moves = (
        CopySlot(1, 2), CopySlot(2, 3), CopyBlock(0, 4, 5), CopyBlock(0, 5, 6), CopyBlock(1, 7, 8),
        CopySlot(3, 4), Save(9, ((1, 2), ()), 3), Drop(9), Load(8, ((3,), (4,)), 0), CopyBlock(0, 1, 2),
    )  # fmt: skip
    assert runner.launch(StepPlan(1, (), moves, fresh=(4,)), SamplingBatch(())).wait() == []
    assert store.calls == [
        ("copy_rows", -1, [(1, 2), (2, 3)]),
        ("copy_rows", 0, [(4, 5), (5, 6)]),
        ("copy_rows", 1, [(7, 8)]),
        ("copy_rows", -1, [(3, 4)]),
        ("save", 9, ((1, 2), ()), 3),
        ("drop", 9),
        ("load", 8, ((3,), (4,)), 0),
        ("copy_rows", 0, [(1, 2)]),
        ("zero_slots", (4,)),
    ]


def test_a_plan_that_loads_what_was_never_saved_fails_by_name(one: Loaded) -> None:
    moves = (Load(404, tuple(() for _ in one.runner.groups), 0),)
    with pytest.raises(EngineError, match="nothing is saved as 404"):
        one.runner.launch(StepPlan(1, (), moves), SamplingBatch(()))


def pooled_chunk(num_tokens: int, num_pooled: int) -> Chunk:
    fields = dict(seq_id=1, start=0, token_ids=(0,) * num_tokens, blocks=(), slot=0, num_logits=0)
    return Chunk(**fields, num_pooled=num_pooled)  # type: ignore[arg-type]


def test_add_pooled_sums_the_last_rows_of_a_chunk() -> None:
    hidden = np.arange(10, dtype=np.float32).reshape(5, 2)
    found = add_pooled(StepPlan(1, (pooled_chunk(2, 1), pooled_chunk(3, 2))), hidden, [Sampled(), Sampled()])
    assert [answer.pooled for answer in found] == [(2.0, 3.0), (6.0 + 8.0, 7.0 + 9.0)]


@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_add_pooled_rejects_a_sum_that_is_no_number(broken: float) -> None:
    hidden = np.full((2, 4), broken, np.float32)
    with pytest.raises(EngineError, match="hidden states are no numbers"):
        add_pooled(StepPlan(1, (pooled_chunk(2, 2),)), hidden, [Sampled()])
