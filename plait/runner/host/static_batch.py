"""The host buffers that a recorded step of a CPU reads: a plan is written into them, then they move on.

Nothing here needs torch: a recording makes tensors of these buffers (`program.view_as_batch`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from plait.memory import BlockGroup
from plait.schedule.plan import Chunk, StepPlan, Table

Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]


class NativeThreads(Protocol):
    """Threads that run native kernels (`kernels.cpu.runtime.threads`)."""

    @property
    def counters(self) -> int:
        """The address of two counters that share work out."""

    def run(
        self,
        program: Any,
        *,
        tokens: int,
        logits: int,
        seqs: int,
        steps: int = 1,
        between: Any = None,
        kind: int | None = None,
    ) -> int: ...
    def make_between(self, *args: object) -> object: ...
    def make_ending(self, program: Any, *args: object) -> object: ...
    def close(self) -> None: ...


class Capacity(Struct, frozen=True):
    """The largest step: tokens, rows of logits, sequences, blocks of one sequence, and places of a canvas."""

    tokens: int
    logits: int
    seqs: int
    blocks: int
    canvas: int = 0

    @classmethod
    def of(
        cls,
        tokens: int,
        seqs: int,
        max_model_len: int,
        block_size: int,
        num_draft_tokens: int = 0,
        canvas: int = 0,
    ) -> Capacity:
        """A row of logits for every sequence and each token of its draft or its canvas, and one more."""
        logits = max(min(seqs * (1 + num_draft_tokens + canvas), tokens), seqs) + 1
        logits += logits == tokens  # a recording distinguishes tokens and rows of logits by their number
        return cls(tokens, logits, seqs, max(-(-max_model_len // block_size), 1), canvas)


class StaticBatch:
    """The buffers that a program reads. `fill` writes a plan into them."""

    def __init__(
        self, capacity: Capacity, groups: Sequence[BlockGroup], block_size: int, *, has_adapters: bool = False
    ) -> None:
        self.capacity, self.block_size = capacity, block_size
        c = capacity
        self.ids, self.logit_rows, self.starts, self.slots = (
            np.zeros(n, np.int64) for n in (c.tokens, c.logits, c.seqs + 1, c.seqs)
        )
        # What grows by one from decode to decode, in one array: positions, lengths, and where entries go.
        self.moving = np.zeros((2 + len(groups), max(c.tokens, c.seqs)), np.int64)
        self.positions, self.lens = self.moving[0, : c.tokens], self.moving[1, : c.seqs]
        self.mappings = [row[: c.tokens] for row in self.moving[2:]]
        self.history = np.zeros(c.seqs, np.bool_)
        self.tables = [np.zeros((c.seqs, c.blocks), np.int64) for _ in groups]
        # Address and row stride of each, for native code.
        self.table_places = np.array([(t.ctypes.data, t.strides[0]) for t in self.tables], np.int64)
        # The adapter of each token, how many tokens have one, and tokens by adapter.
        self.adapters = np.zeros(c.tokens, np.int64) if has_adapters else None
        self.num_adapted, self.adapter_order = np.zeros(1, np.int64), np.zeros(c.tokens, np.int64)
        # Of each row the slot that gets the recurrent state behind it, 0: none of its own.
        self.row_slots, self._num_kept = np.zeros(c.tokens, np.int64), 0
        self._known: list[list[Table]] = [[() for _ in range(c.seqs)] for _ in groups]  # what tables hold

    @property
    def arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The memory of every buffer, by name."""
        tables = {f"tables.{g}": table for g, table in enumerate(self.tables)}
        return tables | {
            "ids": self.ids,
            "logit_rows": self.logit_rows,
            "starts": self.starts,
            "slots": self.slots,
            "row_slots": self.row_slots,
            "moving": self.moving,
            "history": self.history,
        }

    def fits(self, plan: StepPlan) -> bool:
        """Whether a plan is no larger than the buffers, and without passes over noisy canvases."""
        c, logits = self.capacity, 0
        for chunk in plan.chunks:
            if chunk.denoising is not None:
                return False
            logits += chunk.num_logits
            for table in chunk.blocks:
                if len(table) > c.blocks:
                    return False
        return len(plan.chunks) <= c.seqs and plan.num_tokens <= c.tokens and logits <= c.logits

    def fill(self, plan: StepPlan) -> tuple[int, int]:
        """Write a plan into the buffers. Returns how many tokens and rows of logits it has."""
        token, row, size = 0, 0, self.block_size
        self.row_slots[: self._num_kept] = self._num_kept = 0
        for s, chunk in enumerate(plan.chunks):
            at, start, count, num_logits = chunk.start, token, len(chunk.token_ids), chunk.num_logits
            token += count
            self.starts[s + 1], self.lens[s], self.slots[s] = token, at + count, chunk.slot
            self.history[s] = at > 0
            for g, table in enumerate(chunk.blocks):
                if table != self._known[g][s]:
                    self._show(g, s, table)
                if count == 1:  # numbers are cheaper than arrays of one
                    self.mappings[g][start] = table[at // size] * size + at % size
            if count == 1:
                self.ids[start], self.positions[start] = chunk.token_ids[0], at
            else:
                self._fill_piece(s, chunk, start)
            if num_logits == 1:
                self.logit_rows[row] = token - 1
            elif num_logits:
                self.logit_rows[row : row + num_logits] = range(token - num_logits, token)
            row += num_logits
            if chunk.row_slots:
                self.row_slots[token - 1 - len(chunk.row_slots) : token - 1] = chunk.row_slots
                self._num_kept = token
        if self.adapters is not None:
            self._fill_adapters(self.adapters, plan)
        return token, row

    def follow(self, token_ids: Sequence[int]) -> int:
        """Advance a step of decodes by one: every sequence's next token. Returns their number."""
        count, size = len(token_ids), self.block_size
        self.ids[:count] = token_ids
        self.moving[:, :count] += 1
        for s in np.flatnonzero(self.positions[:count] % size == 0).tolist():  # in its next block
            for mapping, table in zip(self.mappings, self.tables, strict=True):
                mapping[s] = table[s, self.positions[s] // size] * size
        return count

    def make_between(
        self, threads: NativeThreads, largest: Found, kept: Found, step: npt.NDArray[np.int64]
    ) -> object:
        """The native code that does `follow` between two steps of one call, for the largest logits.

        ids and values are kept for each step, in rows of `kept`; `step` counts.
        """
        places = self.table_places
        return threads.make_between(
            *(*largest, self.ids, self.moving, self.moving.strides[0], len(places), places),
            *(self.block_size, *kept, *(a.strides[0] for a in kept), step),
        )

    def _fill_adapters(self, adapters: npt.NDArray[np.int64], plan: StepPlan) -> None:
        token = 0
        for chunk in plan.chunks:
            adapters[token : token + len(chunk.token_ids)] = chunk.adapter
            token += len(chunk.token_ids)
        self.num_adapted[0] = count = np.count_nonzero(adapters[:token])
        if count:
            self.adapter_order[:token] = adapters[:token].argsort(kind="stable")

    def _fill_piece(self, s: int, chunk: Chunk, start: int) -> None:
        """Write a prompt chunk: its token ids, positions, and where its keys and values go."""
        at, end, size = np.arange(chunk.start, chunk.end), start + len(chunk.token_ids), self.block_size
        self.ids[start:end], self.positions[start:end] = chunk.token_ids, at
        for mapping, table in zip(self.mappings, self.tables, strict=True):
            mapping[start:end] = table[s][at // size] * size + at % size

    def _show(self, g: int, s: int, table: Table) -> None:
        """Write the block table of a sequence, where it changed."""
        known = self._known[g][s]
        same = len(known) if table[: len(known)] == known else 0
        self.tables[g][s, same : len(table)] = table[same:]
        self._known[g][s] = table
