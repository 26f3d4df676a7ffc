"""The static buffers of a device's decode steps: a row for each running sequence, updated by differences.

All of them are one tensor of integers, so that a step is written by one copy of (address, value) pairs and
one launch that puts them in place. What moves on by itself (tokens, positions, lengths) is not written again:
a step of the same sequences costs the host nothing but its launch.

    token ids [R] | positions | lengths | active | slots | adapters [R] | tables of each group [R, M]

A row without a sequence is padding: it is not active, at position 0 of block 0, of length 1, in slot 0. A
graph for B sequences reads the first B rows, in which its sequences may be in any order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from plait.errors import EngineError
from plait.memory import BlockGroup
from plait.model.layers.layers import Batch, PagedIndex
from plait.ops.low_rank import AdapterRows
from plait.runner.host.static_batch import Capacity
from plait.runner.steps.inputs import ALIGNED, upload_pairs
from plait.schedule.plan import FOLLOW, Chunk, StepPlan, Table

FIELDS = ("token_ids", "positions", "seq_lens", "active", "slots", "adapters")
PADDING = {"token_ids": 0, "positions": 0, "seq_lens": 1, "active": 0, "slots": 0, "adapters": 0}
BUCKETS = (1, 2, 4, 8, 12, 16, 24, 32, *range(48, 129, 16), *range(160, 257, 32), *range(320, 513, 64))
SAMPLED = -2  # a token that only the device knows


def buckets_of(seqs: int) -> list[int]:
    """Sizes of graphs for up to so many sequences, smallest first."""
    last = bisect_left(BUCKETS, seqs)
    return [*BUCKETS[:last], BUCKETS[last] if last < len(BUCKETS) else seqs]


@dataclass(slots=True)
class DeviceRow:
    """What the device has in a row. `seq_id` -1: padding; `token`: the next one to compute, if it is known.

    `step`: the step that sampled it; 0: it came from the host.
    """

    seq_id: int = -1
    token: int = 0
    position: int = 0
    slot: int = 0
    adapter: int = 0
    step: int = 0
    tables: list[Table] = field(default_factory=list)


@dataclass(slots=True)
class Changes:
    """What a plan changes: numbers of the device's memory, and numbers that move before that."""

    addresses: list[int] = field(default_factory=list)
    values: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    targets: list[int] = field(default_factory=list)

    def set(self, address: int, value: int) -> None:
        self.addresses.append(address)
        self.values.append(value)


