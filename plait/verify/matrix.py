"""The matrix of `plait verify`: ways to run the same requests that must not change a reply.

And the substitutes for parts of an engine that some of them need: steps that fail, costs, draft tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from plait.config import GIB
from plait.engine.core import Engine
from plait.errors import EngineError
from plait.schedule.costs import StepCosts
from plait.schedule.drafts.turns import DraftRequest
from plait.schedule.plan import Sampled, SamplingBatch, StepPlan, Ticket

FEW = 7  # tokens: a prompt's chunk that is no multiple of anything
SHORT = 2  # how many prompts are computed one token at a time
FAILS_EVERY = 5  # steps, where steps fail on purpose
WRONG_EVERY = 4  # tokens, of drafts that are often right
OFTEN, SELDOM = 5, 23  # steps between two restarts
THREADS = (1, 2, 3)
MANY = 500  # blocks: enough for all prompts, so that slots alone are few


@dataclass(frozen=True, slots=True)
class Cell:
    """One way to run the requests.

    `options`: what differs in EngineConfig from a plain run, where each sequence runs alone with its prompt
    in one chunk, no cache and no drafts. `waves`: requests that arrive together; 1 is the first turn of every
    conversation, 2 its second. `only`: that many shortest prompts. `spared`: memory for the longest sequence
    and for no more than so many blocks in addition. `swaps`: moving memory counts as cheap, so that preempted
    sequences are swapped and not computed again. `fails`: some steps fail after they ran. `drafts`: the
    proposer of drafts: prompt lookup, a head, a draft model, or one with the plain replies,
    which is often right and often wrong.
    `unseen`: replies are not streamed, so that steps may share a plan. `tokens_only`: without
    log-probabilities, so that a step may be launched before the last one's tokens are known.
    `disk`: with a disk cache, and each wave in an engine of its own over the same files. `restarts`: after
    that many steps the engine is dropped, and the replies go on in another. `threads`: how many compute it,
    over weights that are loaded for them. `kills`: in a process, which is killed in each wave.
    `is_quick`: `plait verify --quick` runs it.
    `proof`: a number of `Ran.counts` that is above zero if the cell's effect has happened.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    waves: tuple[int, ...] = (1,)
    only: int | None = None
    spared: int | None = None
    swaps: bool = False
    fails: bool = False
    drafts: Literal["ngram", "known", "mtp", "model"] | None = None
    unseen: bool = False
    tokens_only: bool = False
    disk: bool = False
    restarts: int = 0
    threads: int | None = None
    kills: bool = False
    is_quick: bool = False
    proof: str | None = None

    @property
    def word(self) -> str:
        """The name as one word, for a command line."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")

    @property
    def batch(self) -> int:
        """How many sequences run at the same time."""
        return int(self.options.get("max_num_seqs", 1))


PLAIN = Cell("alone, each prompt in one chunk", waves=(1, 2))


def cells(
    batch: int,
    block_size: int,
    *,
    causal: bool = True,
    follows: bool = True,
    ahead: bool = False,
    head: str | None = None,
) -> Iterator[Cell]:
    """The matrix for batches of up to `batch`. `follows`: whether several decode steps can share a plan;
    `ahead`: whether a step can be launched before the last one's tokens are known; `head`: what is called the
    head that drafts, the model's own or one in files of its own, if there is one.

    A model that is not causal computes a sequence in one chunk and caches nothing: only batches are left.
    """
    yield Cell("alone, once more")
    sizes = range(2, batch + 1)
    yield from (Cell(f"batch of {n}", {"max_num_seqs": n}, is_quick=n == batch) for n in sizes)
    if not causal:
        return
    yield from _cut(batch, block_size)
    yield from _prefix_cache_cells(batch, block_size)
    yield from _eviction_cells(batch, block_size)
    yield from _draft_cells(batch, block_size)
    if head:
        yield from _head_cells(head, batch, block_size)
    if follows:
        yield Cell("several steps at once", unseen=True, proof="steps_ahead")
        together = {"max_num_seqs": batch, "prefix_cache": True}
        name = "several steps at once, together"
        yield Cell(name, together, (1, 2), unseen=True, is_quick=True, proof="steps_ahead")
    if ahead:
        yield from _ahead_cells(batch, block_size)
    keeps = {"prefix_cache": True, "snapshot_interval": block_size, "swap_memory": GIB}
    chunks = {"max_num_seqs": batch, "max_num_batched_tokens": max(block_size + 1, batch)}
    waves = (1, 1, 2)
    yield Cell(
        "all of it at once", keeps | chunks, waves, spared=1, swaps=True, drafts="known", is_quick=True
    )


def fit_to_canvas(cells: Iterable[Cell], passes: int) -> Iterator[Cell]:
    """What is left of cells for canvases of so many passes: nothing drafts, and a canvas is done before an
    engine is dropped."""
    for cell in cells:
        if cell.proof not in ("drafted", "accepted"):
            yield replace(cell, drafts=None, restarts=cell.restarts * passes)


def durable_cells(batch: int, block_size: int, *, has_slots: bool) -> Iterator[Cell]:
    """Caches outside of memory, and engines that begin again, all in this process.

    `has_slots`: some state is recurrent, so there are snapshots, which host memory keeps.
    """
    keeps: dict[str, object] = {"prefix_cache": True, "snapshot_interval": block_size}
    together = keeps | {"max_num_seqs": batch}
    if has_slots:
        name = "snapshots in host memory"
        swap = keeps | {"swap_memory": GIB}
        yield Cell(name, swap, (1, 1, 2), spared=MANY, is_quick=True, proof="host_hits")
    yield Cell("disk cache, after a restart", keeps, (1, 2), disk=True, is_quick=True, proof="disk_reads")
    name = "disk cache, together, hot"
    yield Cell(name, together, (1, 1, 2), disk=True, proof="disk_reads")
    name = "disk cache, together, little memory"
    yield Cell(name, together, (1, 1, 2), spared=1, disk=True, proof="disk_reads")
    cut = together | {"max_num_batched_tokens": max(block_size + 1, batch)}
    yield Cell("disk cache, together, in chunks", cut, (1, 2), disk=True, proof="disk_reads")
    yield Cell("restarts, alone", restarts=OFTEN, proof="restarts")
    name = "restarts, together"
    yield Cell(name, {"max_num_seqs": batch}, (1, 2), restarts=OFTEN, is_quick=True, proof="restarts")
    name = "restarts, with a disk cache"
    yield Cell(name, together, (1, 2), disk=True, restarts=SELDOM, proof="disk_reads")
    name = "restarts, with drafts"
    yield Cell(name, {"max_num_seqs": batch}, restarts=OFTEN, drafts="known", proof="accepted")


def second_load_cells(batch: int, block_size: int, *, drafts: bool) -> Iterator[Cell]:
    """Cells with a draft model, where there is one, and those that load the model again."""
    together: dict[str, object] = {"max_num_seqs": batch}
    keeps = together | {"prefix_cache": True, "snapshot_interval": block_size}
    if drafts:
        yield Cell("a draft model, alone", drafts="model", proof="drafted")
        yield Cell("a draft model, together", keeps, (1, 2), drafts="model", proof="drafted")
    for n in THREADS:
        yield Cell(f"{n} threads, alone", threads=n)
        yield Cell(f"{n} threads, together", keeps, (1, 2), threads=n)
    yield Cell("killed in mid-reply", together, (1,), kills=True, proof="kills")
    yield Cell("killed, with a disk cache", keeps, (1, 2), kills=True, disk=True, proof="disk_reads")


def _cut(batch: int, block_size: int) -> Iterator[Cell]:
    for size in sorted({1, FEW, block_size - 1, block_size, block_size + 1} - {0}):
        only = SHORT if size == 1 else None
        yield Cell(f"chunks of {size}", {"max_num_batched_tokens": size}, only=only)
    size = max(FEW, batch)
    together = {"max_num_seqs": batch, "max_num_batched_tokens": size}
    yield Cell(f"batch of {batch}, steps of {size} tokens", together, is_quick=True)


def _prefix_cache_cells(batch: int, block_size: int) -> Iterator[Cell]:
    """Cells of the prefix cache: empty at first, then full; and conversations that go on."""
    keeps = {"prefix_cache": True, "snapshot_interval": block_size}
    yield Cell("prefix cache, cold then hot", keeps, (1, 1), proof="hit_tokens")
    name = "prefix cache, longer conversation"
    yield Cell(name, keeps, (1, 2), is_quick=True, proof="hit_tokens")
    together = keeps | {"max_num_seqs": batch}
    yield Cell("prefix cache, together", together, (1, 1, 2), proof="hit_tokens")
    cut = together | {"max_num_batched_tokens": max(FEW, batch)}
    yield Cell("prefix cache, together, in chunks", cut, (1, 2), proof="hit_tokens")


def _eviction_cells(batch: int, block_size: int) -> Iterator[Cell]:
    """Cells with memory for little more than one sequence, and with steps that fail."""
    seqs = {"max_num_seqs": batch}
    keeps = {"prefix_cache": True, "snapshot_interval": block_size}
    again = seqs | {"swap_memory": 0}
    yield Cell("preempted, computed again", again, spared=1, proof="preemptions")
    name = "preempted, with a prefix cache"
    yield Cell(name, again | keeps, spared=1, is_quick=True, proof="preemptions")
    swap = seqs | {"swap_memory": GIB}
    yield Cell("preempted, swapped out and in", swap, spared=1, swaps=True, proof="swaps")
    yield Cell("steps that fail", seqs | keeps, fails=True, proof="failed_steps")


def _draft_cells(batch: int, block_size: int) -> Iterator[Cell]:
    yield Cell("prompt lookup, alone", drafts="ngram", proof="drafted")
    yield Cell("right and wrong drafts, alone", drafts="known", proof="accepted")
    together = {"max_num_seqs": batch}
    name = "right and wrong drafts, together"
    yield Cell(name, together, drafts="known", is_quick=True, proof="accepted")
    keeps = together | {"prefix_cache": True, "snapshot_interval": block_size}
    yield Cell("prompt lookup, with a prefix cache", keeps, (1, 2), drafts="ngram", proof="drafted")


def _head_cells(head: str, batch: int, block_size: int) -> Iterator[Cell]:
    """Cells in which a head of that name drafts, wherever it can."""
    yield Cell(f"{head}, alone", drafts="mtp", proof="drafted")
    together = {"max_num_seqs": batch}
    keeps = together | {"prefix_cache": True, "snapshot_interval": block_size}
    name = f"{head}, with a prefix cache"
    yield Cell(name, keeps, (1, 1, 2), drafts="mtp", is_quick=True, proof="drafted")
    yield Cell(f"{head}, preempted", together, spared=1, drafts="mtp", proof="preemptions")
    yield Cell(f"{head}, steps that fail", keeps, fails=True, drafts="mtp", proof="drafted")


def _ahead_cells(batch: int, block_size: int) -> Iterator[Cell]:
    """Cells in which the next step is launched before the last one's tokens are known."""
    yield Cell("launched ahead, alone", tokens_only=True, proof="launched_ahead")
    together = {"max_num_seqs": batch, "prefix_cache": True, "snapshot_interval": block_size}
    name = "launched ahead, together"
    yield Cell(name, together, (1, 2), tokens_only=True, is_quick=True, proof="launched_ahead")
    name = "launched ahead, steps that fail"
    yield Cell(name, together, tokens_only=True, fails=True, proof="failed_steps")


