"""Runs plans of a step that a startup image brought: without torch, for as long as no plan needs more."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from plait.errors import EngineError
from plait.runner.host.moves import make_moves
from plait.runner.host.mtp_passes import HiddenRows
from plait.runner.host.program import ProgramReplay
from plait.schedule.plan import Done, SamplingBatch, StepPlan, Ticket
from plait.state.host_store import HostStore

Observe = Callable[[StepPlan, HiddenRows], None]


class FullRunner(Protocol):
    """Runs any plan, op by op (`runner.ModelRunner`); `observe` is shown the hidden states of its steps."""

    observe: Any

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket: ...
    def logits(self, token_ids: Sequence[int], chunk_size: int) -> object: ...
    def close(self) -> None: ...


class HostRunner:
    """Executes plans over host memory. `open_full`: runs the plans that do not fit, over the same memory.

    That one needs torch and the model's weights, and is made when the first of them comes.
    """

    is_recorded = ends_steps = True
    graphs: None = None  # those are a device's

    def __init__(
        self, replay: ProgramReplay, store: HostStore, open_full: Callable[[HostStore], FullRunner]
    ) -> None:
        self.replay, self.store, self.step_kind = replay, store, replay.describe()
        self._open_full, self._lock = open_full, threading.Lock()
        self._full: FullRunner | None = None
        self._observe: Observe | None = None

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        """Run the steps of a plan: its ticket gives the answer to every chunk that has one, in order."""
        if plan.chunks and not self.replay.fits(plan):
            if plan.num_steps > 1:
                raise EngineError(f"{plan.num_steps} steps at once, and the first does not fit a recording")
            return self.full.launch(plan, sampling)
        if plan.moves or plan.fresh:
            make_moves(self.store, plan)
        return self.replay.launch(plan, sampling) if plan.chunks else Done([])

    def logits(self, token_ids: Sequence[int], chunk_size: int) -> Any:
        """Logits after every token of one prompt, [tokens, vocab] float32 on the CPU."""
        return self.full.logits(token_ids, chunk_size)

    @property
    def keeps_rows(self) -> bool:
        """Whether steps keep recurrent state behind the rows for which a chunk has slots."""
        return self.replay.program.keeps_rows

    @property
    def full(self) -> FullRunner:
        """The one that runs any plan."""
        with self._lock:  # the engine's thread may want it at the same time as a caller of `logits`
            if self._full is None:
                self._full = self._open_full(self.store)
                if self._observe is not None:
                    self._full.observe = self._observe
            return self._full

    def show(self, observe: Observe) -> None:
        """Show the hidden states of every step from now on, in memory that the next step overwrites."""
        self._observe = observe
        self.replay.show(observe)

    def close(self) -> None:
        """Let all threads go. Nothing can run afterwards."""
        self.replay.program.threads.close()
        if self._full is not None:
            self._full.close()
