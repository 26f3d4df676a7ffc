"""Random walks of sequences that write on canvases: each gets the text that it has alone.

A position's entry is the digest of all tokens up to the end of its canvas, masks included, so one that was
computed before its canvas was done is never taken for the right one.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from plait.memory import BlockGroup
from plait.request import FinishReason, SamplingParams, TokenLogprobs
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits
from plait.schedule.drafts.canvas import Canvas
from plait.schedule.plan import Chunk, Sampled, SamplingBatch, SamplingRow, StepPlan
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler
from plait.schedule.sequence import TokenSequence
from plait.spec.canvas import CanvasSpec
from tests.schedule.memory_model import BLOCK_NBYTES, ModelMemory

SPEC = CanvasSpec(size=4, mask_token=99, threshold=0.5)
EDITS = CanvasSpec(size=4, mask_token=99, threshold=0.5, edit_threshold=0.6, edit_passes=3)
FULL = BlockGroup("full", None, ("a",))
BLOCK, VOCAB_SIZE, LONGEST = 8, 11, 48


def digest(tokens: Sequence[int], position: int) -> int:
    """What is kept of a position: all that its query sees."""
    return hash((*tokens[: position // SPEC.size * SPEC.size + SPEC.size], position))


def choose(tokens: Sequence[int], position: int, seed: int, forbidden: Collection[int] = ()) -> TokenLogprobs:
    """What the model writes in a place, and how sure it is, where it sees these tokens."""
    drawn = random.Random(hash((digest(tokens, position), seed)))
    token = drawn.choice([t for t in range(VOCAB_SIZE) if t not in forbidden])
    return TokenLogprobs(token, -drawn.random() * 2)


@dataclass(frozen=True, slots=True)
class Ask:
    """All that a text depends on."""

    prompt: tuple[int, ...]
    max_len: int
    params: SamplingParams
    stops: frozenset[int]
    seed: int
    spec: CanvasSpec = SPEC

    def write(self) -> tuple[list[TokenLogprobs], FinishReason]:
        """The text of this sequence alone, canvas by canvas, and why it ends."""
        text: list[TokenLogprobs] = []
        most = self.max_len - len(self.prompt)
        while len(self.prompt) + len(text) < self.max_len:
            known = [*self.prompt, *(one.token_id for one in text)]
            places: list[TokenLogprobs | None] = [None] * (SPEC.size - len(known) % SPEC.size)
            passes = 0  # that a canvas without masks may still get
            while None in places or passes:
                seen = [*known, *(SPEC.mask_token if p is None else p.token_id for p in places)]
                found = [
                    choose(seen, len(known) + i, self.seed, self.forbidden(len(known) + i))
                    for i in range(len(places))
                ]
                was_full, passes = None not in places, passes - 1
                if not (changed := self.list_changes(places, found)):
                    break
                for i in changed:
                    places[i] = found[i]
                if not was_full:
                    passes = 0 if self.spec.edit_threshold is None else self.spec.edit_passes
            text += [place for place in places if place is not None]
            for i, one in enumerate(text[:most]):
                if one.token_id in self.stops and i >= self.params.min_tokens:
                    return text[:i], "stop"
        return text[:most], "length"

    def list_changes(self, old: Sequence[TokenLogprobs | None], new: Sequence[TokenLogprobs]) -> list[int]:
        """The places that get what a pass sampled for them."""
        free = [i for i, place in enumerate(old) if place is None]
        changed = [i for i in free if new[i].logprob > math.log(self.spec.threshold)]
        if free and not changed:
            changed = [max(free, key=lambda i: (new[i].logprob, -i))]
        if self.spec.edit_threshold is not None:
            for i, place in enumerate(old):
                is_other = place is not None and place.token_id != new[i].token_id
                if is_other and new[i].logprob > math.log(self.spec.edit_threshold):
                    changed.append(i)
        return changed

    def forbidden(self, position: int) -> frozenset[int]:
        return self.stops if position - len(self.prompt) < self.params.min_tokens else frozenset()


class Device(ModelMemory):
    """Memory of canvases. Reads, and where chunks end, are checked before anything is computed."""

    def run(self, plan: StepPlan, batch: SamplingBatch, texts: Mapping[int, Sequence[int]]) -> list[Sampled]:
        """texts: the known tokens of each sequence."""
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        for move in plan.moves:
            self._move(move)
        self.has_failed = False
        for chunk in plan.chunks:
            self._check_chunk(chunk, texts[chunk.seq_id])
        self._check_writes(plan)
        for chunk in plan.chunks:
            tokens = [*texts[chunk.seq_id][: chunk.start], *chunk.token_ids]
            self._write(chunk, [0, *(digest(tokens, p) for p in range(chunk.start, chunk.end))])
        answering = [chunk for chunk in plan.chunks if chunk.num_logits]
        return [
            self._answer_places(chunk, row, texts[chunk.seq_id])
            for chunk, row in zip(answering, batch.rows, strict=True)
        ]

    def _check_chunk(self, chunk: Chunk, text: Sequence[int]) -> None:
        num_known = len(text) - chunk.start
        assert chunk.start % SPEC.size == 0
        assert list(chunk.token_ids[:num_known]) == list(text[chunk.start : chunk.end])
        assert chunk.num_logits == max(len(chunk.token_ids) - num_known, 0)
        assert chunk.end % SPEC.size == 0 or (chunk.end == len(text) and not chunk.num_logits)
        for i, low, high in self._spans(0, chunk.start):
            first = i * self.block_size
            wanted = [digest(text, first + at) for at in range(low, high)]
            assert self.blocks[0][chunk.blocks[0][i]][low:high] == wanted, f"{chunk}: block {i}"

    def _answer_places(self, chunk: Chunk, row: SamplingRow, text: Sequence[int]) -> Sampled:
        tokens = [*text[: chunk.start], *chunk.token_ids]
        assert row.position == len(text)
        assert row.num_samples == row.num_logits == chunk.num_logits
        found = [
            choose(tokens, row.position + i, row.seed, row.stop_token_ids if i < row.num_stopless else ())
            for i in range(row.num_samples)
        ]
        return Sampled(tuple([one.token_id for one in found]), tuple(found))


class World:
    """Sequences on canvases, and what becomes of each."""

    def __init__(self, *, num_blocks: int, budget: int, host_nbytes: int) -> None:
        self.limits = SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_waiting=1000,
            max_model_len=LONGEST,
            num_steps=8,
            canvas=SPEC,
        )
        cache = CacheOptions(block_nbytes=(BLOCK_NBYTES,), host_nbytes=host_nbytes)
        sizes = dict(num_slots=0, max_step_len=budget, cache=cache)
        self.memory = Allocation((FULL,), (num_blocks + 1,), BLOCK, **sizes)  # type: ignore[arg-type]
        self.s = Scheduler(self.limits, self.memory)
        self.s.costs.observe(1, 1e-4)
        self.device = Device((FULL,), (num_blocks + 1,), BLOCK, 0, self.limits, host_nbytes)
        self.texts: dict[int, list[int]] = {}
        self.asks: dict[int, Ask] = {}
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.counts: Counter[str] = Counter()
        self._ids = 0

    def submit(self, ask: Ask, num_choices: int = 1) -> None:
        sequences = []
        for index in range(num_choices):
            own = replace(ask, seed=ask.seed + index)
            sequences.append(self._make(own, f"r{self._ids + 1 - index}", index, own.prompt))
            self.asks[self._ids], self.texts[self._ids], self.scores[self._ids] = own, [*own.prompt], []
        self.s.add(*sequences)

    def _make(self, ask: Ask, request_id: str, index: int, tokens: Sequence[int]) -> TokenSequence:
        """A sequence of which these tokens are known."""
        self._ids += 1
        given, prompt_len = (ask.params, ask.stops, ask.max_len, ask.seed), len(ask.prompt)
        how = dict(prompt_len=prompt_len, canvas=Canvas(ask.spec))
        return TokenSequence(self._ids, request_id, index, [*tokens], *given, **how)  # type: ignore[arg-type]

    def resume(self, seq_id: int) -> None:
        """Go on with a sequence in another one, as after a crash."""
        self.s.cancel(seq_id)
        seq = self._make(self.asks[seq_id], f"r{self._ids + 1}", 0, self.texts[seq_id])
        for kept in (self.asks, self.texts, self.scores):
            kept[seq.id] = kept.pop(seq_id)  # type: ignore[attr-defined]
        self.s.add(seq)
        self.counts["resumed"] += len(self.texts[seq.id]) > len(self.asks[seq.id].prompt)

    def step(self, *, fails: bool = False) -> None:
        plan = self.s.plan()
        if plan is None:
            assert not self.asks, "there is work, and no plan"
            return
        assert plan.num_steps == 1
        batch = self.s.sampling(plan)
        self.counts["shared"] += len(plan.chunks) > 1
        self.counts["cut"] += any(not chunk.num_logits for chunk in plan.chunks)
        if fails:
            self.device.fail(plan, len(plan.moves))
            self.s.isolate()
            return
        sampled = self.device.run(plan, batch, {i: [*text] for i, text in self.texts.items()})
        for update in self.s.commit(plan, sampled):
            event, text = update.event, self.texts[update.seq_id]
            text += event.token_ids
            self.scores[update.seq_id] += event.logprobs or ()
            self.counts["events"] += 1
            if event.finish_reason is not None:
                self._check_end(update.seq_id, event.finish_reason, event.stop_token_id)
        self.s.check()

    def _check_end(self, seq_id: int, reason: FinishReason, stop: int | None) -> None:
        ask, text = self.asks.pop(seq_id), self.texts.pop(seq_id)
        wanted, why = ask.write()
        assert text == [*ask.prompt, *(one.token_id for one in wanted)]
        assert (reason, stop is None) == (why, why == "length")
        scores = self.scores.pop(seq_id)
        assert scores == (wanted if ask.params.logprobs is not None else [])
        self.counts[why] += 1

    def cancel(self, seq_id: int) -> None:
        self.s.cancel(seq_id)
        for kept in (self.asks, self.texts, self.scores):
            del kept[seq_id]


def draw_ask(rng: random.Random, heads: Sequence[tuple[int, ...]], spec: CanvasSpec) -> Ask:
    own = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 12)))
    prompt = (*rng.choice(heads), *own)
    length = rng.choice([0, 1, 3, 9, 20])
    least = rng.randrange(min(length, 4) + 1)
    params = SamplingParams(max_tokens=length, min_tokens=least, logprobs=rng.choice([None, 0]))
    stops = frozenset(rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 1])))
    return Ask(prompt, min(len(prompt) + length, LONGEST), params, stops, rng.randrange(1000), spec)


@pytest.mark.parametrize("spec", [SPEC, EDITS], ids=["kept", "edited"])
@pytest.mark.parametrize("num_blocks", [40, 9])
@pytest.mark.parametrize("host_nbytes", [0, 40 * BLOCK_NBYTES])
def test_each_text_is_that_of_its_sequence_alone(spec: CanvasSpec, num_blocks: int, host_nbytes: int) -> None:
    rng = random.Random(num_blocks + host_nbytes)
    heads = [(), *(tuple(rng.randrange(VOCAB_SIZE) for _ in range(n)) for n in (9, 16, 25))]
    world = World(num_blocks=num_blocks, budget=33, host_nbytes=host_nbytes)
    world.s.costs.prefers_moving = lambda nbytes, tokens: rng.random() < 0.5  # type: ignore[method-assign]
    for _ in range(900):
        if len(world.asks) < 12 and rng.random() < 0.3:
            world.submit(draw_ask(rng, heads, spec), rng.choice([1, 1, 1, 3]))
        if world.asks and rng.random() < 0.02:
            world.cancel(rng.choice([*world.asks]))
        if world.asks and rng.random() < 0.1:
            world.resume(rng.choice([*world.asks]))
        world.step(fails=bool(world.asks) and rng.random() < 0.01)
    while world.asks:
        world.step()
    stats = world.s.stats()
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == num_blocks
    assert world.s.cache_counts["hit_tokens"] > 0
    assert all(
        world.counts[name] > 10 for name in ("shared", "cut", "events", "stop", "length", "resumed")
    ), world.counts
    assert num_blocks > 9 or world.s.num_preemptions > 20
    assert (world.s.num_swaps > 0) == (num_blocks == 9 and host_nbytes > 0)


def test_a_canvas_keeps_what_is_sure_and_else_the_likeliest() -> None:
    canvas = Canvas(CanvasSpec(4, 99, 0.5))
    assert canvas.open(6) == (99, 99)
    canvas.fill([TokenLogprobs(1, -3.0), TokenLogprobs(2, -2.0)])
    assert canvas.open(6) == (99, 2)
    assert canvas.list_past([7] * 6) == ((7,) * 6 + (2,), ())
    assert canvas.take(9, ()) == ()
    canvas.fill([TokenLogprobs(3, -9.0), TokenLogprobs(4, 0.0)])
    assert [one.token_id for one in canvas.take(9, ())] == [3, 2]
    assert canvas.open(8) == (99,) * 4
    canvas.fill([TokenLogprobs(t, -0.1 * (t < 7)) for t in (5, 6, 7, 8)])
    assert [one.token_id for one in canvas.take(9, {6})] == [5, 6]


def test_a_canvas_is_done_when_its_first_tokens_end_the_sequence() -> None:
    canvas = Canvas(CanvasSpec(4, 99, 0.5))
    canvas.open(0)
    canvas.fill(
        [TokenLogprobs(1, -0.1), TokenLogprobs(2, -0.1), TokenLogprobs(3, -5.0), TokenLogprobs(4, -5.0)]
    )
    assert canvas.take(3, {9}) == ()
    assert [one.token_id for one in canvas.take(2, ())] == [1, 2]


def fill(canvas: Canvas, *sampled: tuple[int, float]) -> tuple[int, ...]:
    """The tokens of a canvas after a pass; () if it is not done, else it is empty then."""
    canvas.fill([TokenLogprobs(token, math.log(p)) for token, p in sampled])
    return tuple([one.token_id for one in canvas.take(9, {5})])


def test_a_token_is_replaced_until_a_pass_changes_nothing() -> None:
    canvas = Canvas(replace(EDITS, edit_threshold=0.2, edit_passes=9))
    assert canvas.open(6) == (99, 99)
    assert fill(canvas, (5, 0.9), (2, 0.3)) == ()
    assert canvas.open(6) == (5, 99)  # ends no text, because it may change
    assert canvas.list_past([7] * 6) == ((7,) * 6, (5, 99))
    assert fill(canvas, (1, 0.3), (2, 0.6)) == ()
    assert canvas.open(6) == (1, 2)
    assert fill(canvas, (1, 0.1), (3, 0.21)) == ()
    assert fill(canvas, (4, 0.19), (3, 0.1)) == (1, 3)
    assert canvas.open(8) == (99,) * 4


def test_what_is_kept_has_the_score_of_the_pass_that_wrote_it() -> None:
    canvas = Canvas(replace(EDITS, edit_threshold=0.0))
    canvas.open(7)
    scores = [TokenLogprobs(1, -0.1), TokenLogprobs(2, -9.0), TokenLogprobs(2, -0.3)]
    for one in scores:
        assert canvas.take(9, ()) == ()
        canvas.fill([one])
    assert canvas.take(9, ()) == (scores[1],)


@pytest.mark.parametrize("passes", [0, 1, 2, 5])
def test_so_many_passes_edit_a_canvas_without_masks(passes: int) -> None:
    canvas = Canvas(replace(EDITS, edit_passes=passes))
    for _ in range(2):  # each canvas has as many
        canvas.open(6)
        assert fill(canvas, (1, 0.4), (2, 0.8)) == ()
        for token in range(passes):
            assert fill(canvas, (1, 0.6 + token), (10 + token % 2, 0.9)) == ()
        expected = (1, 10 + passes % 2)
        assert fill(canvas, (1, 0.9), (10 + passes % 2, 0.9)) == expected