class FailingRunner:
    """A runner with failures: of the steps that several requests share, one in a few fails after it ran."""

    def __init__(self, engine: Engine) -> None:
        self._engine, self._runner, self._num_shared, self.num_failed = engine, engine.runner, 0, 0

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        ticket = self._runner.launch(plan, sampling)
        is_shared = len(self._engine.requests_in(plan)) > 1
        self._num_shared += is_shared
        if is_shared and self._num_shared % FAILS_EVERY == 0:
            self.num_failed += 1
            return FailingTicket(ticket)
        return ticket


@dataclass(frozen=True, slots=True)
class FailingTicket:
    """A step that runs, and then fails on purpose."""

    ticket: Ticket

    @property
    def can_be_followed(self) -> bool:
        return self.ticket.can_be_followed

    def wait(self) -> list[Sampled]:
        """Raises EngineError, behind the step."""
        self.ticket.wait()
        raise EngineError("this step fails on purpose")


class CheapMoves(StepCosts):
    """Moving memory costs nothing, so it always pays."""

    def move_s(self, nbytes: int) -> float | None:
        return 0.0


class CheapRows(StepCosts):
    """Every step takes as long as any other, so speculation always pays."""

    def step_s(self, num_tokens: float) -> float | None:
        return 1.0


class CheapSteps(StepCosts):
    """A step takes no time, so that there is time for several at once."""

    def step_s(self, num_tokens: float) -> float | None:
        return 1e-6


