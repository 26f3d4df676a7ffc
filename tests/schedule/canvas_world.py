"""Sequences on canvases, of masks or of noise, and what becomes of each: for random walks with either."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from plait.memory import BlockGroup
from plait.request import FinishReason, SamplingParams, TokenLogprobs
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits
from plait.schedule.drafts.canvas import Canvas
from plait.schedule.drafts.noisy_canvas import NoisyCanvas
from plait.schedule.plan import Sampled, SamplingBatch, StepPlan
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler
from plait.schedule.sequence import TokenSequence
from plait.spec.canvas import AnyCanvas
from tests.schedule.memory_model import BLOCK_NBYTES, ModelMemory

BLOCK, LONGEST = 8, 48


@dataclass(frozen=True, slots=True)
class Ask(ABC):
    """All that a text depends on."""

    prompt: tuple[int, ...]
    max_len: int
    params: SamplingParams
    stops: frozenset[int]
    seed: int

    @abstractmethod
    def make_canvas(self) -> Canvas | NoisyCanvas:
        """What a sequence of this writes on."""

    @abstractmethod
    def write_canvas(self, known: list[int]) -> list[TokenLogprobs]:
        """The canvas behind these tokens, as a plain loop writes it."""

    def write(self) -> tuple[list[TokenLogprobs], FinishReason]:
        """The text of this sequence alone, canvas by canvas, and why it ends."""
        text: list[TokenLogprobs] = []
        most = self.max_len - len(self.prompt)
        while len(self.prompt) + len(text) < self.max_len:
            text += self.write_canvas([*self.prompt, *(one.token_id for one in text)])
            for i, one in enumerate(text[:most]):
                if one.token_id in self.stops and i >= self.params.min_tokens:
                    return text[:i], "stop"
        return text[:most], "length"

    def forbidden(self, position: int) -> frozenset[int]:
        return self.stops if position - len(self.prompt) < self.params.min_tokens else frozenset()


class CanvasMemory(ModelMemory, ABC):
    """Memory of canvases. Reads, and where chunks end, are checked before anything is computed."""

    @abstractmethod
    def run(self, plan: StepPlan, batch: SamplingBatch, texts: Mapping[int, Sequence[int]]) -> list[Sampled]:
        """texts: the known tokens of each sequence."""

    def move(self, plan: StepPlan) -> None:
        assert plan.num_tokens <= self.limits.max_num_batched_tokens
        for move in plan.moves:
            self._move(move)
        self.has_failed = False


class World:
    """A scheduler with memory of this kind."""

    def __init__(
        self,
        device: type[CanvasMemory],
        canvas: AnyCanvas,
        groups: tuple[BlockGroup, ...],
        *,
        num_blocks: int,
        host_nbytes: int,
    ) -> None:
        budget = 8 * canvas.size + 1  # all sequences' canvases, with those before them
        self.limits = SchedulerLimits(
            max_num_seqs=4,
            max_num_batched_tokens=budget,
            max_waiting=1000,
            max_model_len=LONGEST,
            num_steps=8,
            canvas=canvas,
        )
        counts = (num_blocks + 1,) * len(groups)
        cache = CacheOptions(block_nbytes=(BLOCK_NBYTES,) * len(groups), host_nbytes=host_nbytes)
        sizes = dict(num_slots=0, max_step_len=budget, cache=cache)
        self.memory = Allocation(groups, counts, BLOCK, **sizes)  # type: ignore[arg-type]
        self.s = Scheduler(self.limits, self.memory)
        self.s.costs.observe(1, 1e-4)
        self.device = device(groups, counts, BLOCK, 0, self.limits, host_nbytes)
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
        how = dict(prompt_len=prompt_len, canvas=ask.make_canvas())
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

    def walk(self, rng: random.Random, draw: Callable[[], Ask], num_steps: int, num_blocks: int) -> None:
        """Requests come, go, fail and are resumed. Each text is checked, and in the end all memory."""
        self.s.costs.prefers_moving = lambda nbytes, tokens: rng.random() < 0.5  # type: ignore[method-assign]
        for _ in range(num_steps):
            if len(self.asks) < 12 and rng.random() < 0.3:
                self.submit(draw(), rng.choice([1, 1, 1, 3]))
            if self.asks and rng.random() < 0.02:
                self.cancel(rng.choice([*self.asks]))
            if self.asks and rng.random() < 0.1:  # mostly one with tokens: with little memory most have none
                begun = [one for one in self.asks if len(self.texts[one]) > len(self.asks[one].prompt)]
                self.resume(rng.choice(begun or [*self.asks]))
            self.step(fails=bool(self.asks) and rng.random() < 0.01)
        while self.asks:
            self.step()
        stats = self.s.stats()
        assert stats["num_free_blocks"] + stats["num_cached_blocks"] == len(self.memory.groups) * num_blocks
        assert self.s.cache_counts["hit_tokens"] > 0
        counted = ("shared", "cut", "events", "stop", "length", "resumed")
        assert all(self.counts[name] > 10 for name in counted), self.counts


def draw_ask(
    make: Callable[..., Ask], rng: random.Random, heads: Sequence[tuple[int, ...]], vocab_size: int
) -> Ask:
    own = tuple(rng.randrange(vocab_size) for _ in range(rng.randrange(1, 12)))
    prompt = (*rng.choice(heads), *own)
    length = rng.choice([0, 1, 3, 9, 20])
    least = rng.randrange(min(length, 4) + 1)
    params = SamplingParams(max_tokens=length, min_tokens=least, logprobs=rng.choice([None, 0]))
    stops = frozenset(rng.sample(range(vocab_size), rng.choice([0, 0, 1])))
    return make(prompt, min(len(prompt) + length, LONGEST), params, stops, rng.randrange(1000))


def draw_heads(rng: random.Random, vocab_size: int) -> list[tuple[int, ...]]:
    """What prompts begin with."""
    return [(), *(tuple(rng.randrange(vocab_size) for _ in range(n)) for n in (9, 16, 25))]
