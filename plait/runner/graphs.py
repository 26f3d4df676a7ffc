"""A step recorded once and replayed: on a CPU a *program*, one native call for all layers.

The decoder runs once over static buffers that are as long as the largest step. Its ops record their launches
instead of running them. All that changes from step to step is read from the buffers, so one program serves
every batch, decodes and prompt chunks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.errors import CannotRecord
from plait.kernels.load import why_not_cached
from plait.memory import BlockGroup
from plait.model.decoder import Decoder
from plait.model.layers.layers import Batch, PagedIndex
from plait.schedule.plan import MOST_STEPS, Chunk, StepPlan
from plait.state.store import StateStore

Table = tuple[int, ...]
Largest = Callable[[Tensor], tuple[Tensor, Tensor]]
Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]
# What most calls return: a size, an address. No torch call writes these.
PLAIN = frozenset({int, bool, torch.Size, torch.dtype, torch.device, torch.layout})


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


class ViewsOnly(TorchFunctionMode):
    """Refuses torch calls that compute, because a replay would not repeat them; views are allowed.

    What a torch function returns must be memory of its arguments, and it must not write. (A dispatch mode
    would also see deeper calls, but costs a second, because it imports torch's compiler.)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if type(result) in PLAIN:
            return result
        name = getattr(func, "__name__", str(func))
        if name == "frombuffer":  # how the executor allocates a result
            return result
        made = {t.untyped_storage().data_ptr() for t in _tensors(result)}
        if made:
            made -= {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs or {}))}
        if made or _writes(name) or "out" in (kwargs or {}):
            raise CannotRecord(f"{name} is computed by torch, outside of native kernels")
        return result


def _writes(name: str) -> bool:
    """Whether a function of that name changes its first argument: `add_`, `x[i] = y`, `x += y`."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name != "__index__")


def _tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif isinstance(value, dict):
        yield from _tensors(list(value.values()))


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


class StepProgram:
    """The decoder's step as one native call. Raises CannotRecord, naming the op that cannot be recorded.

    `hidden`: the hidden states of the last call, [tokens, hidden]. `largest`: what the function of that name
    found in each row of logits, None if it cannot be recorded.
    """

    def __init__(
        self,
        decoder: Decoder,
        store: StateStore,
        executor: NativeExecutor,
        static: StaticBatch,
        largest: Largest | None = None,
    ) -> None:
        self._executor, self._static, capacity = executor, static, static.capacity
        with executor.recording(capacity.tokens, capacity.logits) as self._program, ViewsOnly():
            self.hidden = decoder.hidden(static.batch, store)  # held, so that nothing takes its place
            self._logits = decoder.logits(self.hidden, static.batch)
            self.largest = _record_largest(largest, self._logits) if largest else None
        self._rows: dict[int, Tensor] = {}  # the first so many rows of logits, for the counts that occurred
        if self.largest is not None:
            rows = (MOST_STEPS, capacity.seqs)
            self._kept = np.zeros(rows, np.int64), np.zeros(rows, np.float32)
            self._step = np.zeros(1, np.int64)
            self._between = static.following(executor, self.largest, self._kept, self._step)

    @property
    def launches(self) -> Sequence[str]:
        """The names of the kernels, in order."""
        return tuple(kernel.name for kernel in self._program.kernels)

    def __str__(self) -> str:
        """The summary that is printed at startup: launches, kernels, and the time to compile them."""
        kernels = {kernel.name: kernel for kernel in self._program.kernels}
        made = [kernel.compile_s for kernel in kernels.values() if kernel.compile_s]
        text = f"{len(self.launches)} launches of {len(kernels)} native kernels, one call"
        once = "" if why_not_cached() else ", once"
        return f"{text}; compiled {len(made)} of them{once}: {sum(made):.1f} s" if made else text

    def __call__(self, plan: StepPlan) -> Tensor:
        """Logits of the requested rows, [L, vocab] float32: memory that the next call overwrites."""
        tokens, logits = self._static.fill(plan)
        return self._run(tokens, logits, len(plan.chunks))

    def follow(self, token_ids: Sequence[int]) -> Tensor:
        """Logits of the step after a call of decodes. The block of each next token is in its table."""
        count = self._static.follow(token_ids)
        return self._run(count, count, count)

    def several(self, plan: StepPlan) -> Found:
        """Run all steps of a plan of decodes in one call: ids and values of `largest`, which must exist.

        Both are [steps, sequences]: memory that the next call overwrites.
        """
        assert self.largest is not None
        count, _ = self._static.fill(plan)
        self._step[0], last = 0, plan.num_steps - 1
        sizes = {"tokens": count, "logits": count, "seqs": count}
        self._executor.run(self._program, **sizes, steps=plan.num_steps, between=self._between)
        ids, values = self._kept
        ids[last, :count], values[last, :count] = (found[:count] for found in self.largest)
        return ids[: last + 1, :count], values[: last + 1, :count]

    def _run(self, tokens: int, logits: int, seqs: int) -> Tensor:
        self._executor.run(self._program, tokens=tokens, logits=logits, seqs=seqs)
        rows = self._rows.get(logits)
        if rows is None:
            rows = self._rows[logits] = self._logits[:logits]
        return rows


def _record_largest(largest: Largest, logits: Tensor) -> Found | None:
    """Where each step leaves ids and values of the largest logits; None if that cannot be recorded."""
    try:
        ids, values = largest(logits)
    except CannotRecord:
        return None
    return ids.numpy(), values.numpy()


def record_step(
    decoder: Decoder,
    store: StateStore,
    executor: NativeExecutor | None,
    groups: Sequence[BlockGroup],
    capacity: Capacity,
    largest: Largest | None = None,
) -> tuple[StepProgram | None, StaticBatch | None, str]:
    """Record a step: (program, its buffers, what was recorded or why it could not be).

    `largest`: what gives id and value of the largest of each row of logits, in the same call if it can.
    """
    if executor is None:
        return None, None, "there is no executor of native kernels"
    if not decoder.spec.causal:
        return None, None, "the model is not causal: a step has no fixed form"
    static = StaticBatch(capacity, groups, store.block_size)
    try:
        program = StepProgram(decoder, store, executor, static, largest)
    except CannotRecord as error:
        return None, None, str(error)
    return program, static, str(program)
