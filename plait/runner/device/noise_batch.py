"""The static buffers of passes over noisy canvases, each the last tokens of a sequence, whole and alone.

All canvases of a model have one size, so a captured pass is for so many of them, without padding: a canvas is
as much work as a prompt. Known tokens in front of a canvas make a step of another form, which runs op by op.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from plait.memory import BlockGroup
from plait.model.layers.layers import Batch, CanvasRows, PagedIndex
from plait.runner.device.check_batch import CheckSize
from plait.runner.device.layout import StepLayout
from plait.runner.host.static_batch import Capacity
from plait.runner.steps.inputs import ALIGNED, parts_of
from plait.schedule.plan import FOLLOW, Chunk, StepPlan
from plait.spec.canvas import NoisyCanvasSpec


class NoiseBatch:
    """Memory of the pass over the most canvases, and views of it. `tokens`: how many places that has."""

    @torch.inference_mode(False)  # else nothing outside of that mode could write it
    def __init__(
        self,
        spec: NoisyCanvasSpec,
        capacity: Capacity,
        groups: Sequence[BlockGroup],
        block_size: int,
        device: torch.device,
    ) -> None:
        self._groups, self._block_size, self._places = tuple(groups), block_size, spec.size
        self._most = min(capacity.seqs, capacity.tokens // spec.size)
        self.tokens = self._most * spec.size
        longest = max(capacity.blocks * block_size + spec.tail, self.tokens)
        self._blocks = -(-longest // (block_size * ALIGNED)) * ALIGNED  # of a row of a table
        self._memory = torch.zeros(self._layout(self.largest).size, dtype=torch.int64, device=device)
        # What is the same in each pass: where canvases begin, rows of logits, that there are tokens in front.
        self._starts = torch.arange(self._most + 1, device=device) * spec.size
        self._rows = torch.arange(self.tokens, device=device)
        self._is_true = torch.ones(self.tokens, dtype=torch.bool, device=device)

    @property
    def static_tensors(self) -> list[Tensor]:
        """Every tensor that a pass reads."""
        return [self._memory, self._starts, self._rows, self._is_true]

    @property
    def largest(self) -> CheckSize:
        """The pass over the most canvases."""
        return CheckSize(self._most, self.tokens)

    def size_of(self, plan: StepPlan) -> CheckSize | None:
        """The pass that a plan is; None: it is another step, or larger."""
        count = len(plan.chunks)
        if count > self._most or plan.num_steps > 1 or not all(map(self._is_canvas, plan.chunks)):
            return None
        return CheckSize(count, count * self._places)

    def _is_canvas(self, chunk: Chunk) -> bool:
        is_whole = len(chunk.token_ids) == chunk.num_logits == self._places
        is_plain = chunk.start > 0 and not chunk.num_pooled and not chunk.adapter
        fits = all(len(table) <= self._blocks for table in chunk.blocks)
        return (
            chunk.denoising is not None and is_whole and is_plain and fits and FOLLOW not in chunk.token_ids
        )

    def fill(self, plan: StepPlan, size: CheckSize) -> None:
        """Write a plan; one without chunks: padding, in block 0 and slot 0, which no sequence has."""
        whole, views = self._layout(size).make_host_copy(self._memory)
        ids, positions, lens, slots, starts, fresh, heat, *paged = views
        lens[:], heat.view(np.float64)[:] = self._places, 1.0
        if chunks := plan.chunks:
            passes = [chunk.denoising for chunk in chunks if chunk.denoising]
            parts = parts_of(plan, len(self._groups), self._block_size)
            ids[:], positions[:], lens[:], slots[:] = parts[0], parts[1], parts[3], parts[4]
            starts[:] = [chunk.start for chunk in chunks]
            fresh[:] = [one.is_first for one in passes]
            heat.view(np.float64)[:] = [one.temperature for one in passes]
            for view, part in zip(paged, parts[8:], strict=True):
                view[..., : part.shape[-1]] = part
        self._memory[: len(whole)].copy_(whole, non_blocking=True)

    def batch(self, size: CheckSize) -> Batch:
        """The batch of a pass of this size, over what `fill` wrote. To be called in the step."""
        views, (count, tokens) = self._layout(size).view(self._memory), size
        ids, positions, lens, slots, starts, fresh, heat, *paged = views
        pairs = zip(self._groups, paged[::2], paged[1::2], strict=True)
        return Batch(
            token_ids=ids,
            positions=positions,
            query_start=self._starts[: count + 1],
            seq_lens=lens,
            num_decodes=0,
            paged={group.name: PagedIndex(table, mapping) for group, table, mapping in pairs},
            state_slots=slots,
            has_history=self._is_true[:count],
            logit_rows=self._rows[:tokens],
            canvas=CanvasRows(
                start=starts,
                is_place=self._is_true[:tokens],
                is_fresh=(fresh != 0).repeat_interleave(self._places, output_size=tokens),
                sizes=(self._places,) * count,
                temperatures=heat.view(torch.float64).float(),
            ),
        )

    def _layout(self, size: CheckSize) -> StepLayout:
        """Where ids, positions, lengths, slots, starts, whether a pass is the first, and temperatures lie,
        then of each group table and addresses."""
        count, tokens = size
        lines = [(tokens,), (tokens,), *[(count,)] * 5]
        return StepLayout.of([*lines, *[(count, self._blocks), (tokens,)] * len(self._groups)])
