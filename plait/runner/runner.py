"""The model runner: runs a plan on a device, from inputs through decoder and sampler to tokens."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from plait.errors import CannotRecord, EngineError, KernelFailed
from plait.memory import block_groups
from plait.model.decoder import Decoder
from plait.model.eagle import take_observed
from plait.ops.registry import Binding
from plait.runner.device.graph_backends import GraphBackend
from plait.runner.device.loss import CheckedTicket, check_lost
from plait.runner.device.replay import DeviceReplay
from plait.runner.host.moves import make_moves
from plait.runner.host.pooling import add_pooled
from plait.runner.host.static_batch import Capacity
from plait.runner.program import NativeExecutor, keep_planned_rows, record_program
from plait.runner.sampling.sampler import Sampler
from plait.runner.steps.inputs import build_batch
from plait.runner.steps.replay import Lead, Observe, Replay, copy_pooled, ignore_hidden
from plait.runner.steps.whole_prompts import score_prompt
from plait.schedule.plan import Done, SamplingBatch, StepPlan, Ticket
from plait.state.store import StateStore


class ModelRunner:
    """Executes plans on one device. `store` holds the state of every running sequence.

    With the `capacity` of the largest step, and an `executor` of native kernels or the graphs of a device, a
    step is recorded once and replayed. `step_kind` describes the recording, or why steps run op by op.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: StateStore,
        sampler: Sampler,
        device: torch.device,
        *,
        executor: NativeExecutor | GraphBackend | None = None,
        capacity: Capacity | None = None,
        observe: Observe | None = None,
    ) -> None:
        self.lead: Lead | None = None  # of rank 0: sends what it launches to the others
        self.observe: Observe = observe or ignore_hidden  # is shown the hidden states of every step
        self.decoder, self.store, self.sampler, self.device = decoder, store, sampler, device
        self.groups, self.executor = block_groups(decoder.states), executor
        self.replay: Replay | None = None
        self.graphs: DeviceReplay | None = None  # which is `replay`, on a device
        self.is_recorded = self.keeps_rows = self.ends_steps = False  # see `make_engine.RowKeeper`
        self.step_kind = "op by op: no recording was requested"
        native = self._native = None if isinstance(executor, GraphBackend) else executor
        if capacity and isinstance(executor, GraphBackend) and decoder.spec.causal:
            self._replay_on_device(capacity, executor, observe)
        elif capacity:
            made, self.step_kind = record_program(decoder, store, native, self.groups, capacity, sampler)
            self.replay, self.is_recorded = made, made is not None
            self.ends_steps = made is not None
            self.keeps_rows = made is not None and made.program.keeps_rows

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        """Launch the steps of a plan: its ticket gives the answer to every chunk that has one, in order.

        Both raise DeviceLost if the device fails and answers no more, or another rank does.
        """
        if self.lead:
            return self.lead.launch(self._launch_here, plan, sampling)
        return self._launch_here(plan, sampling)

    def _launch_here(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        try:
            ticket = self._launch(plan, sampling)
        except RuntimeError as error:
            check_lost(error, self.device)
            raise
        return ticket if isinstance(ticket, Done) else CheckedTicket(ticket, self.device)

    def _launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        if plan.moves or plan.fresh:
            with torch.inference_mode():
                make_moves(self.store, plan)
        if not plan.chunks:
            return Done([])
        if self.replay is not None and self.replay.fits(plan):
            try:
                return self.replay.launch(plan, sampling)
            except BaseException:
                self.replay.forget()
                raise
        if plan.num_steps > 1:
            raise EngineError(f"{plan.num_steps} steps at once, and the first does not fit a recording")
        hidden, logits = self._compute(plan)
        self.observe(plan, take_observed(self.decoder, hidden))
        return Done(add_pooled(plan, copy_pooled(plan, hidden), self.sampler.sample(logits, sampling)))

    @property
    def bindings(self) -> Sequence[Binding]:
        """Which variants were bound for what is around a captured step."""
        return self.graphs.bindings if self.graphs else ()

    def _replay_on_device(self, capacity: Capacity, graphs: GraphBackend, observe: Observe | None) -> None:
        """Run steps without waits; decodes that cannot be captured op by op. Raises DeviceLost."""
        parts = self.decoder, self.store, self.sampler, self.groups
        replay = self.replay = self.graphs = DeviceReplay(*parts, capacity, graphs, observe)
        try:
            if graphs.captures_at_start:
                replay.prepare()
            self.step_kind, self.is_recorded = replay.describe(), True
        except (CannotRecord, KernelFailed, RuntimeError) as error:
            check_lost(error, self.device, "the capture of its steps")
            self.step_kind = "op by op: " + graphs.refusals.refuse("decodes", error, "decode")

    def close(self) -> None:
        """Let the executor's threads go. Nothing can run afterwards."""
        if self.executor and not isinstance(self.executor, GraphBackend):
            self.executor.close()

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> tuple[Tensor, Tensor]:
        """Hidden states, [the plan's tokens, hidden], and logits of the requested rows, op by op."""
        batch = build_batch(plan, self.groups, self.store.block_size, self.device)
        with keep_planned_rows(plan, self._native):
            hidden = self.decoder.hidden(batch, self.store)
        return hidden, self.decoder.answer(hidden, batch, self.store)

    def logits(self, token_ids: Sequence[int], chunk_size: int) -> Tensor:
        """Logits after every token of one prompt, [tokens, vocab] float32 on the CPU.

        Runs in memory of its own. A model that is not causal sees all, others `chunk_size` tokens or more.
        """
        here = partial(score_prompt, self.decoder, self.store.block_size, self.device, token_ids, chunk_size)
        return self.lead.score(here, token_ids, chunk_size) if self.lead else here()
