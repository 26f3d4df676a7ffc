"""The host buffers that a recorded step of a CPU reads: a plan is written into them, then they move on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from plait.memory import BlockGroup
from plait.model.layers.layers import Batch, PagedIndex
from plait.schedule.plan import Chunk, StepPlan, Table

Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


class NativeExecutor(Protocol):
    """Threads that run native kernels, now or recorded (`kernels.cpu.runtime.executor`)."""

    def recording(self, tokens: int, logits: int) -> Any: ...
    def run(
        self, program: Any, *, tokens: int, logits: int, seqs: int, steps: int = 1, between: object = None
    ) -> None: ...
    def following(self, tokens: int, logits: int, *args: object) -> object: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Capacity:
    """The largest step: tokens, rows of logits, sequences, blocks of one sequence."""

    tokens: int
    logits: int
    seqs: int
    blocks: int

    @classmethod
    def of(
        cls, tokens: int, seqs: int, max_model_len: int, block_size: int, num_draft_tokens: int = 0
    ) -> Capacity:
        """A row of logits for every sequence and each token of its draft, and one more."""
        logits = max(min(seqs * (1 + num_draft_tokens), tokens), seqs) + 1
        logits += logits == tokens  # a recording distinguishes tokens and rows of logits by their number
        return cls(tokens, logits, seqs, max(-(-max_model_len // block_size), 1))


class StaticBatch:
    """The buffers that a program reads. `fill` writes a plan into them."""

    def __init__(self, capacity: Capacity, groups: Sequence[BlockGroup], block_size: int) -> None:
        self.capacity, self.block_size = capacity, block_size
        c = capacity
        self._ids, self._logit_rows, self._starts, self._slots = (
            np.zeros(n, np.int64) for n in (c.tokens, c.logits, c.seqs + 1, c.seqs)
        )
        # What grows by one from decode to decode, in one array: positions, lengths, and where entries go.
        self._moving = np.zeros((2 + len(groups), max(c.tokens, c.seqs)), np.int64)
        self._positions, self._lens = self._moving[0, : c.tokens], self._moving[1, : c.seqs]
        self._mappings = [row[: c.tokens] for row in self._moving[2:]]
        self._history = np.zeros(c.seqs, np.bool_)
        self._tables = [np.zeros((c.seqs, c.blocks), np.int64) for _ in groups]
        self._known: list[list[Table]] = [[() for _ in range(c.seqs)] for _ in groups]  # what tables hold
        pairs = zip(groups, self._tables, self._mappings, strict=True)
        self.batch = Batch(
            token_ids=torch.from_numpy(self._ids),
            positions=torch.from_numpy(self._positions),
            query_start=torch.from_numpy(self._starts),
            seq_lens=torch.from_numpy(self._lens),
            num_decodes=0,
            max_query_len=c.tokens,
            max_seq_len=c.blocks * block_size,
            paged={g.name: PagedIndex(torch.from_numpy(t), torch.from_numpy(m)) for g, t, m in pairs},
            state_slots=torch.from_numpy(self._slots),
            has_history=torch.from_numpy(self._history),
            logit_rows=torch.from_numpy(self._logit_rows),
        )

    def fits(self, plan: StepPlan) -> bool:
        c, logits = self.capacity, 0
        for chunk in plan.chunks:
            logits += chunk.num_logits
            for table in chunk.blocks:
                if len(table) > c.blocks:
                    return False
        return len(plan.chunks) <= c.seqs and plan.num_tokens <= c.tokens and logits <= c.logits

    def fill(self, plan: StepPlan) -> tuple[int, int]:
        """Write a plan into the buffers. Returns how many tokens and rows of logits it has."""
        token, row, size = 0, 0, self.block_size
        for s, chunk in enumerate(plan.chunks):
            at, start, count, num_logits = chunk.start, token, len(chunk.token_ids), chunk.num_logits
            token += count
            self._starts[s + 1], self._lens[s], self._slots[s] = token, at + count, chunk.slot
            self._history[s] = at > 0
            for g, table in enumerate(chunk.blocks):
                if table != self._known[g][s]:
                    self._show(g, s, table)
                if count == 1:  # numbers are cheaper than arrays of one
                    self._mappings[g][start] = table[at // size] * size + at % size
            if count == 1:
                self._ids[start], self._positions[start] = chunk.token_ids[0], at
            else:
                self._fill_piece(s, chunk, start)
            if num_logits == 1:
                self._logit_rows[row] = token - 1
            elif num_logits:
                self._logit_rows[row : row + num_logits] = range(token - num_logits, token)
            row += num_logits
        return token, row

    def follow(self, token_ids: Sequence[int]) -> int:
        """Advance a step of decodes by one: every sequence's next token. Returns their number."""
        count, size = len(token_ids), self.block_size
        self._ids[:count] = token_ids
        self._moving[:, :count] += 1
        for s in np.flatnonzero(self._positions[:count] % size == 0).tolist():  # in its next block
            for mapping, table in zip(self._mappings, self._tables, strict=True):
                mapping[s] = table[s, self._positions[s] // size] * size
        return count

    def following(
        self, executor: NativeExecutor, largest: Found, kept: Found, step: npt.NDArray[np.int64]
    ) -> object:
        """The native code that does `follow` between two steps of one call, for the largest logits.

        ids and values are kept for each step, in rows of `kept`; `step` counts.
        """
        places = np.array([(table.ctypes.data, table.strides[0]) for table in self._tables], np.int64)
        addresses = (a.ctypes.data for a in (*largest, self._ids, self._moving))
        return executor.following(
            self.capacity.tokens,
            self.capacity.logits,
            *addresses,
            self._moving.strides[0],
            len(places),
            torch.from_numpy(places),  # which the program holds
            self.block_size,
            *(a.ctypes.data for a in kept),
            *(a.strides[0] for a in kept),
            step.ctypes.data,
        )

    def _fill_piece(self, s: int, chunk: Chunk, start: int) -> None:
        """Write a prompt chunk: its token ids, positions, and where its keys and values go."""
        at, end, size = np.arange(chunk.start, chunk.end), start + len(chunk.token_ids), self.block_size
        self._ids[start:end], self._positions[start:end] = chunk.token_ids, at
        for mapping, table in zip(self._mappings, self._tables, strict=True):
            mapping[start:end] = table[s][at // size] * size + at % size

    def _show(self, g: int, s: int, table: Table) -> None:
        """Write the block table of a sequence, where it changed."""
        known = self._known[g][s]
        same = len(known) if table[: len(known)] == known else 0
        self._tables[g][s, same : len(table)] = table[same:]
        self._known[g][s] = table
