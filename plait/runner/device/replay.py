"""The steps of a device: decodes as one captured graph each, prompts op by op, both without a wait.

A step's tokens stay on the device, where the next step reads them; the host gets them by a ticket. So the
host can plan and launch the next step before it knows them. A graph is chosen by what sequences are, never by
shapes: every chunk is one token with history. In the graph: where entries go, the decoder, the draw, and the
rows move on. A batch that needs the host for its answers (log-probabilities) is sampled there. Steps that
check drafts have graphs of their own (`check_graphs`), and the host waits for their answers.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from plait.errors import CannotRecord, EngineError, KernelFailed
from plait.memory import BlockGroup
from plait.model.decoder import Decoder
from plait.model.eagle import row_size, take_observed
from plait.ops.registry import OpFacts
from plait.ops.step import locate_tokens, move_rows_on
from plait.request import SamplingParams
from plait.runner.device.capture import decoder_tensors
from plait.runner.device.check_batch import has_drafts, list_tokens
from plait.runner.device.check_graphs import CheckGraphs
from plait.runner.device.graph_backends import CapturedStep, GraphBackend
from plait.runner.device.rows import DeviceBatch, buckets_of
from plait.runner.device.ticket import DeviceTicket, Nothing
from plait.runner.host.pooling import add_pooled
from plait.runner.host.static_batch import Capacity
from plait.runner.sampling.sampler import Sampler, count_scratch
from plait.runner.sampling.tables import DrawForm, most_nbytes
from plait.runner.steps.inputs import (
    batch_of,
    is_decoding,
    list_columns,
    list_draws,
    list_places,
    parts_of,
    upload,
)
from plait.runner.steps.replay import Observe, copy_pooled
from plait.schedule.plan import FOLLOW, Done, Sampled, SamplingBatch, SamplingRow, StepPlan, Ticket
from plait.spec.canvas import NoisyCanvasSpec
from plait.spec.model import ModelSpec
from plait.state.store import StateStore

AT_START = 32  # sequences of the largest graph of which all plain forms are captured before the first request
log = logging.getLogger("plait")
# A row of a step with the most memory: it is drawn, and edited in a way that makes no table larger.
HEAVIEST = SamplingRow(
    SamplingParams(temperature=1.0), 1, 1, position=1, seed=0, stop_token_ids=frozenset({0}), num_stopless=1
)


class GraphKey(NamedTuple):
    """What a graph is for. `form` None: it ends with the logits, which the host samples from.

    has_adapters: a sequence has one; others' steps are without the launches for them.
    """

    bucket: int
    form: DrawForm | None
    has_adapters: bool = False


class DeviceReplay:
    """Runs the steps of a device (a `Replay`). The graph of a batch's size is captured when first needed."""

    def __init__(
        self,
        decoder: Decoder,
        store: StateStore,
        sampler: Sampler,
        groups: Sequence[BlockGroup],
        capacity: Capacity,
        backend: GraphBackend,
        observe: Observe | None = None,
    ) -> None:
        self._decoder, self._store, self.sampler, self._backend = decoder, store, sampler, backend
        self._observe: Observe | None = None
        self._groups, device = tuple(groups), backend.device
        self._kinds = (False, True) if decoder.adapters else (False,)  # steps without adapters, and with
        self.batch = DeviceBatch(capacity, groups, device)
        self._tables = sampler.tables(self.batch.rows, device)
        self._eager_tables = sampler.tables(capacity.logits, device)
        self._answers = torch.zeros(2, self.batch.rows, dtype=torch.float64, device=device)
        self._hidden = torch.zeros(0, device=device)  # of the rows of a graph, for `_observe`
        self._logits = torch.zeros(0, device=device)  # of the rows of a graph, for the host to sample from
        parts = (decoder, store, sampler, groups, capacity, backend)
        self._has_canvases = decoder.spec.canvas is not None  # then no step is a decode
        self.checks = CheckGraphs(*parts) if self._has_canvases or has_drafts(capacity) else None
        facts = OpFacts("cuda" if backend.chip else device.type, torch.float32, chip=backend.chip)
        self._locate, where = locate_tokens.bind(facts, "step")
        self._move_on, move = move_rows_on.bind(facts, "step")
        self.bindings = (where, move)
        self._graphs: dict[GraphKey, CapturedStep] = {}
        self._largest: CapturedStep | None = None  # is never let go: its memory is what the others share
        self._refused: dict[GraphKey, str] = {}
        self._filled: object = None  # the batch that `_tables` hold, as it is in the next step
        if observe:
            self.show(observe)

    @property
    def launches(self) -> Sequence[str]:
        """The names of the launches of one decode step, or of a pass over canvases, in order; empty before
        the first."""
        passes = self.checks.graphs if self.checks and self._has_canvases else {}
        graphs = [*self._graphs.values(), *passes.values()]
        return graphs[0].launches if graphs else ()

    def describe(self) -> str:
        """What is captured, in a line."""
        sizes, what = {key.bucket for key in self._graphs}, f"decodes of up to {self.batch.rows} sequences"
        if self.checks and self._has_canvases:
            sizes, what = {key.size.seqs for key in self.checks.graphs}, "passes over canvases"
        those = ", ".join(map(str, sorted(sizes)))
        shown = f"those of {those} are captured" if those else "each is captured when it is first needed"
        return f"{what} are graphs, {shown}; prompts run op by op"

    def count_graphs(self) -> Mapping[tuple[str, str], int]:
        """Captured steps by kind and number of sequences; safe from any thread."""
        checks = [*self.checks.graphs] if self.checks else []
        decodes = [("decode", str(key.bucket)) for key in [*self._graphs]]
        return Counter([*decodes, *(("check", str(key.size.seqs)) for key in checks)])

    def count_refusals(self) -> Mapping[tuple[str, str, str], int]:
        """Captures that were refused, as `CaptureRefusals` counts them; safe from any thread."""
        return self._backend.refusals.counts.copy()

    def show(self, observe: Observe) -> None:
        """Show every step's hidden states from now on. Graphs that leave none are captured again."""
        shape, embed = (self.batch.rows, row_size(self._decoder)), self._decoder.embed
        self._hidden = torch.zeros(shape, dtype=embed.dtype, device=self._backend.device)
        self._observe, self._graphs = observe, {}
        if self.checks:
            self.checks.show(observe)

    def prepare(self) -> None:
        """Capture the largest graph of all, then those of small batches, the largest first.

        Graphs share a pool of memory (`CudaGraphs`). Others are captured when a batch needs them, in any
        order: they find their memory where the largest has its own. Raises what a capture raises.
        """
        backend = self._backend
        before = backend.free_nbytes()
        with backend.select():
            if self.checks and (self._has_canvases or self.checks.tokens >= self.batch.rows):
                self.checks.prepare()
            if not self._has_canvases:
                self._prepare_decodes()
        self._filled = None
        if before is not None and (after := backend.free_nbytes()) is not None:
            log.info("memory: the graphs of startup have taken %d MiB", (before - after) >> 20)

    def _prepare_decodes(self) -> None:
        """Capture decodes, the largest first, and steps that check drafts where they come next in size."""
        self._largest = self._prepare_largest()
        if self.checks and self.checks.tokens < self.batch.rows:
            self.checks.prepare()
        small = [size for size in self.batch.buckets if size <= AT_START]
        for bucket, temperature, adapted in product(reversed(small), (1.0, 0.0), self._kinds):
            params = SamplingParams(temperature=temperature)
            self._prepare_graph(bucket, SamplingRow(params, 1, 1, position=1, seed=0), adapted)

    def _prepare_largest(self) -> CapturedStep | None:
        """The graph with the most memory: of all rows, drawn and edited; of fewer where that does not fit."""
        for bucket in reversed(self.batch.buckets):
            try:
                return self._prepare_graph(bucket, HEAVIEST, self._kinds[-1])
            except torch.OutOfMemoryError as error:
                self._backend.refusals.refuse(f"steps of {bucket} sequences", error, "decode", bucket)
        return None

    def _prepare_graph(self, bucket: int, row: SamplingRow, has_adapters: bool = False) -> CapturedStep:
        """Capture the graph for a batch of such rows."""
        self._tables.fill(SamplingBatch((row,) * bucket), range(bucket), range(-bucket, 0))
        key = GraphKey(bucket, self._tables.form, has_adapters)
        graph = self._graphs[key] = self._capture(key)
        return graph

    def fits(self, plan: StepPlan) -> bool:
        """Every plan does, if it has one step or none but decodes."""
        return plan.num_steps == 1 or is_decoding(plan)

    def forget(self) -> None:
        """A step failed: all that the device holds is written anew."""
        self.batch.forget()
        self._filled = None

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        """Launch a plan's steps without waiting for anything."""
        with self._backend.select():
            return self._launch(plan, sampling)

    def _launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        bucket = self.batch.bucket_of(plan) if is_decoding(plan) else None
        if bucket is not None:
            rows = self.batch.update(plan, bucket)
            form = self._tables.form if self._fill(plan, sampling, rows) else None
            key = GraphKey(bucket, form, any(chunk.adapter for chunk in plan.chunks))
            if (graph := self._graph(key, plan, sampling, rows)) is not None:
                return self._replay(graph, key, plan, sampling, rows)
        if plan.num_steps > 1:
            raise EngineError(f"{plan.num_steps} steps at once, and none is captured for them")
        if self.checks and (checked := self.checks.launch(plan, sampling)):
            return DeviceTicket(self, plan.step, [checked.read], checked.columns, (), can_be_followed=False)
        return self._run_eagerly(plan, sampling)

    def _replay(
        self, graph: CapturedStep, key: GraphKey, plan: StepPlan, sampling: SamplingBatch, rows: Sequence[int]
    ) -> Ticket:
        """Replay a graph for each step of a plan."""
        if key.form is None:
            if plan.num_steps > 1:
                raise EngineError(f"{plan.num_steps} steps at once, and their answers need the host")
            graph.replay()
            self._show_rows(plan, rows)
            self.batch.move_on(rows)
            (index,) = upload([np.array(rows, np.int64)], self._backend.device)
            return Done(self.sampler.sample(graph.result[index], sampling))
        reads = []
        for _ in range(plan.num_steps):
            graph.replay()
            self._show_rows(plan, rows)
            reads.append(self._backend.read(self._answers[:, : key.bucket]))
            self.batch.move_on(rows)
        self._tables.move_on(plan.num_steps)
        self.batch.mark_sampled(rows, plan.step)
        seq_ids, columns = [chunk.seq_id for chunk in plan.chunks], [(row,) for row in rows]
        return DeviceTicket(self, plan.step, reads, columns, seq_ids, can_be_followed=True)

    def _show_rows(self, plan: StepPlan, rows: Sequence[int]) -> None:
        """Show what a graph made of its tokens, in the plan's order."""
        if self._observe:
            (index,) = upload([np.array(rows, np.int64)], self._backend.device)
            self._observe(plan, self._hidden[index])

    def _fill(self, plan: StepPlan, sampling: SamplingBatch, rows: Sequence[int]) -> bool:
        """Write the batch's settings, unless the device has them. False: the host must sample."""
        settings = [row.num_stopless > 0 for row in sampling.rows]  # the rest never changes for a sequence
        places = [(chunk.seq_id, row, chunk.end) for chunk, row in zip(plan.chunks, rows, strict=True)]
        if not any(row.masks for row in sampling.rows) and (places, settings) == self._filled:
            self._filled = _later(places, plan.num_steps), settings
            return True
        self._filled = None
        if not self._tables.fill(sampling, rows, [chunk.seq_id for chunk in plan.chunks]):
            return False
        if self._tables.form.moves_on:
            self._filled = _later(places, plan.num_steps), settings
        return True

    # Graphs

    def _graph(
        self, key: GraphKey, plan: StepPlan, sampling: SamplingBatch, rows: Sequence[int]
    ) -> CapturedStep | None:
        """The graph for a batch, captured if it is the first of its kind; None if that is not possible."""
        if (graph := self._graphs.get(key)) is not None:
            return graph
        if key in self._refused:
            return None
        now = key.form  # what reads tables that were replaced by larger ones is of no use
        if now is not None:
            self._graphs = {k: g for k, g in self._graphs.items() if not k.form or k.form.outlives(now)}
        try:
            graph = self._graphs[key] = self._capture(key)
        except (CannotRecord, KernelFailed, RuntimeError) as error:
            self._refused[key] = str(error)
            self._backend.refusals.refuse(f"steps of {key.bucket} sequences", error, "decode", key.bucket)
            return None
        finally:  # what was captured has run over the tables
            self._tables.move_on()
            self._filled = None
            self._fill(plan, sampling, rows)
        return graph

    def _capture(self, key: GraphKey) -> CapturedStep:
        """Capture the step of the first rows, while they are padding."""
        batch = self.batch
        if key.form is None and not len(self._logits):
            self._logits = torch.zeros(batch.rows, self._decoder.spec.vocab_size, device=batch.memory.device)
        held = batch.memory.clone()
        batch.memory.copy_(batch.blank)
        inputs = [*decoder_tensors(self._decoder), *self._store.tensors, *batch.static_tensors]
        inputs += [self._answers, self._hidden, self._logits]
        try:
            return self._backend.capture(lambda: self._step(key), [*inputs, *self._tables.static_tensors])
        finally:
            batch.memory.copy_(held)

    def _step(self, key: GraphKey) -> Tensor:
        """What a graph does: the decode step of the first rows. Returns what the host reads: logits, if it
        samples, else the answers. A graph keeps that for ever, so it is in memory that all graphs have in
        common: logits of a large batch are hundreds of MB, and small results would divide large free blocks.
        """
        batch, size = self.batch, self._store.block_size
        active, ids, positions, lens = batch.list_moving(key.bucket)
        mappings = {
            group.name: self._locate(positions, batch.table(g, key.bucket), size)
            for g, group in enumerate(self._groups)
        }
        own = batch.batch(key.bucket, mappings, has_adapters=key.has_adapters)
        hidden = self._decoder.hidden(own, self._store)
        if self._observe:
            self._hidden[: key.bucket].copy_(take_observed(self._decoder, hidden))
        logits: Tensor = self._decoder.logits(hidden, own)
        if key.form is None:
            positions.add_(active)
            lens.add_(active)
            return self._logits[: key.bucket].copy_(logits)
        found, values = self.sampler.draw(logits, self._tables)
        answers = self._answers[:, : key.bucket]
        self._move_on(found, values, active, ids, positions, lens, answers)
        return answers

    # Op by op

    @torch.inference_mode()
    def _run_eagerly(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        """A step with prompts. What the device samples goes into the rows of its sequences."""
        answering = [chunk for chunk in plan.chunks if chunk.has_answer]
        drawing = list(zip(answering, sampling.rows, strict=True))
        is_pooled = any(chunk.num_pooled for chunk in plan.chunks)
        is_noisy = any(chunk.denoising for chunk in plan.chunks)  # more is read of these than tokens
        draws_here = not (is_pooled or is_noisy) and self._eager_tables.fill(sampling)
        placed = [c for c, row in drawing if draws_here and row.num_samples == 1 and not row.draft]
        if placed:
            self.batch.move(self.batch.place(placed, self.batch.rows))
        placed_ids = {chunk.seq_id: None for chunk in placed}  # in order
        rows = [self.batch.row_of(seq_id) for seq_id in placed_ids]
        places = list_draws(drawing), list_places(drawing, placed_ids), rows
        logits, hidden, (drawn, from_draw, to_row) = self._compute(plan, places)
        if self._observe:
            self._observe(plan, take_observed(self._decoder, hidden))
        if not draws_here:
            return Done(add_pooled(plan, copy_pooled(plan, hidden), self.sampler.sample(logits, sampling)))
        if not len(drawn):
            return Done([Sampled() for _ in drawing]) if drawing else Nothing([])
        logits = logits if len(drawn) == len(logits) else logits[drawn]
        ids, values = self.sampler.draw(logits, self._eager_tables)
        if placed:
            self.batch.token_ids.index_copy_(0, to_row, ids[from_draw])
            self.batch.mark_sampled(rows, plan.step)
        read = self._backend.read(torch.stack((ids.double(), values.double())))
        columns = list_columns(sampling.rows)
        is_whole = all(row.num_samples == 0 or chunk.seq_id in placed_ids for chunk, row in drawing)
        return DeviceTicket(self, plan.step, [read], columns, [*placed_ids], is_whole)

    def _compute(self, plan: StepPlan, places: Sequence[list[int]]) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(logits, hidden states, `places` as tensors): one copy takes all numbers to the device."""
        follows = [(n, chunk) for n, chunk in enumerate(plan.chunks) if chunk.token_ids == (FOLLOW,)]
        rows = [self.batch.row_of(chunk.seq_id) for _, chunk in follows]
        starts = np.cumsum([0, *(len(chunk.token_ids) for chunk in plan.chunks)])
        where = [int(starts[n]) for n, _ in follows]
        lists = [np.array(numbers, np.int64) for numbers in (*places, where, rows)]
        parts = parts_of(plan, len(self._groups), self._store.block_size)
        tensors = upload([*parts, *lists], self._backend.device)
        batch = batch_of(plan, self._groups, tensors[: len(parts)])
        *placed, targets, sources = tensors[len(parts) :]
        if follows:
            batch.token_ids.index_copy_(0, targets, self.batch.token_ids[sources])
        hidden = self._decoder.hidden(batch, self._store)
        return self._decoder.answer(hidden, batch, self._store), hidden, placed


def most_tables_nbytes(capacity: Capacity, spec: ModelSpec) -> int:
    """Bytes that all tables of sampling settings may have, once requests have penalties and biases, and that
    the logits have from which the host samples."""
    vocab_size = spec.vocab_size
    if isinstance(
        spec.canvas, NoisyCanvasSpec
    ):  # a line for each canvas: of a captured pass, of one op by op
        return sum(most_nbytes(count, vocab_size, count) for count in (capacity.seqs, 1))
    rows = [buckets_of(capacity.seqs)[-1], capacity.logits, count_scratch(capacity.logits)]
    rows += [list_tokens(capacity)[-1]] if has_drafts(capacity) else []
    logits = 4 * rows[0] * vocab_size
    return logits + sum(most_nbytes(count, vocab_size, capacity.seqs) for count in rows)


def _later(places: Sequence[tuple[int, int, int]], steps: int) -> list[tuple[int, int, int]]:
    return [(seq_id, row, end + steps) for seq_id, row, end in places]
