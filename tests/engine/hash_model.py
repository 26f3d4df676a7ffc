"""A model of digests over paged memory and slots, its oracle, and an engine around it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

from plait.engine.core import Engine
from plait.memory import BlockGroup
from plait.request import Event, Request, RequestTrace, SamplingParams, TokenLogprobs
from plait.schedule.allocation import Allocation
from plait.schedule.costs import SchedulerLimits, StepCosts
from plait.schedule.plan import (
    Chunk,
    CopyBlock,
    CopySlot,
    Done,
    Load,
    Move,
    Sampled,
    SamplingBatch,
    Save,
    StepPlan,
    Ticket,
)
from plait.schedule.pools import CacheOptions
from plait.schedule.scheduler import Scheduler

BLOCK, VOCAB = 4, 97
GROUPS = (BlockGroup("full", None, ("a",)), BlockGroup("window:6", 6, ("b",)))
HOST = CacheOptions(block_nbytes=(8, 8), slot_nbytes=8, host_nbytes=4096)


def digest(value: int, token: int) -> int:
    return (value * 31 + token + 1) % 1_000_003


def next_token(state: int, window: Sequence[int], last_full: Sequence[int], seed: int) -> int:
    return (state + 7 * sum(window) + 13 * sum(last_full) + seed) % VOCAB


def oracle(prompt: Sequence[int], number: int, seed: int = 0) -> list[int]:
    """What the model below says, from all the tokens at once."""
    tokens = list(prompt)
    for _ in range(number):
        state = 0
        for token in tokens:
            state = digest(state, token)
        tokens.append(next_token(state, tokens[-6:], tokens, seed))
    return tokens[len(prompt) :]


class HashModel:
    """A model that makes its next token from every token, read back from paged memory and from its slot.

    `breaks(chunk)` says whether a step with this chunk fails; it fails half-way, leaving rubbish behind.
    `moves_break(plan)`: whether the moves before it fail.
    """

    def __init__(
        self,
        breaks: Callable[[Chunk], bool] = lambda chunk: False,
        moves_break: Callable[[StepPlan], bool] = lambda plan: False,
    ) -> None:
        self.pages: dict[tuple[int, int], int | None] = {}
        self.slots: dict[int, int | None] = {}
        self.host: dict[int, tuple[list[list[int | None]], int | None]] = {}
        self.breaks, self.moves_break = breaks, moves_break
        self.plans: list[StepPlan] = []

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        self.plans.append(plan)
        if self.moves_break(plan):
            raise OSError("the host is out of memory")
        for move in plan.moves:
            self._move(move)
        for slot in plan.fresh:
            self.slots[slot] = 0
        rows, answers = iter(sampling.rows), []
        for chunk in plan.chunks:
            if self.breaks(chunk):
                raise ZeroDivisionError("the chip is on fire")
            states = self._compute(chunk)
            if chunk.num_logits:
                row = next(rows)
                ends = range(chunk.end - row.num_samples + 1, chunk.end + 1)
                tokens = tuple(self._token(chunk, states[end], end, row.seed) for end in ends)
                targets = tuple(TokenLogprobs(t, -1.0) for t in row.prompt_targets)
                answers.append(Sampled(tokens, None, targets))
        return Done(answers)

    def _compute(self, chunk: Chunk) -> dict[int, int]:
        states = {}
        for p, token in enumerate(chunk.token_ids, chunk.start):
            for g, table in enumerate(chunk.blocks):
                self.pages[g, table[p // BLOCK] * BLOCK + p % BLOCK] = token
            states[p + 1] = self.slots[chunk.slot] = digest(self.slots[chunk.slot] or 0, token)
        return states

    def _token(self, chunk: Chunk, state: int, end: int, seed: int) -> int:
        window = self._read(chunk, 1, max(end - 6, 0), end)
        return next_token(state, window, self._read(chunk, 0, 0, end), seed)

    def _read(self, chunk: Chunk, group: int, first: int, end: int) -> list[int]:
        table = chunk.blocks[group]
        found = [self.pages[group, table[p // BLOCK] * BLOCK + p % BLOCK] for p in range(first, end)]
        return [token for token in found if token is not None]

    def _move(self, move: Move) -> None:
        match move:
            case CopySlot(source, target):
                self.slots[target] = self.slots.get(source)
            case CopyBlock(group, source, target):
                self._write(group, target, self._block(group, source))
            case Save(handle, blocks, slot):
                pages = [[x for b in table for x in self._block(g, b)] for g, table in enumerate(blocks)]
                self.host[handle] = pages, self.slots.get(slot)
            case Load(handle, blocks, slot):
                pages, state = self.host[handle]
                for g, table in enumerate(blocks):
                    for i, block in enumerate(table):
                        self._write(g, block, pages[g][i * BLOCK : (i + 1) * BLOCK])
                if slot:
                    self.slots[slot] = state
            case _:
                self.host.pop(move.handle, None)  # what was never saved is dropped already

    def _block(self, group: int, block: int) -> list[int | None]:
        return [self.pages.get((group, block * BLOCK + i)) for i in range(BLOCK)]

    def _write(self, group: int, block: int, entries: Sequence[int | None]) -> None:
        for i, entry in enumerate(entries):
            self.pages[group, block * BLOCK + i] = entry


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

    def last(self, request_id: str, index: int = 0) -> Event:
        return self.events[request_id, index][-1]

    @property
    def traces(self) -> list[RequestTrace]:
        """Of every choice that has ended."""
        return [events[-1].trace for events in self.events.values() if events[-1].trace]


def engine(
    model: Any = None,
    *,
    blocks: int = 200,
    length: int = 100,
    causal: bool = True,
    cache: CacheOptions | None = None,
    costs: StepCosts | None = None,
    slots: int | None = None,
    options: dict[str, Any] | None = None,
    **limits: Any,
) -> Engine:
    """An engine over `model`; `options` are the engine's own, `limits` the scheduler's."""
    rules = SchedulerLimits(
        max_model_len=length,
        causal=causal,
        **(dict(max_num_seqs=4, max_num_batched_tokens=16, max_waiting=100) | limits),
    )
    memory = Allocation(
        GROUPS,
        [blocks] * 2,
        BLOCK,
        num_slots=slots or rules.max_num_seqs + 1,
        max_step_len=rules.max_num_batched_tokens,
        trims=causal,
        cache=cache,
    )
    scheduler = Scheduler(rules, memory, costs=costs)
    return Engine(model or HashModel(), scheduler, vocab_size=VOCAB, max_model_len=length, **(options or {}))


def request(
    name: str, prompt: Sequence[int], stops: frozenset[int] = frozenset(), *, more: Any = None, **params: Any
) -> Request:
    """A request; `more`: fields other than the sampling parameters."""
    settings = dict(max_tokens=5, temperature=0.0, top_p=1.0, top_k=0, seed=0) | params
    return Request(name, tuple(prompt), SamplingParams(**settings), stops, **(more or {}))


def finish(e: Engine) -> None:
    """Step until nothing is left; everything must be free or cached then."""
    while e.step():
        e.scheduler.check()
    assert not e.open_requests
    assert not e.has_work
    stats = e.stats()
    assert stats["num_free_blocks"] + stats["num_cached_blocks"] == stats["num_blocks"]
    assert stats["num_free_slots"] + stats["num_snapshots"] == stats["num_slots"]


def prompts(number: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCAB) for _ in range(rng.randrange(1, 50))] for _ in range(number)]
