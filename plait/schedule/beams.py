"""Beam search: which beams of a prompt go on, which have ended, and which win.

The rules are those of transformers' `generate(num_beams=…, do_sample=False)`:

* A step looks at the best continuations of all live beams. One that ends is kept if it is among the best
  `width`; the best `width` others go on.
* A finished beam scores its summed log-probability / length^`length_penalty`, its end token counted.
* `early_stopping` False: it stops once the best live beam, at its length now, is no better than the worst of
  `width` finished ones; True: once there are so many; "never": as False, at the length that is best for it.

vLLM's own search differs: it never stops early, keeps every beam that ends, and counts the prompt's tokens as
length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import attrgetter
from typing import NamedTuple

from msgspec import Struct

from plait.request import FinishReason, SamplingParams, TokenLogprobs


class Beam(Struct, frozen=True, eq=False):
    """The output of a beam as a chain: its last token, and the beam before it (None: no token yet)."""

    total: float = 0.0  # summed log-probabilities
    last: TokenLogprobs | None = None
    before: Beam | None = None

    def tokens(self) -> tuple[TokenLogprobs, ...]:
        """Its tokens with their log-probabilities, in order."""
        found, beam = [], self
        while beam.last is not None and beam.before is not None:
            found.append(beam.last)
            beam = beam.before
        return tuple(reversed(found))


class FinishedBeam(Struct, frozen=True):
    """A beam that has ended. `score`: what beams are ranked by."""

    score: float
    beam: Beam
    finish_reason: FinishReason


class Continued(NamedTuple):
    """A beam that goes on: the rank of the beam that it continues, and its next token."""

    parent: int
    token_id: int


class BeamSearch:
    """The search of one request. `ends`: tokens that end a beam; `max_tokens`: the most that one has."""

    def __init__(self, params: SamplingParams, ends: Collection[int], max_tokens: int) -> None:
        self._width, self._ends, self._most = params.num_beams, ends, max_tokens
        self._penalty, self._early = params.length_penalty, params.early_stopping
        self._num_top = params.logprobs or 0
        self.live, self.finished = [Beam()], list[FinishedBeam]()
        self._length = 0

    @property
    def num_candidates(self) -> int:
        """How many alternatives of each live beam are looked at: enough for `width` that do not end."""
        return max(2, 1 + len(self._ends)) * self._width

    def advance(self, answers: Sequence[TokenLogprobs]) -> list[Continued]:
        """Take the candidates of every live beam, best beam first; the beams that go on, best first.

        None go on: the search is over, and `finished` has its results, best first.
        """
        self._length += 1
        found = [
            (beam.total + logprob, -rank, token_id, logprob)
            for rank, (beam, answer) in enumerate(zip(self.live, answers, strict=True))
            for token_id, logprob in answer.top[: self.num_candidates]
        ]
        found.sort(key=lambda one: (-one[0], -one[1], one[2]))  # of equals the better beam, the lower id
        parents, live, going = self.live, list[Beam](), list[Continued]()
        for place, (total, behind, token_id, logprob) in enumerate(found[: self.num_candidates]):
            rank = -behind
            ends, is_last = token_id in self._ends, self._length >= self._most
            last = TokenLogprobs(token_id, logprob, self._alternatives(answers[rank], token_id, logprob))
            beam = Beam(total, last, parents[rank])
            if (ends or is_last) and place < self._width:
                score = total / self._length**self._penalty
                self.finished.append(FinishedBeam(score, beam, "stop" if ends else "length"))
            elif not ends and not is_last and len(live) < self._width:
                live.append(beam)
                going.append(Continued(rank, token_id))
        self.finished = sorted(self.finished, key=attrgetter("score"), reverse=True)[: self._width]
        self.live = live
        return [] if self._is_done() else going

    def _alternatives(
        self, answer: TokenLogprobs, token_id: int, logprob: float
    ) -> tuple[tuple[int, float], ...]:
        """Those that were requested with each token, the token among them."""
        top = answer.top[: self._num_top]
        return top if not top or token_id in dict(top) else (*top, (token_id, logprob))

    def _is_done(self) -> bool:
        if not self.live:
            return True
        if len(self.finished) < self._width:
            return False
        reaches_end = self._early == "never" and self._penalty > 0
        length = self._most if reaches_end else self._length
        best = self.live[0].total / length**self._penalty
        return self._early is True or best <= self.finished[-1].score
