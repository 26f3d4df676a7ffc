"""Check determinism: run the same requests under many settings of the engine, and compare token by token.

The weights are loaded once; every cell of the matrix gets a scheduler, a store and a runner of its own over
the same decoder. It must agree with the plain run: a sequence alone, its prompt in one chunk, no cache, no
drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

from msgspec import structs

from plait.config import EngineConfig
from plait.engine.device import free_memory
from plait.engine.memory_plan import Sizing, fit_canvas, size_state
from plait.errors import ConfigError, EngineError
from plait.loading.build import Loaded, describe_for_sizing, load
from plait.loading.make_engine import choose_canvas
from plait.loading.open_model import Opened
from plait.loading.target import loose_ops
from plait.memory import PagedState, has_slots
from plait.request import TokenLogprobs
from plait.schedule.speculate import Proposer
from plait.verify.cell_run import CellRun, Traced, Waves
from plait.verify.drafters import DraftParts, describe_head, find_loaded_head, make_proposer
from plait.verify.killed import run_killed
from plait.verify.matrix import PLAIN, Cell, cells, durable_cells, fit_to_canvas, second_load_cells
from plait.verify.prompts import (
    Prompt,
    VerifyRequest,
    default_prompts,
    first_turns,
    make_short_prompts,
    second_turns,
)
from plait.verify.results import Arithmetic, CellResult, Difference, Ran, VerifyReply, digest_replies
from plait.verify.samplers import most_together, sampler_cells, sampler_waves
from plait.verify.trace import Digests, OneRow, Parting, Trace, place_of

Value = TypeVar("Value")
# Differences that are followed down to an op, of tokens and of rounding each: it runs a cell again, slowly.
MOST_TRACED = 2
SPARED = (0, 2, 3, 4)  # blocks in addition to the longest sequence's, tried until one is preempted or evicted


@dataclass(frozen=True, slots=True)
class Extent:
    """Which cells are run. `is_quick`: one of each kind. `only`: one, by its name or word.

    `model`: what `load` loads; with it there are cells that load it again, for other threads and in
    processes. `draft`: a draft model of the same vocabulary. `is_small`: steps take long, as in an
    interpreter, so there are fewer prompts, samplers of the device alone, and no cells of the host's memory.
    """

    is_quick: bool = False
    only: str | None = None
    model: str | None = None
    draft: Opened | None = None
    is_small: bool = False


USUAL_EXTENT = Extent()


class Verification:
    """The matrix over one loaded model. `prompts` None: Plait's own. Iterate over `results()`.

    Raises ConfigError if there is no cell in the extent, and EngineError if a request fails alone.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        batch: int,
        max_tokens: int,
        prompts: Sequence[Prompt] | None = None,
        extent: Extent = USUAL_EXTENT,
    ) -> None:
        self.loaded, self.batch, self.extent = loaded, batch, extent
        self._head = find_loaded_head(loaded)
        self._num_traced, front = {True: 0, False: 0}, loaded.front
        if not prompts and extent.is_small:
            prompts = make_short_prompts(front.spec.vocab_size)
        prompts = prompts or default_prompts(front, max_tokens)
        first = first_turns(front, prompts, max_tokens, batch)
        self.asked = {asked.name: asked for asked in first}
        plain = self._ran(PLAIN, [first])
        replies = {name: reply for (_, name), reply in plain.replies.items()}
        second = second_turns(first, [replies[a.name].token_ids for a in first], front.max_model_len)
        samplers = sampler_waves(front, prompts, max_tokens, is_small=extent.is_small)
        for wave in filter(None, (second, *samplers)):
            self.asked |= {asked.name: asked for asked in wave}
            replies |= {name: r for (_, name), r in self._ran(PLAIN, [wave]).replies.items()}
        if not self.cells:
            raise ConfigError(f"--cell {extent.only}: it has no such cell; without --cell the table has all")
        for name, reply in replies.items():
            if reply.error:
                raise EngineError(f"{name}, alone: {reply.error}") from reply.error
        self.plain = replies

    @property
    def arithmetic(self) -> Arithmetic:
        target = self.loaded.target
        return Arithmetic(
            device=target.device.type,
            dtype=str(target.dtype).removeprefix("torch."),
            kv_dtype=target.kv_dtype,
            state_dtype=target.state_dtype,
            step=self.loaded.runner.step_kind,
            loose=loose_ops(target),
        )

    @property
    def cells(self) -> list[Cell]:
        decoder = self.loaded.runner.decoder
        size, canvas = self.loaded.config.block_size, choose_canvas(decoder.spec.canvas, self.loaded.config)
        plain = cells(
            self.batch,
            size,
            causal=decoder.spec.causal,
            follows=self.loaded.runner.is_recorded and not (has_slots(decoder.states) or canvas),
            ahead=self.loaded.target.graphs is not None and not canvas,
            head=None if self._head is None else describe_head(self.loaded),
        )
        found = [*plain, *sampler_cells(self.batch, size, self.asked.values())]
        has_host = self.loaded.runner.store.host is not None and not self.extent.is_small
        if decoder.spec.causal and has_host:
            found += durable_cells(self.batch, size, has_slots=has_slots(decoder.states))
        if decoder.spec.causal and self.extent.model is not None:
            found += second_load_cells(self.batch, size, drafts=self.extent.draft is not None)
        found = [*fit_to_canvas(found, canvas.most_passes)] if canvas else found
        if (only := self.extent.only) is not None:
            return [cell for cell in found if only in (cell.name, cell.word)]
        return [cell for cell in found if cell.is_quick or not self.extent.is_quick]

    def results(self) -> Iterator[CellResult]:
        """Every cell, as it is done."""
        return map(self.result, self.cells)

    def result(self, planned: Cell) -> CellResult:
        """Run one cell, and compare it."""
        cell, ran = self._run_small(planned)
        found = [self._difference(cell, *key, reply) for key, reply in ran.replies.items()]
        differences = [self._follow(cell, d) for d in found if d]
        return CellResult(
            cell.name,
            num_replies=len(ran.replies),
            num_tokens=sum(len(reply.token_ids) for reply in ran.replies.values()),
            differences=tuple(differences),
            counts=ran.counts,
            proof=cell.proof,
            digest=digest_replies(ran.replies),
        )

    def _run_small(self, cell: Cell) -> tuple[Cell, Ran]:
        """Run a cell with so little memory that it shows something; how little depends on the prompts."""
        waves = self._waves(cell)
        ran = self._ran(cell, waves)
        states = self.loaded.runner.decoder.states.values()
        if cell.spared is None or not any(isinstance(s, PagedState) and s.window is None for s in states):
            return cell, ran
        for spared in SPARED:
            if cell.proof is None or ran.counts.get(cell.proof):
                break
            cell = replace(cell, spared=spared)
            ran = self._ran(cell, waves)
        return cell, ran

    def _waves(self, cell: Cell) -> list[list[VerifyRequest]]:
        """The requests of each wave; a wave of second turns may be empty."""
        found = []
        for turn in cell.waves:
            wave = [asked for asked in self.asked.values() if asked.turn == turn]
            if cell.only is not None:
                lengths = sorted({asked.prompt_len for asked in wave})[: cell.only]
                wave = [asked for asked in wave if asked.prompt_len in lengths]
            found.append(wave)
        return [wave for wave in found if wave]

    def _ran(self, cell: Cell, waves: Waves, traced: Traced | None = None) -> Ran:
        """Run a cell. With a trace it runs op by op, and the trace observes one request of it."""
        config, sizing = self._settings(cell, waves)
        with TemporaryDirectory(prefix="plait-verify-") as folder, self._load_for(cell) as loaded:
            if cell.kills:
                return run_killed(cell, self._named, config, waves, Path(folder))
            make = partial(self._drafter, cell, config, sizing)
            return CellRun(cell, loaded, config, sizing, make, Path(folder), traced).run(waves)

    @contextmanager
    def _load_for(self, cell: Cell) -> Iterator[Loaded]:
        """The model, or the same with other threads."""
        if cell.threads is None:
            yield self.loaded
            return
        other = load(self._named, replace(self.loaded.config, threads=cell.threads))
        try:
            yield other
        finally:
            other.front.close(drain=False)

    @property
    def _named(self) -> str:
        assert self.extent.model is not None, "a cell that loads the model again needs its name"
        return self.extent.model

    def _drafter(self, cell: Cell, config: EngineConfig, sizing: Sizing) -> Proposer | None:
        prompts = {name: asked.request.prompt_token_ids for name, asked in self.asked.items()}
        known = [(*prompts[n], *r.token_ids) for n, r in self.plain.items()] if cell.drafts == "known" else []
        parts = DraftParts(self._head, self.extent.draft, known)
        return make_proposer(cell, self.loaded, parts, config, sizing.max_model_len)

    def _settings(self, cell: Cell, waves: Sequence[Sequence[VerifyRequest]]) -> tuple[EngineConfig, Sizing]:
        """Options and memory of a cell: no longer than its own requests."""
        lengths = [a.prompt_len + (a.request.params.max_tokens or 0) for wave in waves for a in wave]
        longest = max(lengths)
        plain = {
            "max_num_batched_tokens": cell.batch * longest,
            "max_waiting": len(lengths),
            "max_model_len": longest,
            "memory_limit": None,
            "max_step_ms": 0,
            "prefix_cache": False,
            "swap_memory": 0,
            "speculate": "ngram" if cell.drafts else "off",  # memory for rows of logits
        }
        gang, options = most_together(waves), plain | dict(cell.options)
        config = replace(self.loaded.config, **options | {"max_num_seqs": max(cell.batch, gang)})
        config = fit_canvas(config, self.loaded.front.spec.canvas)
        facts = describe_for_sizing(self.loaded.runner.decoder, self.loaded.target)
        free = free_memory(self.loaded.target.device)
        sizing = size_state(facts, config, free_memory=free)
        if config.prefix_cache and cell.spared is None:  # memory for the cached blocks of all sequences
            most = max(len(waves[0]), config.max_num_seqs)
            tokens = max(most, config.max_num_batched_tokens)
            roomy = replace(config, max_num_seqs=most, max_num_batched_tokens=tokens)
            sizing = size_state(facts, roomy, free_memory=free)
        if cell.spared is not None:
            few = replace(config, max_num_seqs=gang, prefix_cache=False)
            alone = size_state(facts, few, free_memory=free)
            groups = zip(sizing.groups, alone.groups, strict=True)
            spared = [
                structs.replace(g, num_blocks=min(g.num_blocks, one.num_blocks + cell.spared))
                for g, one in groups
            ]
            sizing = structs.replace(sizing, groups=tuple(spared))
        return config, sizing

    def _difference(self, cell: Cell, wave: int, name: str, reply: VerifyReply) -> Difference | None:
        """Where a reply diverges from the plain one, if it does."""
        asked, plain = self.asked[name], self.plain[name]
        i = _first_other(plain.token_ids, reply.token_ids)
        if i is None and not (cell.unseen or cell.tokens_only):  # perhaps with other numbers behind them
            i = _first_other(plain.logprobs, reply.logprobs)
        if i is None:
            return None
        expected, found = _at(plain.token_ids, i), _at(reply.token_ids, i)
        want, got = _at(plain.logprobs, i), _at(reply.logprobs, i)
        off_by = _off_by(want, got) if want and got and expected == found else None
        note = f"the request failed: {reply.error}" if reply.error else ""
        position = asked.prompt_len + i
        return Difference(cell.name, name, wave, i, position, expected, found, _gap(want), off_by, note=note)

    def _follow(self, cell: Cell, found: Difference) -> Difference:
        """Add the op at which the numbers diverge, for the first differences of a run."""
        if self._num_traced[found.is_token] >= MOST_TRACED or found.found is None:
            return found
        if self.extent.is_small and not found.is_token:  # rounding, which interpreted kernels do not promise
            return found
        self._num_traced[found.is_token] += 1
        asked = self.asked[found.request]
        ids = (*asked.request.prompt_token_ids, *self.plain[found.request].token_ids[: found.index])
        expected = Digests()
        self._ran(PLAIN, [[asked]], Traced(Trace(ids, expected.visit), 0, asked.name))
        parting = Parting(expected)
        self._ran(cell, self._waves(cell), Traced(Trace(ids, parting.visit), found.wave, asked.name))
        if parting.first is None:
            note = (
                f"op by op, all {parting.num_compared} results that both forms compute are the same: "
                "look at the recorded step, at what was moved or kept, and at the sampler"
            )
            return replace(found, note=found.note or note)
        plain = OneRow(parting.first)
        self._ran(PLAIN, [[asked]], Traced(Trace(ids, plain.visit), 0, asked.name))
        return found if plain.row is None else replace(found, place=place_of(parting, plain.row))


def _first_other(plain: Sequence[Value], reply: Sequence[Value]) -> int | None:
    """Where two rows differ first, or one is longer."""
    length = max(len(plain), len(reply))
    return next((i for i in range(length) if _at(plain, i) != _at(reply, i)), None)


def _at(values: Sequence[Value], index: int) -> Value | None:
    return values[index] if index < len(values) else None


def _off_by(want: TokenLogprobs, got: TokenLogprobs) -> float:
    pairs = zip(want.top, got.top, strict=False)
    return max([abs(want.logprob - got.logprob), *(abs(a - b) for (_, a), (_, b) in pairs)])


def _gap(chosen: TokenLogprobs | None) -> float | None:
    return chosen.top[0][1] - chosen.top[1][1] if chosen and len(chosen.top) > 1 else None
