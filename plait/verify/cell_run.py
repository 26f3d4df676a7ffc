"""Run one cell of `plait verify`: its engines, one after the other, over weights that are loaded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path

from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.memory_plan import Sizing
from plait.engine.thread import end_requests
from plait.errors import EngineError
from plait.loading.build import Loaded, engine_over
from plait.loading.disk_cache import open_disk_cache
from plait.loading.identity.fingerprint import fingerprint
from plait.request import Request
from plait.schedule.speculate import Proposer
from plait.state.disk.cache import DiskCache
from plait.verify.drafters import speculate_always
from plait.verify.matrix import Cell, CheapMoves, CheapSteps, FailingRunner, SlowSteps, count_effects
from plait.verify.prompts import VerifyRequest, ask_tokens_only
from plait.verify.results import Ran, VerifyReply
from plait.verify.trace import Trace, TracedRunner, watch_ops

Waves = Sequence[Sequence[VerifyRequest]]


@dataclass(frozen=True, slots=True)
class Traced:
    """A trace and the request that it observes, of one wave."""

    trace: Trace
    wave: int
    name: str


@dataclass(slots=True)
class CellRun:
    """A cell over a loaded model. `make_drafter`: its proposer of draft tokens, one for each engine.

    `folder`: of its disk cache, if the cell has one. `traced`: it runs op by op, and the trace observes one
    request of it.
    """

    cell: Cell
    loaded: Loaded
    config: EngineConfig
    sizing: Sizing
    make_drafter: Callable[[], Proposer | None]
    folder: Path | None = None
    traced: Traced | None = None
    replies: dict[tuple[int, str], VerifyReply] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    _engine: Engine | None = None
    _failing: FailingRunner | None = None
    _disk: DiskCache | None = None

    def run(self, waves: Waves) -> Ran:
        """Submit each wave at once and run it to its end, and the next one after it."""
        cell, decoder = self.cell, self.loaded.runner.decoder
        if cell.unseen or cell.tokens_only:
            waves = [[ask_tokens_only(asked, is_watched=not cell.unseen) for asked in wave] for wave in waves]
        try:
            with watch_ops(decoder, self.traced.trace.watch) if self.traced else nullcontext():
                for number, wave in enumerate(waves):
                    if number and cell.disk:
                        self._stop()
                    self._run_wave(number, wave)
        finally:
            self._stop()
        return Ran(self.replies, dict(self.counts))

    def _run_wave(self, number: int, wave: Sequence[VerifyRequest]) -> None:
        engine, num_steps = self._engine or self._start(), 0
        for asked in wave:
            self.replies[number, asked.name] = VerifyReply()
            self._submit(engine, number, asked)
        while engine.has_work:
            engine.step_or_wait()
            num_steps += 1
            if self.cell.restarts and num_steps % self.cell.restarts == 0:
                left = [asked for asked in wave if not self.replies[number, asked.name].is_done]
                self._stop(is_dropped=True)
                engine = self._start()
                self.counts["restarts"] += bool(left)
                for asked in left:
                    self._submit(engine, number, asked)
        if engine.open_requests:
            raise EngineError(f"the engine stopped before {engine.open_requests[0]!r} had ended")
        engine.scheduler.check()

    def _submit(self, engine: Engine, number: int, asked: VerifyRequest) -> None:
        reply = self.replies[number, asked.name]
        request = resume_request(replace(asked.request, id=f"{number}: {asked.name}"), reply)
        engine.submit(request, reply.on_event)
        if self.traced and (number, asked.name) == (self.traced.wave, self.traced.name):
            ids = [seq.id for seq in engine.scheduler.waiting if seq.request_id == request.id]
            self.traced.trace.seq_id = ids[0]

    def _start(self) -> Engine:
        """An engine with what the cell replaces in it."""
        cell, loaded = self.cell, self.loaded
        drafter = self.make_drafter()
        parts = (loaded.runner.decoder, loaded.runner.sampler, loaded.target, self.config, self.sizing)
        runner, engine = engine_over(*parts, records=self.traced is None, proposer=drafter)
        if cell.swaps:
            engine.scheduler.costs = CheapMoves()
        if cell.unseen:
            engine.scheduler.costs = CheapSteps()
        if cell.disk:
            engine.scheduler.costs = SlowSteps()
            config = replace(self.config, cache_disk=str(self.folder))
            known = fingerprint(loaded.opened, loaded.target)
            self._disk = open_disk_cache(config, engine, runner.store.host, runner.decoder.states, known)
        engine.speculation = speculate_always(drafter, loaded) if drafter else None
        self._failing = FailingRunner(engine) if cell.fails else None
        engine.runner = self._failing or engine.runner
        if self.traced:
            engine.runner = TracedRunner(engine.runner, self.traced.trace)
        self._engine = engine
        return engine

    def _stop(self, *, is_dropped: bool = False) -> None:
        """Count what happened in the engine, and end it. `is_dropped`: in the middle, as it is."""
        if (engine := self._engine) is None:
            return
        self.counts.update(count_effects(engine))
        self.counts["failed_steps"] += self._failing.num_failed if self._failing else 0
        if drafts := engine.speculation:
            self.counts.update({"drafted": drafts.num_drafted, "accepted": drafts.num_accepted})
        if self._disk:
            if not is_dropped:
                end_requests(engine)
            self._disk.close()
            self.counts["disk_reads"] += self._disk.counts["read"]
        self._engine = self._disk = None


def resume_request(request: Request, reply: VerifyReply) -> Request:
    """A request for the tokens that a reply does not have yet, as another engine gets it."""
    return replace(request, resumed=(tuple(reply.token_ids),)) if reply.token_ids else request
