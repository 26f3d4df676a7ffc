"""Steps that check drafts, or pass over canvases, as captured steps: each sequence has several draws.

A drafted token counts if it is what the model samples in its place, so such a step ends with one draw for
each of its tokens, over the same settings as on a CPU. The host reads them and decides what was right: the
next step waits for that. A graph is for a number of sequences and of tokens (`CheckSize`) and a form of the
draw; it is captured when it is first needed, and which drafts are how long is data.

Of noisy canvases the host also reads the likeliest token and the entropy of each place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from plait.errors import CannotRecord, KernelFailed
from plait.memory import BlockGroup
from plait.model.decoder import Decoder
from plait.model.eagle import row_size, take_observed
from plait.request import SamplingParams
from plait.runner.device.capture import decoder_tensors
from plait.runner.device.check_batch import CheckBatch, CheckSize
from plait.runner.device.graph_backends import CapturedStep, GraphBackend
from plait.runner.device.noise_batch import NoiseBatch
from plait.runner.device.ticket import NOISY_LINES
from plait.runner.host.static_batch import Capacity
from plait.runner.sampling.sampler import Sampler
from plait.runner.sampling.tables import DrawForm
from plait.runner.steps.inputs import list_columns
from plait.runner.steps.replay import Observe
from plait.schedule.plan import SamplingBatch, SamplingRow, StepPlan
from plait.spec.canvas import CanvasSpec, NoisyCanvasSpec
from plait.state.store import StateStore


class CheckKey(NamedTuple):
    """What a graph is for."""

    size: CheckSize
    form: DrawForm


@dataclass(frozen=True, slots=True)
class Checked:
    """A step that was launched. `read`: waits for ids and largest logits, [2, draws] float64, and of a model
    that fills canvases for what `DeviceTicket.reads` says.

    `columns`: those of each answer, in the plan's order.
    """

    read: Callable[[], Tensor]
    columns: Sequence[Sequence[int]]


class CheckGraphs:
    """Captures and replays the steps that check drafts."""

    def __init__(
        self,
        decoder: Decoder,
        store: StateStore,
        sampler: Sampler,
        groups: Sequence[BlockGroup],
        capacity: Capacity,
        backend: GraphBackend,
    ) -> None:
        self._decoder, self._store, self._sampler, self._backend = decoder, store, sampler, backend
        memory, canvas = (capacity, groups, store.block_size, backend.device), decoder.spec.canvas
        self._batch: CheckBatch | NoiseBatch
        if isinstance(canvas, NoisyCanvasSpec):
            self._batch, lines = NoiseBatch(canvas, *memory), NOISY_LINES
        else:
            self._batch, lines = CheckBatch(*memory), 3 if canvas else 2
        self.tokens = self._batch.tokens  # of the largest step
        self._tables = sampler.tables(self._batch.tokens, backend.device)
        self._tables.gives_scores = isinstance(canvas, CanvasSpec)
        self._answers = torch.zeros(lines, self._batch.tokens, dtype=torch.float64, device=backend.device)
        self._hidden = torch.zeros(0, device=backend.device)  # of the tokens of a graph, for `_observe`
        self._observe: Observe | None = None
        self.graphs: dict[CheckKey, CapturedStep] = {}
        self.refused: dict[CheckSize, str] = {}
        self._largest: CapturedStep | None = None  # is never let go: its memory is what the others share

    def show(self, observe: Observe) -> None:
        """Show every step's hidden states from now on. Graphs that leave none are captured again."""
        shape = (self._batch.tokens, row_size(self._decoder))
        self._hidden = torch.zeros(shape, dtype=self._decoder.embed.dtype, device=self._backend.device)
        self._observe, self.graphs = observe, {}

    def prepare(self) -> None:
        """Capture the step with the most memory, before others that then share it."""
        size, params = self._batch.largest, SamplingParams(temperature=1.0)
        some = SamplingRow(
            *(params, size.tokens, size.tokens),
            position=1,
            seed=0,
            stop_token_ids=frozenset({0}),
            num_stopless=1,
        )
        self._tables.fill(SamplingBatch((some,)))
        key = CheckKey(size, self._tables.form)
        if self._capture(key):
            self._largest = self.graphs[key]

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Checked | None:
        """Launch a plan that checks drafts, passes over canvases, or draws one behind masks; None for others,
        and where it cannot be captured."""
        rows = sampling.rows
        is_single = not self._tables.gives_scores and all(row.num_samples < 2 for row in rows)
        if is_single or any(row.num_samples != row.num_logits for row in rows):
            return None
        size = self._batch.size_of(plan)
        if size is None or size in self.refused or not self._tables.fill(sampling):
            return None
        key = CheckKey(size, self._tables.form)
        if key not in self.graphs:
            if not self._capture(key):
                return None
            self._tables.fill(sampling)  # the capture has run over them
        self._batch.fill(plan, size)
        self.graphs[key].replay()
        if self._observe:
            self._observe(plan, self._hidden[: plan.num_tokens])
        columns = list_columns(rows)
        return Checked(self._backend.read(self._answers[:, : columns[-1].stop]), columns)

    def _capture(self, key: CheckKey) -> bool:
        """Capture the step over padding alone. False: it cannot be, and is not tried again."""
        # A graph that reads tables which larger ones replaced is of no use.
        self.graphs = {k: graph for k, graph in self.graphs.items() if k.form.outlives(key.form)}
        self._batch.fill(StepPlan(0, ()), key.size)
        inputs = [*decoder_tensors(self._decoder), *self._store.tensors, *self._batch.static_tensors]
        inputs += [self._answers, self._hidden, *self._tables.static_tensors]
        try:
            self.graphs[key] = self._backend.capture(lambda: self._step(key), inputs)
        except (CannotRecord, KernelFailed, RuntimeError) as error:
            self.refused[key.size] = str(error)
            kind = "steps that check drafts" if self._decoder.spec.canvas is None else "passes over canvases"
            what = f"{kind}, of {key.size.tokens} tokens of {key.size.seqs} sequences,"
            self._backend.refusals.refuse(what, error, "check", key.size.seqs)
            return False
        return True

    def _step(self, key: CheckKey) -> Tensor:
        """What a graph does: the step, and a draw for each row of logits. Returns the answers."""
        batch, tokens = self._batch.batch(key.size), key.size.tokens
        hidden = self._decoder.hidden(batch, self._store)
        if self._observe:
            self._hidden[:tokens].copy_(take_observed(self._decoder, hidden))
        logits: Tensor = self._decoder.answer(hidden, batch, self._store)
        answers = self._answers[:, :tokens]
        if batch.canvas:
            heat = batch.canvas.list_temperatures()
            for line, found in zip(
                answers, self._sampler.draw_places(logits, self._tables, heat), strict=True
            ):
                line.copy_(found)
            return answers
        ids, values = self._sampler.draw(logits, self._tables)
        answers[0].copy_(ids)
        answers[1].copy_(values)
        if self._tables.gives_scores:
            answers[2].copy_(self._sampler.score(logits, ids))
        return answers
