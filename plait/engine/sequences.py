"""From a request to the sequences of its choices: with a negative prompt, or with the beams of a search."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count

from plait.engine.admission import OpenChoice
from plait.engine.grammar_guide import GrammarGuide
from plait.ops.seed import choice_seed
from plait.request import Request, SamplingParams
from plait.schedule.attached import PooledHidden
from plait.schedule.beams import BeamSearch
from plait.schedule.drafts.canvas import Canvas
from plait.schedule.drafts.noisy_canvas import NoisyCanvas
from plait.schedule.plan import StepPlan
from plait.schedule.sequence import Gang, TokenSequence
from plait.spec.canvas import AnyCanvas, NoisyCanvasSpec

GREEDY = SamplingParams(temperature=0.0)  # of sequences that are not drawn from
GuideMaker = Callable[[Request], Sequence[GrammarGuide]]
NO_GUIDES: tuple[GrammarGuide | None, ...] = (None,)


class SequenceMaker:
    """Makes sequences, with ids that no other has. `canvas`: what each writes on, if the model does;
    `vocab_size`: how many tokens there are."""

    def __init__(self, canvas: AnyCanvas | None = None, vocab_size: int = 0) -> None:
        self._ids, self._seeds, self._canvas = count(1), random.SystemRandom(), canvas
        self._vocab_size = vocab_size

    def make(
        self, request: Request, arrived: float, place: tuple[int, str], guided: GuideMaker
    ) -> list[TokenSequence]:
        """The first sequence of each choice that has not ended; of a search, only that of its first beam.

        `place`: the slot of the request's adapter, and the salt of its prefixes. `guided` makes the guides of
        a request's choices.
        """
        params, seed = request.params, request.params.seed
        seed = self._seeds.getrandbits(63) if seed is None else seed
        if params.use_beam_search:
            return [self._make_beams(request, arrived, place)]
        is_guided = request.grammar is not None or request.thinking is not None
        guides: Sequence[GrammarGuide | None] = guided(request) if is_guided else NO_GUIDES * params.n
        found = []
        for index, so_far in enumerate(request.resumed or ((),) * params.n):
            if so_far is None:
                continue
            seq = self._make_one(request, arrived, place, index, so_far, guide=guides[index])
            seq.seed = choice_seed(seed, index)
            if request.resumed_mu:
                seq.mirostat_mu = request.resumed_mu[index]
            if params.is_guided:
                self._add_negative(request, arrived, place, seq)
            found.append(seq)
        return found

    def _make_one(
        self,
        request: Request,
        arrived: float,
        place: tuple[int, str],
        index: int,
        so_far: Sequence[int],
        params: SamplingParams | None = None,
        guide: GrammarGuide | None = None,
    ) -> TokenSequence:
        prompt, timeout_s, (adapter, salt) = request.prompt_token_ids, request.timeout_s, place
        params, is_new = params or request.params, not so_far
        return TokenSequence(
            id=next(self._ids),
            request_id=request.id,
            index=index,
            token_ids=[*prompt, *so_far],
            prompt_len=len(prompt),
            params=params,
            stop_token_ids=request.stop_token_ids,
            max_len=len(prompt) + (params.max_tokens or 0),
            wants_prompt_logprobs=params.prompt_logprobs is not None and index == 0 and is_new,
            cache_salt=salt,
            adapter=adapter,
            boundaries=request.boundaries,
            priority=request.priority,
            deadline=None if timeout_s is None else arrived + timeout_s,
            pooled=PooledHidden(request.pooling, request.pooled_from) if request.pooling else None,
            guide=guide,
            is_watched=request.watched,
            canvas=self._make_canvas(),
        )

    def _make_canvas(self) -> Canvas | NoisyCanvas | None:
        match self._canvas:
            case None:
                return None
            case NoisyCanvasSpec() as spec:
                return NoisyCanvas(spec, self._vocab_size)
            case spec:
                return Canvas(spec)

    def _add_negative(
        self, request: Request, arrived: float, place: tuple[int, str], seq: TokenSequence
    ) -> None:
        """The sequence that guides a choice: its negative prompt, and the choice's own tokens behind it."""
        params = replace(GREEDY, max_tokens=request.params.max_tokens)
        asked = replace(request, prompt_token_ids=request.negative_ids, boundaries=(), timeout_s=None)
        so_far = seq.token_ids[seq.prompt_len :]
        Gang((seq, self._make_one(asked, arrived, place, seq.index, so_far, params)))

    def _make_beams(self, request: Request, arrived: float, place: tuple[int, str]) -> TokenSequence:
        """The sequences of all beams. A search has no tokens so far: it begins anew in a new engine."""
        num_beams, asked = request.params.num_beams, request.params
        params = replace(GREEDY, max_tokens=asked.max_tokens, logprobs=asked.logprobs)
        beams = [
            self._make_one(request, arrived, place, index if index < asked.n else 0, (), params)
            for index in range(num_beams)
        ]
        search = BeamSearch(asked, request.stop_token_ids, asked.max_tokens or 0)
        Gang(tuple(beams), search)
        return beams[0]


def list_choices(request: Request, leaders: Sequence[TokenSequence]) -> list[TokenSequence]:
    """The sequence of each choice of a request that has not ended, of what `SequenceMaker.make` made."""
    if not request.params.use_beam_search:
        return list(leaders)
    ended = {index for index, so_far in enumerate(request.resumed) if so_far is None}
    return [seq for seq in leaders[0].members[: request.params.n] if seq.index not in ended]


def list_alone(plan: StepPlan, choices: Mapping[int, OpenChoice]) -> list[OpenChoice] | None:
    """The choices of the one sequence, or of the one gang, that was in a step; None: there were more."""
    found = [choice for chunk in plan.chunks if (choice := choices.get(chunk.seq_id)) is not None]
    is_whole = len(found) == len(plan.chunks)  # else a sequence that has ended was in it, too
    if not is_whole or len({id(choice.sequence.gang or choice.sequence) for choice in found}) != 1:
        return None
    return [*found[0].entry.open.values()] if found[0].is_searched else [found[0]]


def add_steps(plan: StepPlan, choices: Mapping[int, OpenChoice], num_steps: int) -> None:
    """Add to the steps of each choice in a plan; a search counts those of one beam."""
    for chunk in plan.chunks if num_steps else ():
        choice = choices.get(chunk.seq_id)
        if choice is not None and chunk.seq_id == choice.sequence.id:
            choice.num_steps += num_steps