class SlowSteps(StepCosts):
    """A step takes a minute, so that prompts wait for the disk."""

    def step_s(self, num_tokens: float) -> float | None:
        return 60.0


class KnownReplies:
    """Proposes the tokens of the plain replies, now and then with a wrong one (a `Proposer`)."""

    def __init__(self, sequences: Sequence[Sequence[int]], vocab_size: int) -> None:
        self._sequences, self._vocab_size = [list(ids) for ids in sequences], vocab_size

    def propose(self, wanted: Sequence[DraftRequest]) -> Mapping[int, tuple[int, ...]]:
        return {one.seq_id: self._draft(list(one.token_ids), one.limit) for one in wanted}

    def forget(self, seq_id: int) -> None:
        """Nothing to forget: it has no state of a sequence."""

    def _draft(self, token_ids: list[int], limit: int) -> tuple[int, ...]:
        start = len(token_ids)
        known = next((ids for ids in self._sequences if ids[:start] == token_ids), [])
        ahead = range(start, min(start + limit, len(known)))
        return tuple((known[i] + (i % WRONG_EVERY == 0)) % self._vocab_size for i in ahead)


def count_effects(engine: Engine) -> dict[str, int]:
    """What happened in an engine, by the names that `Cell.proof` has."""
    stats, hits = engine.stats(), engine.scheduler.cache_counts
    return {
        "steps": stats["num_steps"],
        "steps_ahead": engine.metrics.num_steps_ahead,
        "launched_ahead": engine.num_ahead,
        "preemptions": stats["num_preemptions"],
        "swaps": stats["num_swaps"],
        "hit_tokens": hits.get("hit_tokens", 0),
        "asked_tokens": hits.get("asked_tokens", 0),
        "host_hits": engine.scheduler.memory.pools.num_host_hits,
    }
