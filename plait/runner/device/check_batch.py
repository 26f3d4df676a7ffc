"""The static buffers of steps that check drafts: several tokens of each sequence, written anew for each step.

Which tokens such a step has the host knows, because it waits for what the step before sampled. So nothing
moves on by itself, and all of it is one copy to the device. A captured step is for so many sequences and so
many tokens; how the tokens are divided among the sequences is data:

    sequences  0   1   …  n-1  │ n … S-1   │ S
    tokens     5   1   …  9    │ none      │ the rest of T, in block 0 and slot 0, which no sequence has

Row S is padding alone. Rows of sequences that a step does not have are empty, so no state is moved for them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.memory import BlockGroup
from plait.model.layers.layers import Batch, PagedIndex
from plait.runner.device.layout import StepLayout
from plait.runner.device.rows import BUCKETS, buckets_of
from plait.runner.host.static_batch import Capacity
from plait.runner.steps.inputs import ALIGNED, parts_of
from plait.schedule.plan import FOLLOW, StepPlan

LONGEST = 16  # tokens of one sequence: more are scanned in chunks, as prompts are
Parts = list[npt.NDArray[np.int64]]


class CheckSize(NamedTuple):
    """What a captured step is for: this many sequences and tokens, padding included."""

    seqs: int
    tokens: int


def has_drafts(capacity: Capacity) -> bool:
    """Whether steps of this capacity may check drafts."""
    return capacity.logits > capacity.seqs + 2


def most_of_one(capacity: Capacity) -> int:
    """The most tokens of one sequence in a captured step: a canvas comes behind the one before it."""
    return max(LONGEST, 2 * capacity.canvas)


def list_tokens(capacity: Capacity) -> list[int]:
    """How many tokens a captured step may have, the fewest first."""
    return buckets_of(min(capacity.seqs * most_of_one(capacity), capacity.tokens, BUCKETS[-1]))


class CheckBatch:
    """Memory of the largest step, and views of it. `tokens`: how many that has."""

    @torch.inference_mode(False)  # else nothing outside of that mode could write it
    def __init__(
        self, capacity: Capacity, groups: Sequence[BlockGroup], block_size: int, device: torch.device
    ) -> None:
        self._groups, self._block_size, self._most = tuple(groups), block_size, most_of_one(capacity)
        self._may_begin = capacity.canvas > 0  # the first canvas of a sequence has no state to begin with
        self._seqs = buckets_of(capacity.seqs)
        self._tokens = list_tokens(capacity)
        self.tokens = self._tokens[-1]
        # Of a row of a table. All tokens may be padding, which has a row too: kernels read to the end of it.
        longest = max(capacity.blocks, -(-self.tokens // block_size))
        self._blocks = -(-longest // ALIGNED) * ALIGNED
        size = self._layout(CheckSize(self._seqs[-1], self.tokens)).size
        self._memory = torch.zeros(size, dtype=torch.int64, device=device)

    @property
    def static_tensors(self) -> list[Tensor]:
        """Every tensor that a step reads."""
        return [self._memory]

    @property
    def largest(self) -> CheckSize:
        """The largest step."""
        tokens = next(n for n in reversed(self._tokens) if n != self._seqs[-1] + 1)
        return CheckSize(max((n for n in self._seqs if n <= tokens), default=self._seqs[0]), tokens)

    def size_of(self, plan: StepPlan) -> CheckSize | None:
        """The smallest step that a plan fits into. None: there is none, or a chunk is no check of drafts."""
        chunks, tokens = plan.chunks, plan.num_tokens
        if tokens > self.tokens or len(chunks) > self._seqs[-1] or plan.num_steps > 1:
            return None
        for chunk in chunks:
            is_plain = chunk.num_logits > 0 and not chunk.num_pooled and not chunk.adapter
            is_known = chunk.start > 0 or self._may_begin
            if not (is_plain and is_known) or len(chunk.token_ids) > self._most or FOLLOW in chunk.token_ids:
                return None
            if any(len(table) > self._blocks for table in chunk.blocks):
                return None
        seqs = self._seqs[bisect_left(self._seqs, len(chunks))]
        # Some ops know decodes by as many rows as sequences. Here sequences may be empty, so rows are more.
        sizes = (n for n in self._tokens[bisect_left(self._tokens, tokens) :] if n != seqs + 1)
        size = next(sizes, None)
        return None if size is None else CheckSize(seqs, size)

    def fill(self, plan: StepPlan, size: CheckSize) -> None:
        """Write a plan; one without chunks: padding alone."""
        whole, views = self._layout(size).make_host_copy(self._memory)
        count, tokens = len(plan.chunks), plan.num_tokens
        if count:
            for view, part in zip(views, self._parts(plan), strict=True):
                view[tuple(slice(n) for n in part.shape)] = part
        _, _, starts, lens, _, history, *_ = views
        starts[count:-1], starts[-1] = tokens, size.tokens
        lens[count:], lens[-1] = 1, max(size.tokens - tokens, 1)
        history[count:] = 1
        self._memory[: len(whole)].copy_(whole, non_blocking=True)

    def batch(self, size: CheckSize) -> Batch:
        """The batch of a step of this size, over what `fill` wrote. To be called in the step.

        Of its rows of logits those that the plan wants come first.
        """
        views = self._layout(size).view(self._memory)
        ids, positions, starts, lens, slots, history, rows, *paged = views
        pairs = zip(self._groups, paged[::2], paged[1::2], strict=True)
        return Batch(
            token_ids=ids,
            positions=positions,
            query_start=starts,
            seq_lens=lens,
            num_decodes=0,
            paged={group.name: PagedIndex(table, mapping) for group, table, mapping in pairs},
            state_slots=slots,
            has_history=history != 0,
            logit_rows=rows,
        )

    def _parts(self, plan: StepPlan) -> Parts:
        """The arrays of a plan, in the order of `_layout`: all of `parts_of` but adapters: there are none."""
        parts = parts_of(plan, len(self._groups), self._block_size)
        return [*parts[:7], *parts[8:]]

    def _layout(self, size: CheckSize) -> StepLayout:
        """Where ids, positions, starts, lengths, slots, history and rows of logits lie, then of each group
        table and addresses."""
        seqs, tokens = size.seqs + 1, size.tokens
        lines = [(tokens,), (tokens,), (seqs + 1,), (seqs,), (seqs,), (seqs,), (tokens,)]
        return StepLayout.of([*lines, *[(seqs, self._blocks), (tokens,)] * len(self._groups)])
