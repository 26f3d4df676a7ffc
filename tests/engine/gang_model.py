"""A model of digests for sequences that are sampled together, and plain formulas of what they must give."""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from functools import lru_cache

from plait.request import TokenLogprobs
from plait.schedule.plan import Done, Sampled, SamplingBatch, StepPlan, Ticket
from tests.engine.hash_model import VOCAB, HashModel, digest, next_token

Scores = tuple[tuple[int, float], ...]


def value_of(tokens: Sequence[int]) -> int:
    """What the model says behind these tokens, from all of them at once."""
    state = 0
    for token in tokens:
        state = digest(state, token)
    return next_token(state, tokens[-6:], tokens, 0)


def mix(value: int, negative: int, scale: float) -> int:
    """The token of a guided choice."""
    return int(value + scale * (value - negative)) % VOCAB


@lru_cache(None)
def scores_of(value: int) -> Scores:
    """Log-probabilities of all tokens, best first. Few different ones, so that there are equal scores."""
    rng = random.Random(value)
    return tuple(
        sorted(((t, -rng.randrange(1, 9) / 2) for t in range(VOCAB)), key=lambda one: (-one[1], one[0]))
    )


def guided(prompt: Sequence[int], negative: Sequence[int], count: int, scale: float) -> list[int]:
    """A guided text, by its formula."""
    found: list[int] = []
    for _ in range(count):
        found.append(mix(value_of([*prompt, *found]), value_of([*negative, *found]), scale))
    return found


def beams(
    prompt: Sequence[int], width: int, count: int, ends: Collection[int], penalty: float, early: object
) -> list[tuple[list[int], bool]]:
    """The results of a beam search over whole texts: tokens, and whether an end token ended them."""
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int], bool]] = []
    for length in range(1, count + 1):
        options = [
            (total + score, rank, token)
            for rank, (total, text) in enumerate(live)
            for token, score in scores_of(value_of([*prompt, *text]))
        ]
        options.sort(key=lambda one: (-one[0], one[1], one[2]))
        texts, before = [], live
        for place, (total, rank, token) in enumerate(options):
            text, is_end = [*before[rank][1], token], token in ends
            if is_end or length == count:
                if place < width:
                    done.append((total / length**penalty, text[:-1] if is_end else text, is_end))
            elif len(texts) < width:
                texts.append((total, text))
        live = texts
        done = sorted(done, key=lambda one: -one[0])[:width]
        at = count if early == "never" and penalty > 0 else length
        is_full = len(done) == width
        if not live or (is_full and (early is True or live[0][0] / at**penalty <= done[-1][0])):
            break
    return [(text, is_end) for _, text, is_end in done]


class GangModel(HashModel):
    """Answers guided rows from both prompts, and beams with log-probabilities. It counts copies and rows."""

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        answers = super().launch(plan, sampling).wait()
        values, chunks = [], [chunk for chunk in plan.chunks if chunk.num_logits]
        for chunk in chunks:
            state = self.slots[chunk.slot] or 0
            window = self._read(chunk, 1, max(chunk.end - 6, 0), chunk.end)
            values.append(next_token(state, window, self._read(chunk, 0, 0, chunk.end), 0))
        for at, row in enumerate(sampling.rows):
            if row.negative >= 0:
                token = mix(values[at], values[row.negative], row.params.guidance_scale)
                answers[at] = Sampled((token,))
            elif row.num_candidates:
                top = scores_of(values[at])[: row.num_candidates]
                answers[at] = Sampled((top[0][0],), (TokenLogprobs(*top[0], top),))
        return Done(answers)
