"""Random walks of sequences that write on canvases: each gets the text that it has alone.

A position's entry is the digest of all tokens up to the end of its canvas, masks included, so one that was
computed before its canvas was done is never taken for the right one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import pytest

from plait.memory import BlockGroup
from plait.request import TokenLogprobs
from plait.schedule.drafts.canvas import Canvas
from plait.schedule.plan import Chunk, Sampled, SamplingBatch, SamplingRow, StepPlan
from plait.spec.canvas import CanvasSpec
from tests.schedule.canvas_world import Ask, CanvasMemory, World, draw_ask, draw_heads
from tests.schedule.memory_model import BLOCK_NBYTES

SPEC = CanvasSpec(size=4, mask_token=99, threshold=0.5)
EDITS = CanvasSpec(size=4, mask_token=99, threshold=0.5, edit_threshold=0.6, edit_passes=3)
FULL = BlockGroup("full", None, ("a",))
VOCAB_SIZE = 11


def digest(tokens: Sequence[int], position: int) -> int:
    """What is kept of a position: all that its query sees."""
    return hash((*tokens[: position // SPEC.size * SPEC.size + SPEC.size], position))


def choose(tokens: Sequence[int], position: int, seed: int, forbidden: Collection[int] = ()) -> TokenLogprobs:
    """What the model writes in a place, and how sure it is, where it sees these tokens."""
    drawn = random.Random(hash((digest(tokens, position), seed)))
    token = drawn.choice([t for t in range(VOCAB_SIZE) if t not in forbidden])
    return TokenLogprobs(token, -drawn.random() * 2)


@dataclass(frozen=True, slots=True)
class MaskAsk(Ask):
    """A text on canvases of masks."""

    spec: CanvasSpec = SPEC

    def make_canvas(self) -> Canvas:
        return Canvas(self.spec)

    def write_canvas(self, known: list[int]) -> list[TokenLogprobs]:
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
        return [place for place in places if place is not None]

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


class Device(CanvasMemory):
    """Entries are digests up to the end of a canvas."""

    def run(self, plan: StepPlan, batch: SamplingBatch, texts: Mapping[int, Sequence[int]]) -> list[Sampled]:
        self.move(plan)
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


@pytest.mark.parametrize("spec", [SPEC, EDITS], ids=["kept", "edited"])
@pytest.mark.parametrize("num_blocks", [40, 9])
@pytest.mark.parametrize("host_nbytes", [0, 40 * BLOCK_NBYTES])
def test_each_text_is_that_of_its_sequence_alone(spec: CanvasSpec, num_blocks: int, host_nbytes: int) -> None:
    rng = random.Random(num_blocks + host_nbytes)
    heads, make = draw_heads(rng, VOCAB_SIZE), partial(MaskAsk, spec=spec)
    world = World(Device, SPEC, (FULL,), num_blocks=num_blocks, host_nbytes=host_nbytes)
    world.walk(rng, lambda: draw_ask(make, rng, heads, VOCAB_SIZE), 900, num_blocks)
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
