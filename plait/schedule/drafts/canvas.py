"""The canvas of a sequence: the next tokens of a model that fills places in any order (`spec.CanvasSpec`).

Each pass computes a canvas whole, behind all known tokens, and samples a token for every place.
The surest of them stay. Once all places have a token they are the sequence's; the next pass computes
them again, as what the next canvas sees, before that one's masks.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from plait.request import SamplingParams, TokenLogprobs
from plait.spec.canvas import CanvasSpec


class Canvas:
    """The places behind a sequence's last token, up to the next multiple of the spec's size."""

    is_kept = True  # without the memory of its passes

    def __init__(self, spec: CanvasSpec) -> None:
        bounds = [math.log(p) if p else -math.inf for p in (spec.threshold, spec.edit_threshold)]
        self.spec, (self._least, self._least_edit) = spec, bounds
        self._places: list[TokenLogprobs | None] = []  # None: it has no token yet
        self._num_edit_passes, self._may_change = 0, False

    def count_places(self, num_tokens: int) -> int:
        """The places of a canvas behind so many tokens."""
        return self.spec.size - num_tokens % self.spec.size

    def restart(self) -> None:
        """What its passes have left in memory is gone: it needs nothing of that."""

    def find_end(self, max_len: int) -> int:
        """The most tokens of a sequence with its canvas: one block holds both, whole."""
        return max_len

    def count_final(self, end: int) -> int:
        """Of the first `end` known tokens those of which the state is final: of whole canvases."""
        return end // self.spec.size * self.spec.size

    @property
    def denoising(self) -> None:
        """The model needs to know nothing of a pass."""

    def choose_draws(self, params: SamplingParams, seed: int) -> tuple[SamplingParams, int, float]:
        """How a pass draws: as requested, and no entropies are needed."""
        return params, seed, 0.0

    def open(self, num_tokens: int, seed: int = 0) -> tuple[int, ...]:
        """The tokens to compute behind so many known ones: the mask in places that have none."""
        if not self._places:
            self._places = [None] * self.count_places(num_tokens)
        mask = self.spec.mask_token
        return tuple([mask if place is None else place.token_id for place in self._places])

    def list_past(self, known: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What penalties count: (for all places behind the known tokens, for those behind each of it).

        With edits only tokens before a place count, so that none penalises itself.
        """
        if self.spec.edit_threshold is not None:
            return tuple(known), self.open(len(known))
        return (*known, *[place.token_id for place in self._places if place]), ()

    def fill(self, sampled: Sequence[TokenLogprobs]) -> None:
        """Keep what was sampled where its probability is above the threshold, or the likeliest of all.

        sampled: one for each place. Places with a token keep it, but for edits.
        """
        free = [i for i, place in enumerate(self._places) if place is None]
        sure = [i for i in free if sampled[i].logprob > self._least]
        changed = sure or [max(free, key=lambda i: sampled[i].logprob)] if free else []
        is_full = len(changed) == len(free)
        if self.spec.edit_threshold is not None:
            new = [one if one.logprob > self._least_edit else None for one in sampled]
            pairs = enumerate(zip(self._places, new, strict=True))
            changed += [i for i, (a, b) in pairs if a and b and a.token_id != b.token_id]
            self._num_edit_passes += not free
            is_spent = is_full and self._num_edit_passes >= self.spec.edit_passes
            self._may_change = bool(changed) and not is_spent
        for i in changed:
            self._places[i] = sampled[i]

    def take(self, most: int, stops: Collection[int]) -> tuple[TokenLogprobs, ...]:
        """The tokens of a canvas that is done, and forget them; () while it is not.

        It is done as well when the first ones end the sequence: so many, or with one of `stops`. Later
        passes change no token, so those behind the end need not be known; but for edits.
        """
        ready: list[TokenLogprobs] = []
        for place in self._places:
            if place is None or self._may_change:
                return ()
            ready.append(place)
            if len(ready) == most or place.token_id in stops:
                break
        self._places, self._num_edit_passes = [], 0
        return tuple(ready)