class DeviceBatch:
    """Rows of sequences on the device. `place` gives them rows, `update` writes what a plan changes.

    `rows`: how many there are, which is the largest bucket.
    """

    @torch.inference_mode(False)  # else nothing outside of that mode could write them
    def __init__(self, capacity: Capacity, groups: Sequence[BlockGroup], device: torch.device) -> None:
        self.groups = tuple(groups)
        self.buckets = buckets_of(capacity.seqs)
        self.rows = self.buckets[-1]
        stride = -(-self.rows // ALIGNED) * ALIGNED  # of a field
        self._at = {name: i * stride for i, name in enumerate(FIELDS)}
        self._width = -(-capacity.blocks // ALIGNED) * ALIGNED  # of a row of a table
        first = stride * len(FIELDS)
        self._tables = [first + g * self.rows * self._width for g in range(len(groups))]
        size = first + len(groups) * self.rows * self._width
        self.memory = torch.zeros(size, dtype=torch.int64, device=device)
        self._of("seq_lens", self.rows).fill_(1)
        self.blank = self.memory.clone()
        self._starts = torch.arange(self.rows + 1, device=device)
        self._history = torch.ones(self.rows, dtype=torch.bool, device=device)
        self._known = [self._padding() for _ in range(self.rows)]
        self._row_of: dict[int, int] = {}

    @property
    def static_tensors(self) -> list[Tensor]:
        """Every tensor that a step reads or moves on."""
        return [self.memory, self._starts, self._history]

    def batch(self, bucket: int, mappings: Mapping[str, Tensor], *, has_adapters: bool = False) -> Batch:
        """The batch of a decode step of the first rows. `mappings`: where entries go, by block group.

        has_adapters: rows may have some.
        """
        return Batch(
            token_ids=self._of("token_ids", bucket),
            positions=self._of("positions", bucket),
            query_start=self._starts[: bucket + 1],
            seq_lens=self._of("seq_lens", bucket),
            num_decodes=bucket,
            paged={
                g.name: PagedIndex(self.table(i, bucket), mappings[g.name]) for i, g in enumerate(self.groups)
            },
            state_slots=self._of("slots", bucket),
            has_history=self._history[:bucket],
            logit_rows=self._starts[:bucket],
            adapters=AdapterRows.on_device(self._of("adapters", bucket)) if has_adapters else None,
        )

    def table(self, group: int, bucket: int) -> Tensor:
        """Block tables of the first rows, [bucket, blocks and a few that are never used]."""
        at = self._tables[group]
        return self.memory[at : at + bucket * self._width].view(bucket, self._width)

    def list_moving(self, bucket: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of the first rows, what a step moves on: active, token ids, positions, lengths."""
        active, ids, positions, lens = (
            self._of(name, bucket) for name in ("active", "token_ids", "positions", "seq_lens")
        )
        return active, ids, positions, lens

    @property
    def token_ids(self) -> Tensor:
        """The next token of every row."""
        return self._of("token_ids", self.rows)

    def bucket_of(self, plan: StepPlan) -> int | None:
        """The smallest graph that a plan of decodes fits into; None: there is none."""
        at = bisect_left(self.buckets, len(plan.chunks))
        return self.buckets[at] if at < len(self.buckets) else None

    def row_of(self, seq_id: int) -> int:
        """The row of a sequence that has one. Raises EngineError."""
        if (row := self._row_of.get(seq_id)) is None:
            raise EngineError(f"sequence {seq_id} has no row, and its next token is nowhere")
        return row

    def place(self, chunks: Sequence[Chunk], limit: int) -> Changes:
        """Give every chunk's sequence a row below `limit`, taking rows of those that are not in the step.

        A sequence has to be in each step from its first token on, or its next one comes from the host.
        """
        changes = Changes()
        here = {chunk.seq_id for chunk in chunks}
        homeless = [c for c in chunks if self._row_of.get(c.seq_id, limit) >= limit]
        if not homeless:
            return changes
        free = (row for row in range(limit) if self._known[row].seq_id not in here)
        for chunk in homeless:
            row, old = next(free), self._row_of.pop(chunk.seq_id, None)
            self._row_of.pop(self._known[row].seq_id, None)
            token, step = SAMPLED, 0
            if old is not None:  # its token goes with it; the rest is written as for a new one
                changes.sources.append(self._at["token_ids"] + old)
                changes.targets.append(self._at["token_ids"] + row)
                token, step, self._known[old].seq_id = self._known[old].token, self._known[old].step, -1
                self._known[old].token = SAMPLED
            known = self._known[row]
            known.seq_id, known.token, known.position, known.step = chunk.seq_id, token, -1, step
            self._row_of[chunk.seq_id] = row
        return changes

    def update(self, plan: StepPlan, bucket: int) -> list[int]:
        """Write what a plan of decodes changes in the first rows. Returns the row of each chunk."""
        changes, rows = self.place(plan.chunks, bucket), []
        for chunk in plan.chunks:
            row = self._row_of[chunk.seq_id]
            rows.append(row)
            self._write(row, chunk, changes)
        if len(rows) < bucket:
            for row in set(range(bucket)).difference(rows):
                if self._known[row].seq_id != -1 or self._known[row].position:
                    self._clear(row, changes)
        self._apply(changes)
        return rows

    def move(self, changes: Changes) -> None:
        """Do what `place` found, where no other number is written."""
        self._apply(changes)

    def move_on(self, rows: Sequence[int]) -> None:
        """Record that a captured step ran over these rows."""
        for row in rows:
            self._known[row].position += 1

    def mark_sampled(self, rows: Sequence[int], step: int) -> None:
        """Record that what a step sampled is in the rows' token ids."""
        for row in rows:
            self._known[row].token, self._known[row].step = SAMPLED, step

    def learn(self, step: int, seq_ids: Sequence[int], tokens: Sequence[int]) -> None:
        """The host has read what a step sampled for these sequences; a later one may have sampled since."""
        for seq_id, token in zip(seq_ids, tokens, strict=True):
            row = self._row_of.get(seq_id)
            if row is not None and self._known[row].token == SAMPLED and self._known[row].step == step:
                self._known[row].token = token

    def forget(self) -> None:
        """A step failed: nothing is known of the device's memory, and every row is written anew."""
        self._row_of.clear()
        for row in self._known:
            row.seq_id, row.token, row.position, row.slot, row.tables = -1, SAMPLED, -1, -1, []
            row.step, row.adapter = 0, -1

    def _write(self, row: int, chunk: Chunk, changes: Changes) -> None:
        """What the row must have for this chunk and has not."""
        known, at = self._known[row], self._at
        token = chunk.token_ids[0]
        if token == FOLLOW:  # which the host may know by now, as on ranks that wait for each step
            if known.token != SAMPLED and not known.step:
                raise EngineError(f"sequence {chunk.seq_id} follows a token that was not sampled")
        elif token != known.token:
            changes.set(at["token_ids"] + row, token)
            known.token, known.step = token, 0
        if chunk.start != known.position:
            changes.set(at["positions"] + row, chunk.start)
            changes.set(at["seq_lens"] + row, chunk.end)
            changes.set(at["active"] + row, 1)
            known.position = chunk.start
        if chunk.slot != known.slot:
            changes.set(at["slots"] + row, chunk.slot)
            known.slot = chunk.slot
        if chunk.adapter != known.adapter:
            changes.set(at["adapters"] + row, chunk.adapter)
            known.adapter = chunk.adapter
        self._write_tables(row, chunk, changes)

    def _write_tables(self, row: int, chunk: Chunk, changes: Changes) -> None:
        known = self._known[row]
        for g, table in enumerate(chunk.blocks):
            before = known.tables[g] if known.tables else ()
            if table != before:
                first = self._tables[g] + row * self._width
                for i, block in enumerate(table):
                    if i >= len(before) or before[i] != block:
                        changes.set(first + i, block)
        known.tables = [*chunk.blocks]

    def _clear(self, row: int, changes: Changes) -> None:
        """Make a row padding."""
        for name, value in PADDING.items():
            changes.set(self._at[name] + row, value)
        for first in self._tables:
            changes.set(first + row * self._width, 0)
        self._row_of.pop(self._known[row].seq_id, None)
        self._known[row] = self._padding()

    def _padding(self) -> DeviceRow:
        return DeviceRow(tables=[(0,) for _ in self.groups])

    def _apply(self, changes: Changes) -> None:
        if changes.targets:
            targets, sources = upload_pairs((changes.targets, changes.sources), self.memory.device)
            self.memory.index_copy_(0, targets, self.memory[sources])
        if changes.addresses:
            addresses, values = upload_pairs((changes.addresses, changes.values), self.memory.device)
            self.memory.index_copy_(0, addresses, values)

    def _of(self, name: str, rows: int) -> Tensor:
        return self.memory[self._at[name] : self._at[name] + rows]
