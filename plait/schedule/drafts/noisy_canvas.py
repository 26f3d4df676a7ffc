"""A canvas of random tokens, which passes replace until they stay (`spec.NoisyCanvasSpec`; DiffusionGemma).

All that is random follows from the sequence's seed, the position and the number of the pass. So a canvas that
begins anew, because its memory was taken, gets the same tokens again.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from itertools import accumulate

from plait.ops.seed import choice_seed, uniform
from plait.request import SamplingParams, TokenLogprobs
from plait.spec.canvas import NoisyCanvasSpec

NOISE = 1 << 32  # seeds of what replaces tokens; those below are of draws


class NoisyCanvas:
    """The places behind a sequence's last token. vocab_size: how many tokens there are."""

    is_kept = False  # without the memory of its passes

    def __init__(self, spec: NoisyCanvasSpec, vocab_size: int) -> None:
        self.spec, self._vocab_size = spec, vocab_size
        self.restart()

    def restart(self) -> None:
        """Begin the canvas anew: what its passes have left in memory is gone."""
        self._pass = 0
        self._tokens: tuple[int, ...] = ()
        self._likeliest: list[tuple[int, ...]] = []  # of the last passes
        self._done: tuple[TokenLogprobs, ...] = ()

    def count_places(self, num_tokens: int) -> int:
        """The places of a canvas behind so many tokens."""
        return self.spec.size

    def find_end(self, max_len: int) -> int:
        """The most tokens of a sequence that ends with so many, with its last canvas."""
        return max_len + self.spec.tail

    def count_final(self, end: int) -> int:
        """Of the first `end` known tokens those of which the state is final: it is of all."""
        return end

    def open(self, num_tokens: int, seed: int) -> tuple[int, ...]:
        """The tokens to compute behind so many known ones. seed: of the sequence."""
        if not self._tokens:
            self._tokens = self._make_noise(num_tokens, self.count_places(num_tokens), seed)
        return self._tokens

    @property
    def denoising(self) -> tuple[float, bool]:
        """What the model must know about the next pass: how hot it is, and whether it is the first."""
        s = self.spec
        left = (s.most_passes - self._pass) / s.most_passes
        return s.coolest + (s.hottest - s.coolest) * left, self._pass == 0

    def choose_draws(self, params: SamplingParams, seed: int) -> tuple[SamplingParams, int, float]:
        """(how the next pass draws, its seed, the temperature at which entropies are needed).

        A request's temperature is a factor of the model's; at 0 nothing is drawn.
        """
        heat, _ = self.denoising
        around = params.dynatemp_range * heat
        drawn = replace(params, temperature=(params.temperature or 0.0) * heat, dynatemp_range=around)
        return drawn, choice_seed(seed, self._pass + 1), heat

    def list_past(self, known: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What penalties count: known tokens, as those of a canvas may all go again."""
        return tuple(known), ()

    def fill(
        self,
        drawn: Sequence[int],
        likeliest: tuple[int, ...],
        entropies: Sequence[float],
        logprobs: Sequence[TokenLogprobs] | None,
        num_tokens: int,
        seed: int,
    ) -> None:
        """Keep the tokens of least entropy, and noise for others; at the end all likeliest ones.

        drawn: a token for each place; logprobs: of the likeliest ones, if requested.
        """
        accepted = find_accepted(entropies, self.spec.entropy_bound)
        is_stable = self._is_stable(likeliest)
        self._pass += 1
        mean = sum(entropies) / len(entropies)
        if self._pass == self.spec.most_passes or (is_stable and mean < self.spec.confidence):
            self._done = tuple(logprobs or [TokenLogprobs(one, 0.0) for one in likeliest])
            return
        noise = self._make_noise(num_tokens, len(self._tokens), seed)
        pairs = enumerate(zip(drawn, noise, strict=True))
        self._tokens = tuple([token if i in accepted else other for i, (token, other) in pairs])

    def take(self, most: int, stops: Collection[int]) -> tuple[TokenLogprobs, ...]:
        """The tokens of a canvas that is done, at most so many and up to one of `stops`; () before that."""
        ready: list[TokenLogprobs] = []
        for place in self._done:
            ready.append(place)
            if len(ready) == most or place.token_id in stops:
                break
        if ready:
            self.restart()
        return tuple(ready)

    def _is_stable(self, likeliest: tuple[int, ...]) -> bool:
        count = self.spec.stable_passes
        before, self._likeliest = self._likeliest, [*self._likeliest, likeliest][-count:] if count else []
        return len(before) >= count and all(one == likeliest for one in before)

    def _make_noise(self, position: int, count: int, seed: int) -> tuple[int, ...]:
        """A random token for each of so many positions."""
        seed = choice_seed(seed, NOISE + self._pass)
        return tuple([int(uniform(seed, position + i) * self._vocab_size) for i in range(count)])


def find_accepted(entropies: Sequence[float], bound: float) -> frozenset[int]:
    """The places of least entropy, each with a sum of those before it that is at most `bound`.

    So the first is always among them.
    """
    order = sorted(range(len(entropies)), key=entropies.__getitem__)
    before = accumulate((entropies[i] for i in order), initial=0.0)
    return frozenset(i for i, found in zip(order, before, strict=False) if found <= bound)
