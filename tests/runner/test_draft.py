"""A draft model's draft tokens are those it generates alone, whatever became of its earlier ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from plait.loading.build import Loaded
from plait.memory import BlockGroup, has_slots
from plait.request import SamplingParams
from plait.runner.draft import DraftModel, Masks
from plait.runner.host.draft_memory import DraftMemory
from plait.runner.host.static_batch import Capacity
from plait.runner.runner import ModelRunner
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import SamplingBatch, SamplingRow, StepPlan, Ticket
from plait.schedule.speculate import Proposer
from plait.state.store import StateStore
from tests.families import tiny
from tests.runner.recordings import loaded

GREEDY = SamplingParams(temperature=0.0)
SAMPLED = SamplingParams(temperature=1.3, top_k=20, top_p=0.95, min_p=0.01)
NAMES = ("llama", "mistral", "gemma2", "mamba2_plain", "bamba")  # pages, windows, slots, and all mixed


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, Loaded]]:
    root, made = tmp_path_factory.mktemp("drafts"), Models()
    made.root = root
    yield made
    for keep in made.open:
        keep.close()


class Models(dict[str, Loaded]):
    """Loaded when they are first used."""

    root: Path

    def __init__(self) -> None:
        super().__init__()
        self.open: list[Any] = []

    def __missing__(self, name: str) -> Loaded:
        tiny.write(name, self.root / name)
        life = keep(self.root / name)
        self.open.append(life)
        self[name] = next(life)
        return self[name]


def keep(folder: Path) -> Iterator[Loaded]:
    with loaded(folder) as model:
        yield model


@dataclass
class Counting:
    """A runner that records its plans and rows, and fails while `fails` is set."""

    runner: ModelRunner
    plans: list[StepPlan] = field(default_factory=list)
    rows: list[SamplingRow] = field(default_factory=list)
    fails: bool = False

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        self.plans.append(plan)
        self.rows += sampling.rows
        ticket = self.runner.launch(plan, sampling)
        if self.fails:
            raise ZeroDivisionError("the chip is on fire")
        return ticket


@dataclass
class Bench:
    """A draft model over a loaded one, and what that one says by itself."""

    model: Loaded
    draft: DraftModel
    runner: Counting

    def ask(
        self, tokens: Sequence[int], limit: int = 5, params: SamplingParams = GREEDY, seq_id: int = 1
    ) -> tuple[int, ...]:
        return self.draft.propose([DraftRequest(seq_id, tokens, limit, params, 7)]).get(seq_id, ())

    def alone(
        self, tokens: Sequence[int], count: int = 5, params: SamplingParams = GREEDY
    ) -> tuple[int, ...]:
        """What the model itself goes on with, computed anew for every token."""
        text, runner = list(tokens), self.model.runner
        for _ in range(count):
            row = SamplingRow(params, 1, 1, len(text), 7)
            logits = runner.logits(text, 64)[-1:]
            text += runner.sampler.sample(logits, SamplingBatch((row,)))[0].token_ids
        return tuple(text[len(tokens) :])


def bench(
    model: Loaded, *, places: int = 2, max_len: int = 64, step: int = 16, mask_token: int | None = None
) -> Bench:
    runner = model.runner
    memory = DraftMemory(
        groups=runner.groups,
        has_slots=has_slots(runner.decoder.states),
        block_size=16,
        num_places=places,
        max_len=max_len,
        max_step_len=step,
    )
    store = StateStore(
        runner.decoder.states, memory.num_blocks, memory.num_slots, 16, runner.device, model.target.dtype
    )
    capacity = Capacity.of(step, places, max_len, 16, 0 if mask_token is None else 4)
    masks = None if mask_token is None else Masks(mask_token, 5)
    own = ModelRunner(
        runner.decoder, store, runner.sampler, runner.device, executor=runner.executor, capacity=capacity
    )
    counting: Any = Counting(own)
    return Bench(model, DraftModel(counting, memory, masks), counting)


def prompt(count: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(97) for _ in range(count)]


def test_draft_model_is_a_proposer_with_recorded_steps(models: Mapping[str, Loaded]) -> None:
    b = bench(models["llama"])
    proposer: Proposer = b.draft
    assert proposer.propose([]) == {}
    assert b.runner.runner.is_recorded


@pytest.mark.sampled(2)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", NAMES)
def test_drafts_are_what_the_model_generates_alone(
    name: str, params: SamplingParams, models: Mapping[str, Loaded]
) -> None:
    b = bench(models[name])
    text, whole = prompt(9), b.alone(prompt(9), 30, params)
    while len(text) < 9 + 24:
        guesses = b.ask(text, 5, params)
        at = len(text) - 9
        assert guesses == whole[at : at + 5]
        text += whole[at : at + 6]  # all are right, and one more token is drawn


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("seed", range(2))
def test_what_was_wrong_leaves_no_trace(name: str, seed: int, models: Mapping[str, Loaded]) -> None:
    b, rng = bench(models[name]), random.Random(seed)
    text = prompt(11, seed)
    while len(text) < 45:
        limit = rng.randint(1, 6)
        guesses = b.ask(text, limit, SAMPLED)
        assert guesses == b.alone(text, limit, SAMPLED)
        # Any number of them is looked at, and accepted; then comes a token of its own, right or wrong.
        accepted = rng.randint(0, limit)
        after = (*guesses, rng.randrange(97))[accepted]
        text += [*guesses[:accepted], after if rng.random() < 0.3 else rng.randrange(97)]


@pytest.mark.parametrize("name", ["llama", "gemma2", "bamba"])
def test_sequences_side_by_side_do_not_meet(name: str, models: Mapping[str, Loaded]) -> None:
    b, rng = bench(models[name], places=3, step=32), random.Random(4)
    texts = {n: prompt(5 + n, n) for n in (1, 2, 3)}
    for _ in range(6):
        limits = {n: rng.randint(1, 5) for n in texts}
        found = b.draft.propose([DraftRequest(n, texts[n], limits[n], SAMPLED, 7) for n in texts])
        for n, text in texts.items():
            assert found[n] == b.alone(text, limits[n], SAMPLED)
            accepted = rng.randint(0, limits[n])
            text += [*found[n][:accepted], rng.randrange(97)]


def test_draft_costs_one_pass_and_one_for_each_token_more(models: Mapping[str, Loaded]) -> None:
    b = bench(models["bamba"])
    text = prompt(9)
    text += [*b.ask(text, 5), 3]
    assert len(b.runner.plans) == 5
    b.runner.plans.clear()
    b.draft.propose([DraftRequest(1, text, 4, GREEDY, 7), DraftRequest(2, prompt(7), 3, GREEDY, 7)])
    assert len(b.runner.plans) == 4
    assert [chunk.token_ids for chunk in b.runner.plans[0].chunks if chunk.seq_id == 1] == [tuple(text[-2:])]


def masked(
    model: Loaded, text: Sequence[int], count: int, mask_token: int, params: SamplingParams
) -> tuple[int, ...]:
    """The draft of one pass over a text and masks behind it."""
    runner, masks = model.runner, [mask_token] * (count - 1)
    logits = runner.logits([*text, *masks], 64)[-count:]
    rows = SamplingBatch((SamplingRow(params, count, count, len(text), 7),))
    return runner.sampler.sample(logits, rows)[0].token_ids


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2"])
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_masks_give_a_draft_in_one_pass(
    name: str, params: SamplingParams, models: Mapping[str, Loaded]
) -> None:
    """Whatever became of earlier drafts, no mask is ever part of what later ones see."""
    b, rng, text = bench(models[name], mask_token=5, places=3, step=32), random.Random(2), prompt(9)
    while len(text) < 45:
        limit, calls = rng.randint(1, 5), len(b.runner.plans)
        guesses = b.ask(text, limit, params)
        assert len(b.runner.plans) == calls + 1
        assert guesses == masked(models[name], text, limit, 5, params)
        assert b.ask(text, limit, params) == guesses, "without a pass"
        accepted = rng.randint(0, limit)
        text += [*guesses[:accepted], rng.randrange(97)]


def test_masks_of_several_sequences_share_a_pass(models: Mapping[str, Loaded]) -> None:
    b, model = bench(models["llama"], mask_token=5, places=3), models["llama"]
    texts = {n: prompt(1 + n, n) for n in (1, 2, 3)}
    found = b.draft.propose([DraftRequest(n, texts[n], 4, GREEDY, 7) for n in texts])
    assert len(b.runner.plans) == 1
    assert {n: len(draft) for n, draft in found.items()} == {1: 3, 2: 3, 3: 3}, "a pass has 16 tokens"
    for n, draft in found.items():
        assert draft == masked(model, texts[n], len(draft), 5, GREEDY)


def test_masks_keep_no_sequence_from_its_draft(models: Mapping[str, Loaded]) -> None:
    """What is known of a sequence comes before masks of others, so that none falls behind."""
    b, texts = bench(models["llama"], mask_token=5, places=4, step=8), {n: prompt(2, n) for n in range(4)}
    for _ in range(4):
        found = b.draft.propose([DraftRequest(n, texts[n], 5, GREEDY, 7) for n in texts])
        assert sorted(found) == [0, 1, 2, 3]
        for text in texts.values():
            text.append(3)
    assert [len(draft) for draft in found.values()] == [2, 2, 2, 2]


def test_long_prompt_is_computed_in_chunks_of_several_calls(models: Mapping[str, Loaded]) -> None:
    for name in ("bamba", "mistral"):
        b, text = bench(models[name]), prompt(40)
        assert b.ask(text) == b.ask(text) == ()
        assert b.ask(text) == b.alone(text)
        assert max(plan.num_tokens for plan in b.runner.plans) == 16


def test_long_prompt_does_not_keep_others_from_drafts(models: Mapping[str, Loaded]) -> None:
    b, short, long = bench(models["bamba"]), prompt(6), prompt(50, 1)
    b.ask(short)
    short.append(4)
    found = b.draft.propose([DraftRequest(2, long, 5, GREEDY, 7), DraftRequest(1, short, 5, GREEDY, 7)])
    assert found == {1: b.alone(short)}


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_repeated_request_gives_the_same_draft_and_computes_nothing(
    name: str, models: Mapping[str, Loaded]
) -> None:
    b, text = bench(models[name]), prompt(9)
    guesses = b.ask(text, 5)
    b.runner.plans.clear()
    assert b.ask(text, 5) == guesses
    assert b.ask(text, 2) == guesses[:2]
    assert b.runner.plans == []
    text += guesses[:3]
    assert b.ask(text) == b.alone(text)


@pytest.mark.parametrize("name", ["llama", "bamba"])
@pytest.mark.parametrize("other", [[5, 4, 3, 2], prompt(30, 5), [1]])
def test_other_tokens_under_the_same_id_are_computed_anew(
    name: str, other: list[int], models: Mapping[str, Loaded]
) -> None:
    b = bench(models[name], step=32)
    b.ask(prompt(12))
    assert b.ask(other) == b.alone(other)


def test_sequences_beyond_the_places_get_no_drafts_until_one_is_free(models: Mapping[str, Loaded]) -> None:
    b = bench(models["bamba"], places=2)
    texts = {n: prompt(6, n) for n in (1, 2, 3)}
    everybody = [DraftRequest(n, texts[n], 2, GREEDY, 7) for n in texts]
    assert list(b.draft.propose(everybody)) == [1, 2]
    texts[1].append(5)
    assert set(b.draft.propose([*reversed(everybody)])) == {1, 2}  # who has a place keeps it
    b.draft.forget(1)
    b.draft.forget(99)
    assert set(b.draft.propose(everybody[1:])) == {2, 3}
    assert b.ask(texts[3], 2, seq_id=3) == b.alone(texts[3], 2)


def test_the_place_that_was_not_used_for_longest_is_given_away(models: Mapping[str, Loaded]) -> None:
    b = bench(models["bamba"], places=2)
    texts = {n: prompt(6, n) for n in (1, 2, 3)}
    for n in (1, 2, 1, 3):
        texts[n].append(n)
        assert b.ask(texts[n], 3, seq_id=n) == b.alone(texts[n], 3)
    b.runner.plans.clear()
    texts[1].append(9)
    assert b.ask(texts[1], 1, seq_id=1) == b.alone(texts[1], 1)
    assert b.runner.plans[0].num_tokens == 1  # its state was still there; that of 2 is not
    assert b.ask(texts[2], 1, seq_id=2) == b.alone(texts[2], 1)
    assert b.runner.plans[-1].num_tokens == len(texts[2])


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_sequence_longer_than_a_place_gets_no_draft(name: str, models: Mapping[str, Loaded]) -> None:
    b, text = bench(models[name], max_len=32, step=32), prompt(30)
    assert b.ask(text, 8) == b.alone(text, 3)
    text += [1, 2]
    assert b.ask(text, 8) == b.alone(text, 1)
    text += [3]
    assert b.ask(text, 8) == ()
    assert b.ask(prompt(5), 2, seq_id=2) == b.alone(prompt(5), 2)


@pytest.mark.parametrize("name", ["llama", "bamba"])
def test_after_a_failure_nothing_of_its_state_is_trusted(name: str, models: Mapping[str, Loaded]) -> None:
    b, text = bench(models[name]), prompt(9)
    text += [*b.ask(text), 4]
    b.runner.fails = True
    with pytest.raises(ZeroDivisionError):
        b.ask(text)
    b.runner.fails = False
    assert b.ask(text) == b.alone(text)


def test_biases_count_and_what_only_a_reader_wants_is_left_out(models: Mapping[str, Loaded]) -> None:
    b, text = bench(models["llama"]), prompt(9)
    biased = replace(SAMPLED, logit_bias={42: 100.0}, logprobs=5, repetition_penalty=1.5)
    assert b.ask(text, 3, biased) == (42, 42, 42)
    assert {(row.params.logprobs, row.history) for row in b.runner.rows} == {(None, ())}


@given(
    window=st.integers(1, 70),
    step=st.integers(1, 40),
    walk=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 8)), min_size=1, max_size=20),
)
def test_what_a_window_shows_was_never_overwritten(
    window: int, step: int, walk: list[tuple[int, int]]
) -> None:
    """Blocks used in turns, with draft tokens that are taken back."""
    groups = (BlockGroup("full", None, ("a",)), BlockGroup("window", window, ("b",)))
    memory = DraftMemory(
        groups=groups, has_slots=False, block_size=4, num_places=2, max_len=200, max_step_len=step
    )
    written: dict[tuple[int, int], int] = {}

    def compute(start: int, end: int) -> None:
        tables = memory.tables(1, start, end)
        for g, table in enumerate(tables):
            assert max(table) < memory.num_blocks[groups[g].name]
            for p in range(start, end):
                assert table[p // 4] > memory.per_place(groups[g]), "a block of another place"
                written[g, table[p // 4] * 4 + p % 4] = p
        for p in range(start, end):
            for g, group in enumerate(groups):
                for seen in range(max(p - (group.window or 1000) + 1, 0), p + 1):
                    assert written[g, tables[g][seen // 4] * 4 + seen % 4] == seen

    done = 0
    for new, ahead in walk:
        end = min(done + min(new, step), 200)
        if end > done:
            compute(done, end)
        done = end
        for p in range(done, min(done + min(ahead, step), 200)):
            compute(p, p + 1)
