"""Random walks of sequences that write on noisy canvases: each gets the text that it has alone.

The entry of a known position is the digest of the tokens up to it. That of a place is the digest of all
tokens, and of what the last pass has left there. So a canvas that goes on without its memory, or with another
one's, gets another text.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest

from plait.memory import BlockGroup
from plait.ops.seed import choice_seed, uniform
from plait.request import SamplingParams, TokenLogprobs
from plait.schedule.drafts.noisy_canvas import NOISE, NoisyCanvas, find_accepted
from plait.schedule.drafts.passes import Denoised
from plait.schedule.plan import Chunk, Sampled, SamplingBatch, SamplingRow, StepPlan
from plait.spec.canvas import NoisyCanvasSpec
from tests.schedule.canvas_world import Ask, CanvasMemory, World, draw_ask, draw_heads
from tests.schedule.memory_model import BLOCK_NBYTES

SPEC = NoisyCanvasSpec(size=5, most_passes=6, entropy_bound=0.9, stable_passes=1, confidence=0.42)
WINDOW = 6
GROUPS = (BlockGroup("full", None, ("a",)), BlockGroup(f"window:{WINDOW}", WINDOW, ("b",)))
VOCAB_SIZE = 7


@dataclass(frozen=True, slots=True)
class Place:
    """What a pass makes of a place: a draw, the likeliest token, how unsure it is, and what it leaves."""

    drawn: int
    likeliest: TokenLogprobs
    entropy: float
    left: int


def make_place(
    tokens: Sequence[int], position: int, before: int, seed: int, forbidden: Collection[int]
) -> Place:
    """What a pass makes of a place that sees these tokens. before: what the last pass has left there."""
    left = hash((*tokens, position, before))
    model, draws = random.Random(left // 64), random.Random(hash((left, seed)))
    allowed = [t for t in range(VOCAB_SIZE) if t not in forbidden]
    likeliest = TokenLogprobs(model.choice(allowed[:3]), -model.random())
    return Place(draws.choice(allowed), likeliest, model.random(), left)


@dataclass(frozen=True, slots=True)
class NoiseAsk(Ask):
    """A text on noisy canvases."""

    def make_canvas(self) -> NoisyCanvas:
        return NoisyCanvas(SPEC, VOCAB_SIZE)

    def write_canvas(self, known: list[int]) -> list[TokenLogprobs]:
        count, before, last = len(known), [0] * SPEC.size, list[TokenLogprobs]()
        tokens = self._noise(count, 0)
        for number in range(1, SPEC.most_passes + 1):
            seed = choice_seed(self.seed, number)
            places = [
                make_place([*known, *tokens], count + i, before[i], seed, self.forbidden(count + i))
                for i in range(SPEC.size)
            ]
            likeliest, before = [place.likeliest for place in places], [place.left for place in places]
            mean = sum(place.entropy for place in places) / SPEC.size
            same = [one.token_id for one in likeliest] == [one.token_id for one in last]
            if same and mean < SPEC.confidence:
                break
            last, noise, total = likeliest, self._noise(count, number), 0.0
            for i in sorted(range(SPEC.size), key=lambda i: places[i].entropy):
                tokens[i] = places[i].drawn if total <= SPEC.entropy_bound else noise[i]
                total += places[i].entropy
        return likeliest

    def _noise(self, position: int, number: int) -> list[int]:
        seed = choice_seed(self.seed, NOISE + number)
        return [int(uniform(seed, position + i) * VOCAB_SIZE) for i in range(SPEC.size)]


class Device(CanvasMemory):
    """Entries are digests of what is known, and of what passes leave in places."""

    def run(self, plan: StepPlan, batch: SamplingBatch, texts: Mapping[int, Sequence[int]]) -> list[Sampled]:
        self.move(plan)
        rows = iter(batch.rows)
        for chunk in plan.chunks:
            self._check_reads(chunk, texts[chunk.seq_id])
        self._check_writes(plan)
        answers = []
        for chunk in plan.chunks:
            text = texts[chunk.seq_id]
            known = text[chunk.start : chunk.end]
            entries = [hash(tuple(text[: chunk.start + i + 1])) for i in range(len(known))]
            if chunk.denoising:
                places = self._denoise(chunk, next(rows), text)
                entries += [place.left for place in places]
                answers.append(describe(places))
            assert len(entries) == len(chunk.token_ids)
            self._write(chunk, [0, *entries])
        return answers

    def _check_reads(self, chunk: Chunk, text: Sequence[int]) -> None:
        assert list(chunk.token_ids[: len(text) - chunk.start]) == list(text[chunk.start : chunk.end])
        assert chunk.num_logits == max(chunk.end - len(text), 0) == (SPEC.size if chunk.denoising else 0)
        for g, window in enumerate((None, WINDOW)):
            begin = 0 if window is None else max(chunk.start - window + 1, 0)
            for i, low, high in self._spans(begin, chunk.start):
                first = i * self.block_size
                wanted = [hash(tuple(text[: first + at + 1])) for at in range(low, high)]
                found = self.blocks[g][chunk.blocks[g][i]][low:high]
                assert found == wanted, f"{chunk}: block {i} of group {g}"

    def _denoise(self, chunk: Chunk, row: SamplingRow, text: Sequence[int]) -> list[Place]:
        assert chunk.denoising is not None
        assert row.entropy_at == chunk.denoising.temperature > 0
        assert row.position == len(text)
        tokens = [*text[: chunk.start], *chunk.token_ids]
        places = []
        for i in range(row.num_samples):
            block, offset = divmod(row.position + i, self.block_size)
            left = {held[table[block]][offset] for held, table in zip(self.blocks, chunk.blocks, strict=True)}
            assert chunk.denoising.is_first or len(left) == 1
            before = 0 if chunk.denoising.is_first else left.pop()
            forbidden = row.stop_token_ids if i < row.num_stopless else frozenset()
            places.append(make_place(tokens, row.position + i, before, row.seed, forbidden))
        return places


def describe(places: Sequence[Place]) -> Sampled:
    """The answer of a pass."""
    denoised = Denoised(
        tuple([place.likeliest.token_id for place in places]), tuple([place.entropy for place in places])
    )
    likeliest = tuple([place.likeliest for place in places])
    return Sampled(tuple([place.drawn for place in places]), likeliest, denoised=denoised)


def make_world(num_blocks: int, host_nbytes: int) -> World:
    return World(Device, SPEC, GROUPS, num_blocks=num_blocks, host_nbytes=host_nbytes)


@pytest.mark.parametrize("num_blocks", [48, 10])
@pytest.mark.parametrize("host_nbytes", [0, 40 * BLOCK_NBYTES])
def test_each_text_is_that_of_its_sequence_alone(num_blocks: int, host_nbytes: int) -> None:
    rng = random.Random(num_blocks + host_nbytes)
    heads, world = draw_heads(rng, VOCAB_SIZE), make_world(num_blocks, host_nbytes)
    world.walk(rng, lambda: draw_ask(NoiseAsk, rng, heads, VOCAB_SIZE), 1200, num_blocks)
    assert num_blocks > 10 or world.s.num_preemptions > 20
    assert (world.s.num_swaps > 0) == (num_blocks == 10 and host_nbytes > 0)


def test_replies_come_to_their_end_where_shared_steps_fail_more_often_than_canvases_are_done() -> None:
    """A canvas begins anew after a failure. Alone it must be done before others share its steps again."""
    rng, world = random.Random(3), make_world(48, 0)
    for _ in range(4):
        ask = draw_ask(NoiseAsk, rng, [(1, 2, 3)], VOCAB_SIZE)
        world.submit(replace(ask, max_len=40, params=SamplingParams(max_tokens=20)))
    shared = 0
    for _ in range(2000):
        if not world.asks:
            break
        before = world.counts["shared"]
        world.step(fails=shared % 3 == 2)
        shared += world.counts["shared"] - before
    assert not world.asks
    assert world.counts["length"] + world.counts["stop"] == 4
    assert shared > 5


def test_places_of_least_entropy_are_accepted_up_to_a_sum_of_those_before() -> None:
    assert find_accepted([0.5, 0.1, 0.3, 0.2], 0.0) == {1}
    assert find_accepted([0.5, 0.1, 0.3, 0.2], 0.1) == {1, 3}
    assert find_accepted([0.5, 0.1, 0.3, 0.2], 0.31) == {1, 3, 2}
    assert find_accepted([0.5, 0.1, 0.3, 0.2], 1.0) == {0, 1, 2, 3}
    assert find_accepted([2.0, 2.0], 1.0) == {0}, "the first of equals, and one in any case"


def test_a_canvas_that_begins_anew_has_the_same_noise() -> None:
    canvas = NoisyCanvas(SPEC, 1000)
    first = canvas.open(3, seed=7)
    assert canvas.denoising == (SPEC.hottest, True)
    likeliest = (1, 2, 3, 4, 5)
    canvas.fill((9,) * 5, likeliest, (0.5, 3.0, 3.0, 3.0, 0.2), None, 3, 7)
    second = canvas.open(3, seed=7)
    assert [at for at in range(5) if second[at] == 9] == [0, 1, 4]
    heat, is_first = canvas.denoising
    assert (heat, is_first) == (pytest.approx(0.4 + 0.4 * 5 / 6), False)
    canvas.restart()
    assert canvas.open(3, seed=7) == first
    canvas.fill((9,) * 5, likeliest, (0.5, 3.0, 3.0, 3.0, 0.2), None, 3, 7)
    assert canvas.open(3, seed=7) == second
    assert not canvas.take(9, ())
    canvas.fill((9,) * 5, likeliest, (0.1,) * 5, None, 3, 7)
    assert [one.token_id for one in canvas.take(9, {3})] == [1, 2, 3]
    assert canvas.open(6, seed=7) != first
