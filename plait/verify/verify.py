"""Check determinism: run the same requests under many settings of the engine, and compare token by token.

The weights are loaded once; every cell of the matrix gets a scheduler, a store and a runner of its own over
the same decoder. It must agree with the plain run: a sequence alone, its prompt in one chunk, no cache, no
drafts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.device import free_memory
from plait.engine.memory_plan import Sizing, size_state
from plait.errors import EngineError
from plait.loading.build import Loaded, describe_for_sizing, engine_over, loose_ops
from plait.loading.draft_model import find_head
from plait.memory import PagedState, has_slots
from plait.request import Event, TokenLogprobs
from plait.schedule.speculate import Proposer
from plait.verify.drafters import make_proposer, speculate_always
from plait.verify.matrix import (
    PLAIN,
    Cell,
    CheapMoves,
    CheapSteps,
    FailingRunner,
    cells,
    count_effects,
)
from plait.verify.prompts import (
    Prompt,
    VerifyRequest,
    ask_tokens_only,
    default_prompts,
    first_turns,
    second_turns,
)
from plait.verify.samplers import most_together, sampler_cells, sampler_waves
from plait.verify.trace import (
    Digests,
    FirstDifference,
    OneRow,
    Parting,
    Trace,
    TracedRunner,
    place_of,
    watch_ops,
)

Value = TypeVar("Value")
# Differences that are followed down to an op, of tokens and of rounding each: it runs a cell again, slowly.
MOST_TRACED = 2
SPARED = (0, 2, 3, 4)  # blocks in addition to the longest sequence's, tried until one is preempted or evicted


@dataclass(slots=True)
class VerifyReply:
    """The reply to one request: its tokens and their log-probabilities."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    error: Exception | None = None

    def on_event(self, event: Event) -> None:
        self.token_ids += event.token_ids
        self.logprobs += event.logprobs or ()
        self.error = event.error or self.error


@dataclass(frozen=True, slots=True)
class Ran:
    """A cell that has run: replies by (number of the wave, request), and what happened meanwhile."""

    replies: Mapping[tuple[int, str], VerifyReply]
    counts: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Difference:
    """The first token of a reply that differs from the plain run, in itself or in its log-probability.

    `index`: in the reply; `position`: in the sequence. `gap`: between the two best log-probabilities of the
    plain run there, which is the gap between their logits. `place`: the first op with numbers that diverge;
    without one `note` says why.
    """

    cell: str
    request: str
    wave: int
    index: int
    position: int
    expected: int | None
    found: int | None
    gap: float | None = None
    off_by: float | None = None  # the log-probabilities of the same token, or of its alternatives
    place: FirstDifference | None = None
    note: str = ""

    @property
    def is_token(self) -> bool:
        return self.expected != self.found


@dataclass(frozen=True, slots=True)
class CellResult:
    """One cell compared. `proof`: the count that must not be zero for it to show anything (`Cell.proof`)."""

    cell: str
    num_replies: int
    num_tokens: int
    differences: tuple[Difference, ...]
    counts: Mapping[str, int]
    proof: str | None = None

    @property
    def happened(self) -> bool:
        """Whether the effect that the cell tests came about."""
        return self.proof is None or bool(self.counts.get(self.proof))

    @property
    def num_different(self) -> int:
        """How many replies have another token."""
        return sum(d.is_token for d in self.differences)

    @property
    def num_rounded(self) -> int:
        """How many replies have the same tokens, but log-probabilities that differ in some bit."""
        return len(self.differences) - self.num_different


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """The device and the formats of a run. `loose`: ops with rounding that may depend on the batch."""

    device: str
    dtype: str
    kv_dtype: str
    step: str
    loose: Mapping[str, str]
    state_dtype: str = "float32"

    @property
    def is_promised(self) -> bool:
        """Whether Plait promises the same bits for every cell."""
        return not self.loose


