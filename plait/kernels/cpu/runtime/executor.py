"""The executor: threads that run kernels of Numba over tensors, now or recorded for later.

Recording is how a decoder becomes a *program*: the same model code runs once, its launches are kept instead
of run, and replay is one native call (`threads.Threads.run`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CannotRecord
from plait.kernels.cpu.codegen.kernel import Kernel
from plait.kernels.cpu.runtime.frame_words import LINE, LOGITS, TOKENS
from plait.kernels.cpu.runtime.loops import native_loops
from plait.kernels.cpu.runtime.threads import (
    Bytes,
    Launchable,
    LaunchTable,
    Longs,
    Threads,
    allocate_aligned,
    argument,
    is_address,
)


@dataclass(frozen=True, slots=True)
class RecordedLaunch:
    """A recorded launch: the words of its arguments, and its tensors outside of the arena.

    addresses: places of the words that are addresses of memory.
    """

    kernel: Kernel
    words: Longs
    held: tuple[Tensor, ...]
    addresses: frozenset[int]


@dataclass(slots=True)
class RecordedProgram(LaunchTable):
    """A recorded step. `tokens`, `logits`: the sizes that stand for "as many as the step has"."""

    tokens: int = 0
    logits: int = 0
    launches: list[RecordedLaunch] = field(default_factory=list)
    blocks: list[Bytes] = field(default_factory=list)  # of the arena

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kernels, in order."""
        return tuple(launch.kernel.name for launch in self.launches)


class Arena:
    """Memory of a recording: what the model lets go of is used again by what it computes later."""

    LARGER = 4  # times what is needed that a block may have: a larger one is left for what is larger

    def __init__(self, blocks: list[Bytes]) -> None:
        self._blocks = blocks
        self._free: list[Bytes] = []
        self._spans: list[tuple[int, int]] = []  # addresses of all blocks

    def take(self, nbytes: int) -> Bytes:
        """The smallest block that is free and large enough, or a new one."""
        fitting = [i for i, one in enumerate(self._free) if nbytes <= one.nbytes <= self.LARGER * nbytes]
        best = min(fitting, key=lambda i: self._free[i].nbytes, default=None)
        block = self._make(nbytes) if best is None else self._free.pop(best)
        view = block[:nbytes]
        weakref.finalize(view, self._free.append, block)
        return view

    def _make(self, nbytes: int) -> Bytes:
        block = allocate_aligned(nbytes)
        start = int(block.ctypes.data)
        self._blocks.append(block)
        self._spans.append((start, start + max(nbytes, 1)))
        return block

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is memory of this recording."""
        at = tensor.data_ptr()
        return any(start <= at < end for start, end in self._spans)


class Executor(Threads):
    """Runs kernels on `threads` threads, or records them."""

    def __init__(self, threads: int, prefill: str = "same") -> None:
        self.prefill = prefill  # read by variants of linear layers: "bf16" allows other sums in long steps
        self._program: RecordedProgram | None = None
        self._arena: Arena | None = None
        self._row_slots: Tensor | None = None
        self._kept: set[tuple[int, int]] = set()
        super().__init__(threads, native_loops())

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for a result, not initialised."""
        if self._arena is None:
            return torch.empty(shape, dtype=dtype)
        count = int(np.prod(shape))
        block = self._arena.take(max(count, 1) * dtype.itemsize)
        return torch.frombuffer(block, dtype=dtype, count=count).view(shape)

    def launch(
        self, kernel: Launchable, *args: object, rows: int, seqs: int = 0, scratch: int = 0, shared: int = 0
    ) -> None:
        """Run a kernel, as `Threads.launch`, or record it: its tensors are kept alive in a recording."""
        if self._program is None:
            super().launch(kernel, *args, rows=rows, seqs=seqs, scratch=scratch, shared=shared)
            return
        assert isinstance(kernel, Kernel)
        words = [0, 0, *map(argument, args)]
        self._record(self._program, kernel, words, args, rows, (scratch, shared))

    @contextmanager
    def record(self, tokens: int, logits: int) -> Iterator[RecordedProgram]:
        """Keep launches instead of running them. First dimensions `tokens`, `logits` mean the step's own."""
        with self._lock:
            program = RecordedProgram(tokens=tokens, logits=logits)
            self._program, self._arena = program, Arena(program.blocks)
            try:
                yield program
            finally:
                self._program = self._arena = None
            program.seal()

    @contextmanager
    def keep_rows(self, row_slots: Tensor) -> Iterator[set[tuple[int, int]]]:
        """Keep recurrent state behind single rows, in the launches within. Gives the states that are kept.

        row_slots: int64 [rows], the slot that gets the state behind each row, 0: none of its own. The set has
        address and size of each tensor that a kernel keeps; others are moved on in their slots alone.
        """
        self._row_slots, self._kept = row_slots, set()
        try:
            yield self._kept
        finally:
            self._row_slots = None

    def row_slots_of(self, state: Tensor) -> Tensor | None:
        """Where a kernel has to keep `state` behind each row, see `keep_rows`; None: nowhere."""
        if self._row_slots is not None:
            self._kept.add((state.data_ptr(), state.numel()))
        return self._row_slots

    @property
    def is_recording(self) -> bool:
        return self._program is not None

    def _record(
        self,
        program: RecordedProgram,
        kernel: Kernel,
        words: list[int],
        args: Any,
        rows: int,
        need: tuple[int, int],
    ) -> None:
        places: Mapping[int, int] = {program.tokens: TOKENS, program.logits: LOGITS}
        if rows not in places:
            raise CannotRecord(
                f"{kernel.name} works on {rows} rows, which is neither tokens nor rows of logits"
            )
        words[0] = 8 * places[rows]
        words[1] = self.counters + LINE * (program.count & 1)
        array = np.array(words, np.int64)
        # Tensors of the arena are kept by it, and come back to it: only what was there before is held here.
        held = tuple(a for a in args if isinstance(a, Tensor) and not (self._arena and self._arena.holds(a)))
        addresses = frozenset((1, *(i for i, value in enumerate(args, 2) if is_address(value))))
        program.launches.append(RecordedLaunch(kernel, array, held, addresses))
        program.entries += (kernel.address, array.ctypes.data)
        program.scratch = max(program.scratch, need[0])
        program.shared = max(program.shared, need[1])
