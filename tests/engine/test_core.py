from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from plait.engine.core import Engine
from plait.errors import CapacityError, ContextTooLong, EngineError, InvalidField, QueueFull
from plait.memory import BlockGroup
from plait.request import Event, Request, SamplingParams, TokenLogprobs
from plait.schedule.allocation import Allocation
from plait.schedule.plan import Chunk, Plan, Sampled, SamplingBatch
from plait.schedule.scheduler import Limits, Scheduler

BLOCK, VOCAB = 4, 97
GROUPS = (BlockGroup("full", None, ("a",)), BlockGroup("window:6", 6, ("b",)))


def digest(value: int, token: int) -> int:
    return (value * 31 + token + 1) % 1_000_003


def next_token(state: int, window: Sequence[int], last_full: Sequence[int], seed: int) -> int:
    return (state + 7 * sum(window) + 13 * sum(last_full) + seed) % VOCAB


def oracle(prompt: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What the model below says, from all the tokens at once."""
    tokens = list(prompt)
    for _ in range(count):
        state = 0
        for token in tokens:
            state = digest(state, token)
        tokens.append(next_token(state, tokens[-6:], tokens, seed))
    return tokens[len(prompt) :]


class HashModel:
    """A model whose next token depends on every token, read back from paged memory and from its slot.

    `breaks(chunk)` says whether a step with this chunk fails; it fails half-way, leaving rubbish behind.
    """

    def __init__(self, breaks: Callable[[Chunk], bool] = lambda chunk: False) -> None:
        self.pages: dict[tuple[int, int], int] = {}
        self.slots: dict[int, int] = {}
        self.breaks = breaks
        self.plans: list[Plan] = []

    def execute(self, plan: Plan, sampling: SamplingBatch) -> list[Sampled]:
        self.plans.append(plan)
        for slot in plan.fresh:
            self.slots[slot] = 0
        rows, answers = iter(sampling.rows), []
        for chunk in plan.chunks:
            if self.breaks(chunk):
                raise ZeroDivisionError("the chip is on fire")
            for i, token in enumerate(chunk.token_ids):
                for g, table in enumerate(chunk.blocks):
                    p = chunk.start + i
                    self.pages[g, table[p // BLOCK] * BLOCK + p % BLOCK] = token
                self.slots[chunk.slot] = digest(self.slots[chunk.slot], token)
            if chunk.num_logits:
                row = next(rows)
                targets = tuple(TokenLogprobs(t, -1.0) for t in row.prompt_targets)
                token_ids = (self._token(chunk, row.seed),) if row.num_samples else ()
                answers.append(Sampled(token_ids, None, targets))
        return answers

    def _token(self, chunk: Chunk, seed: int) -> int:
        everything = self._read(chunk, 0, 0)
        return next_token(
            self.slots[chunk.slot], self._read(chunk, 1, max(chunk.end - 6, 0)), everything, seed
        )

    def _read(self, chunk: Chunk, group: int, first: int) -> list[int]:
        table = chunk.blocks[group]
        return [self.pages[group, table[p // BLOCK] * BLOCK + p % BLOCK] for p in range(first, chunk.end)]


class Reader:
    """Collects the events of many requests."""

    def __init__(self) -> None:
        self.events: dict[tuple[str, int], list[Event]] = {}

    def __call__(self, event: Event) -> None:
        self.events.setdefault((event.request_id, event.index), []).append(event)

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [t for e in self.events.get((request_id, index), []) for t in e.token_ids]

    def ends(self, request_id: str) -> list[str]:
        reasons = [e.finish_reason for (r, _), es in self.events.items() if r == request_id for e in es]
        return [reason for reason in reasons if reason]


def engine(
    model: Any = None, *, blocks: int = 200, length: int = 100, causal: bool = True, **limits: Any
) -> Engine:
    options = dict(max_num_seqs=4, max_num_batched_tokens=16, max_waiting=100) | limits
    rules = Limits(max_model_len=length, causal=causal, **options)
    memory = Allocation(
        GROUPS,
        [blocks] * 2,
        BLOCK,
        num_slots=rules.max_num_seqs + 1,
        max_step_len=rules.max_num_batched_tokens,
        trims=causal,
    )
    return Engine(model or HashModel(), Scheduler(rules, memory), vocab_size=VOCAB, max_model_len=length)


def request(name: str, prompt: Sequence[int], stops: frozenset[int] = frozenset(), **params: Any) -> Request:
    settings = dict(max_tokens=5, temperature=0.0, top_p=1.0, top_k=0, seed=0) | params
    return Request(name, tuple(prompt), SamplingParams(**settings), stops)


def finish(e: Engine) -> None:
    while e.step():
        e.scheduler.check()
    assert not e.open_requests
    stats = e.stats()
    assert stats["num_free_blocks"] == stats["num_blocks"]
    assert stats["num_free_slots"] == stats["num_slots"]


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))] for _ in range(count)]


@pytest.mark.parametrize("budget", [4, 7, 16, 1000])
@pytest.mark.parametrize("seqs", [1, 2, 4])
def test_the_text_is_the_same_whatever_the_batch_and_the_chunks(seqs: int, budget: int) -> None:
    e, reader = engine(max_num_seqs=seqs, max_num_batched_tokens=budget), Reader()
    given = prompts(12)
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=i), reader)
    finish(e)
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, i)
        assert reader.ends(f"r{i}") == ["length"]


def test_the_text_is_the_same_when_memory_is_short_and_sequences_are_computed_again() -> None:
    e, reader = engine(blocks=26, max_num_seqs=4, length=70), Reader()
    given = prompts(20)
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, max_tokens=20), reader)
    finish(e)
    assert e.stats()["num_preemptions"] > 0
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 20)


def test_a_model_that_is_not_causal_says_the_same() -> None:
    e, reader = engine(causal=False, max_num_batched_tokens=60, length=60), Reader()
    for i, prompt in enumerate(prompts(8)):
        e.submit(request(f"r{i}", prompt), reader)
    finish(e)
    for i, prompt in enumerate(prompts(8)):
        assert reader.tokens(f"r{i}") == oracle(prompt, 5)


@pytest.mark.parametrize("seed", range(5))
def test_random_cancels_leave_nothing_behind_and_disturb_nobody(seed: int) -> None:
    rng = random.Random(seed)
    e, reader, given = engine(blocks=40), Reader(), prompts(60, seed)
    todo, cancelled = list(enumerate(given)), set()
    while todo or e.has_work:
        if todo and rng.random() < 0.5:
            i, prompt = todo.pop()
            e.submit(request(f"r{i}", prompt, max_tokens=12, n=rng.choice([1, 1, 3])), reader)
        e.step()
        if e.open_requests and rng.random() < 0.15:
            name = rng.choice(e.open_requests)
            e.cancel(name)
            cancelled.add(name)
        e.scheduler.check()
    finish(e)
    assert len(cancelled) > 5
    for i, prompt in enumerate(given):
        tokens = reader.tokens(f"r{i}")
        assert tokens == oracle(prompt, 12)[: len(tokens)]
        if f"r{i}" not in cancelled:
            assert len(tokens) == 12


def test_choices_are_sequences_with_seeds_of_their_own() -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", [1, 2, 3], n=3, seed=5), reader)
    finish(e)
    assert reader.tokens("r", 0) == oracle([1, 2, 3], 5, seed=5)
    assert len({tuple(reader.tokens("r", i)) for i in range(3)}) == 3
    assert reader.ends("r") == ["length"] * 3


def test_without_a_seed_every_request_has_another() -> None:
    e, reader = engine(), Reader()
    for i in range(8):
        e.submit(request(f"r{i}", [1, 2], seed=None), reader)
    finish(e)
    assert len({tuple(reader.tokens(f"r{i}")) for i in range(8)}) > 1


def test_one_choice_can_be_cancelled_and_the_others_go_on() -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", [1, 2, 3], n=3), reader)
    e.step()
    e.cancel("r", 1)
    finish(e)
    assert [len(reader.tokens("r", i)) for i in range(3)] == [5, 1, 5]
    assert sorted(reader.ends("r")) == ["cancelled", "length", "length"]


@pytest.mark.parametrize("steps", range(5))
def test_cancel_works_in_every_phase_and_says_so_once(steps: int) -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", range(40)), reader)
    for _ in range(steps):
        e.step()
    e.cancel("r")
    e.cancel("r")
    e.cancel("unknown")
    assert reader.ends("r") == ["cancelled"]
    finish(e)


def test_a_reader_may_cancel_its_request_while_it_is_told() -> None:
    e, seen = engine(), []

    def on_event(event: Event) -> None:
        seen.append((event.index, event.finish_reason))
        e.cancel("r")

    e.submit(request("r", [1], n=2), on_event)
    finish(e)
    assert seen == [(0, None), (0, "cancelled"), (1, "cancelled")]


def test_a_broken_reader_loses_its_request_and_nobody_else() -> None:
    e, reader = engine(), Reader()

    def broken(event: Event) -> None:
        raise RuntimeError("the pipe is gone")

    e.submit(request("bad", [1], n=2), broken)
    e.submit(request("good", [2]), reader)
    finish(e)
    assert reader.tokens("good") == oracle([2], 5)
    ((name, error),) = e.reader_faults
    assert (name, str(error)) == ("bad", "the pipe is gone")


def test_generation_ends_at_the_context() -> None:
    e, reader = engine(length=10), Reader()
    e.submit(request("r", range(7), max_tokens=None), reader)
    e.submit(request("s", range(7), max_tokens=50), reader)
    finish(e)
    assert reader.tokens("r") == reader.tokens("s") == oracle(range(7), 3)
    assert reader.ends("r") == ["length"]


def test_a_stop_token_ends_and_is_told_apart() -> None:
    e, reader = engine(), Reader()
    expected = oracle([1, 2], 5)
    e.submit(request("r", [1, 2], frozenset({expected[2]})), reader)
    finish(e)
    last = reader.events["r", 0][-1]
    assert reader.tokens("r") == expected[:2]
    assert (last.finish_reason, last.stop_token_id, last.token_ids) == ("stop", expected[2], ())


def test_scoring_ends_after_the_prompt_without_a_token() -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", range(40), max_tokens=0, prompt_logprobs=0), reader)
    e.submit(request("one", [3], max_tokens=0, prompt_logprobs=0), reader)
    e.submit(request("none", [3], max_tokens=0), reader)
    finish(e)
    (event,) = reader.events["r", 0]
    assert [lp.token_id for lp in event.prompt_logprobs or ()] == list(range(1, 40))
    assert (event.token_ids, event.finish_reason) == ((), "length")
    assert reader.events["one", 0][0].prompt_logprobs == ()
    assert reader.events["none", 0][0].prompt_logprobs is None


REFUSED = [
    (dict(prompt=[]), InvalidField, "no tokens"),
    (dict(prompt=[1, VOCAB]), InvalidField, r"token id 97 is outside 0\.\.96"),
    (dict(prompt=[-1]), InvalidField, "token id -1"),
    (dict(prompt=[1], logit_bias={VOCAB: 1.0}), InvalidField, "logit_bias: token id 97"),
    (dict(prompt=[1], max_tokens=2, min_tokens=3), InvalidField, r"3 is more than max_tokens \(2\)"),
    (dict(prompt=range(20)), ContextTooLong, "20 tokens and at least 1 must follow; the context is 20"),
    (dict(prompt=range(18), min_tokens=3), ContextTooLong, "at least 3 must follow"),
]


@pytest.mark.parametrize(("options", "kind", "message"), REFUSED)
def test_what_cannot_be_honoured_is_refused(options: Any, kind: type[Exception], message: str) -> None:
    e, reader = engine(length=20), Reader()
    with pytest.raises(kind, match=message):
        e.submit(request("r", **options), reader)
    assert not reader.events
    finish(e)


def test_a_prompt_that_fills_the_context_can_be_scored() -> None:
    e, reader = engine(length=20), Reader()
    e.submit(request("r", range(20), max_tokens=0), reader)
    finish(e)
    assert reader.ends("r") == ["length"]


def test_a_request_larger_than_the_memory_is_refused_at_once() -> None:
    e = engine(blocks=8)
    with pytest.raises(CapacityError, match=r"44 tokens needs 11 blocks and there are 7"):
        e.submit(request("r", range(40)), Reader())


def test_ids_in_use_are_refused_and_a_full_queue_says_so() -> None:
    e, reader = engine(max_waiting=0, max_num_seqs=1), Reader()
    e.submit(request("r", [1]), reader)
    with pytest.raises(InvalidField, match="in use"):
        e.submit(request("r", [1]), reader)
    with pytest.raises(QueueFull):
        e.submit(request("s", [1]), reader)
    finish(e)
    e.submit(request("r", [1]), reader)
    finish(e)


def test_a_sequence_that_breaks_the_step_fails_alone() -> None:
    poisoned = 66
    model = HashModel(lambda chunk: poisoned in chunk.token_ids)
    e, reader = engine(model), Reader()
    given = [[1, 2, 3], list(range(20)), [4, poisoned, 5], [7]]
    expected = [oracle(prompt, 5) for prompt in given]
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt), reader)
    finish(e)
    for i in (0, 1, 3):
        if poisoned not in expected[i]:
            assert reader.tokens(f"r{i}") == expected[i]
    (event,) = reader.events["r2", 0]
    assert event.finish_reason == "error"
    assert isinstance(event.error, EngineError)
    assert isinstance(event.error.__cause__, ZeroDivisionError)
    assert "the chip is on fire" in str(event.error)


def test_a_fault_of_the_whole_batch_costs_nobody_anything() -> None:
    """A step that fails once is repeated from scratch: no token is lost, none is sent twice."""
    faults = iter([False] * 9 + [True] + [False] * 30 + [True] + [False] * 10_000)
    e, reader, given = engine(HashModel(lambda chunk: next(faults))), Reader(), prompts(6)
    e.submit(request("first", [1, 2]), reader)
    for i, prompt in enumerate(given):
        e.submit(request(f"r{i}", prompt, prompt_logprobs=0), reader)
    finish(e)
    assert not next(faults)
    for i, prompt in enumerate(given):
        assert reader.tokens(f"r{i}") == oracle(prompt, 5)
        first = reader.events[f"r{i}", 0][0]
        assert [lp.token_id for lp in first.prompt_logprobs or ()] == prompt[1:]


def test_an_error_of_ours_is_passed_on_as_it_is() -> None:
    class Refuses:
        def execute(self, plan: Plan, sampling: SamplingBatch) -> list[Sampled]:
            raise EngineError("the model computed nan")

    e, reader = engine(Refuses()), Reader()
    for i in range(3):
        e.submit(request(f"r{i}", [1], n=2), reader)
    finish(e)
    for i in range(3):
        assert [str(es[0].error) for (r, _), es in reader.events.items() if r == f"r{i}"] == [
            "the model computed nan"
        ] * 2


def test_a_runner_that_answers_too_little_is_a_fault_of_the_step() -> None:
    class Silent:
        def execute(self, plan: Plan, sampling: SamplingBatch) -> list[Sampled]:
            return []

    e, reader = engine(Silent()), Reader()
    e.submit(request("r", [1]), reader)
    finish(e)
    assert "0 answers for 1 chunks" in str(reader.events["r", 0][0].error)


def test_a_dead_engine_tells_everybody() -> None:
    e, reader = engine(), Reader()
    e.submit(request("r", [1], n=2), reader)
    e.fail_all(EngineError("gone"))
    assert reader.ends("r") == ["error", "error"]
    assert not e.open_requests