class Verification:
    """The matrix over one loaded model. `prompts` None: Plait's own. Iterate over `results()`.

    `is_quick`: one cell of each kind.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        batch: int,
        max_tokens: int,
        prompts: Sequence[Prompt] | None = None,
        is_quick: bool = False,
    ) -> None:
        self.loaded, self.batch, self._is_quick = loaded, batch, is_quick
        self._head = find_head(loaded.opened, loaded.target, loaded.runner.decoder)
        self._num_traced, front = {True: 0, False: 0}, loaded.front
        prompts = prompts or default_prompts(front, max_tokens)
        first = first_turns(front, prompts, max_tokens, batch)
        self.asked = {asked.name: asked for asked in first}
        plain = self._ran(PLAIN, [first])
        replies = {name: reply for (_, name), reply in plain.replies.items()}
        second = second_turns(first, [replies[a.name].token_ids for a in first], front.max_model_len)
        for wave in filter(None, (second, *sampler_waves(front, prompts, max_tokens))):
            self.asked |= {asked.name: asked for asked in wave}
            replies |= {name: r for (_, name), r in self._ran(PLAIN, [wave]).replies.items()}
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
        follows = self.loaded.runner.is_recorded and not has_slots(decoder.states)
        ahead, size = self.loaded.target.graphs is not None, self.loaded.config.block_size
        kinds = {
            "causal": decoder.spec.causal,
            "follows": follows,
            "ahead": ahead,
            "mtp": self._head is not None,
        }
        found = [*cells(self.batch, size, **kinds), *sampler_cells(self.batch, size, self.asked.values())]
        return [cell for cell in found if cell.is_quick or not self._is_quick]

    def results(self) -> Iterator[CellResult]:
        """Every cell, as it is done."""
        for planned in self.cells:
            cell, ran = self._shown(planned)
            found = [self._difference(cell, *key, reply) for key, reply in ran.replies.items()]
            differences = [self._followed(cell, d) for d in found if d]
            yield CellResult(
                cell.name,
                num_replies=len(ran.replies),
                num_tokens=sum(len(reply.token_ids) for reply in ran.replies.values()),
                differences=tuple(differences),
                counts=ran.counts,
                proof=cell.proof,
            )

    def _shown(self, cell: Cell) -> tuple[Cell, Ran]:
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

    def _ran(self, cell: Cell, waves: Sequence[Sequence[VerifyRequest]], trace: Traced | None = None) -> Ran:
        """Run a cell. With a trace it runs op by op, and the trace observes one request of it."""
        config, sizing = self._settings(cell, waves)
        runner, sampler = self.loaded.runner, self.loaded.runner.sampler
        target, decoder = self.loaded.target, runner.decoder
        drafter = self._drafter(cell, config, sizing)
        parts = (decoder, sampler, target, config, sizing)
        _, engine = engine_over(*parts, records=trace is None, proposer=drafter)
        if cell.swaps:
            engine.scheduler.costs = CheapMoves()
        if cell.unseen:
            engine.scheduler.costs = CheapSteps()
        if cell.unseen or cell.tokens_only:
            waves = [[ask_tokens_only(asked, is_watched=not cell.unseen) for asked in wave] for wave in waves]
        engine.speculation = drafts = speculate_always(drafter, self.loaded) if drafter else None
        failing = FailingRunner(engine) if cell.fails else None
        engine.runner = failing or engine.runner
        if trace is None:
            replies = _drive(engine, waves)
        else:
            engine.runner = TracedRunner(engine.runner, trace.trace)
            with watch_ops(decoder, trace.trace.watch):
                replies = _drive(engine, waves, trace)
        counts = count_effects(engine) | {"failed_steps": failing.num_failed if failing else 0}
        if drafts:
            counts |= {"drafted": drafts.num_drafted, "accepted": drafts.num_accepted}
        return Ran(replies, counts)

    def _drafter(self, cell: Cell, config: EngineConfig, sizing: Sizing) -> Proposer | None:
        prompts = {name: asked.request.prompt_token_ids for name, asked in self.asked.items()}
        known = [(*prompts[n], *r.token_ids) for n, r in self.plain.items()] if cell.drafts == "known" else []
        return make_proposer(cell, self.loaded, self._head, config, sizing.max_model_len, known)

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
                replace(g, num_blocks=min(g.num_blocks, one.num_blocks + cell.spared)) for g, one in groups
            ]
            sizing = replace(sizing, groups=tuple(spared))
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

    def _followed(self, cell: Cell, found: Difference) -> Difference:
        """Add the op at which the numbers diverge, for the first differences of a run."""
        if self._num_traced[found.is_token] >= MOST_TRACED or found.found is None:
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


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace and the request that it observes, of one wave."""

    trace: Trace
    wave: int
    name: str


def _drive(
    engine: Engine, waves: Sequence[Sequence[VerifyRequest]], traced: Traced | None = None
) -> dict[tuple[int, str], VerifyReply]:
    """Submit each wave at once and run it to its end."""
    replies: dict[tuple[int, str], VerifyReply] = {}
    for number, wave in enumerate(waves):
        for asked in wave:
            reply = replies[number, asked.name] = VerifyReply()
            request = replace(asked.request, id=f"{number}: {asked.name}")
            engine.submit(request, reply.on_event)
            if traced and (number, asked.name) == (traced.wave, traced.name):
                ids = [seq.id for seq in engine.scheduler.waiting if seq.request_id == request.id]
                traced.trace.seq_id = ids[0]
        while engine.step():
            pass
        if engine.open_requests:
            raise EngineError(f"the engine stopped before {engine.open_requests[0]!r} had ended")
        engine.scheduler.check()
    return replies


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
