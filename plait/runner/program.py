"""A CPU's step recorded once and replayed: a *program*, one native call for all layers.

The decoder runs once over static buffers that are as long as the largest step. Its ops record their launches
instead of running them. All that changes from step to step is read from the buffers, so one program serves
every batch, decodes and prompt chunks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.errors import CannotRecord
from plait.kernels.load import why_not_cached
from plait.memory import BlockGroup
from plait.model.decoder import Decoder
from plait.runner.replay import add_pooled, find_tensors
from plait.runner.sampler import Sampler, is_greedy
from plait.runner.static_batch import Capacity, Found, NativeExecutor, StaticBatch
from plait.schedule.plan import MOST_STEPS, Done, Sampled, SamplingBatch, StepPlan
from plait.state.store import StateStore

Largest = Callable[[Tensor], tuple[Tensor, Tensor]]
# What most calls return: a size, an address. No torch call writes these.
PLAIN = frozenset({int, bool, torch.Size, torch.dtype, torch.device, torch.layout})


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
        made = {t.untyped_storage().data_ptr() for t in find_tensors(result)}
        if made:
            made -= {t.untyped_storage().data_ptr() for t in find_tensors((args, kwargs or {}))}
        if made or _writes(name) or "out" in (kwargs or {}):
            raise CannotRecord(f"{name} is computed by torch, outside of native kernels")
        return result


def _writes(name: str) -> bool:
    """Whether a function of that name changes its first argument: `add_`, `x[i] = y`, `x += y`."""
    in_place = name.endswith("_") and not name.endswith("__")
    return in_place or name == "__setitem__" or (name.startswith("__i") and name != "__index__")


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


class ProgramReplay:
    """Replays a program for every plan that fits it, and samples from what it computes (a `Replay`)."""

    def __init__(self, program: StepProgram, static: StaticBatch, sampler: Sampler) -> None:
        self.program, self.static, self._sampler = program, static, sampler

    @property
    def launches(self) -> Sequence[str]:
        """The names of the kernels of a step, in order."""
        return self.program.launches

    def describe(self) -> str:
        """What was recorded, in a line."""
        return str(self.program)

    def fits(self, plan: StepPlan) -> bool:
        """Whether the plan is no larger than the program."""
        return self.static.fits(plan)

    def forget(self) -> None:
        """A step failed: nothing to do, because `fill` writes all that a step reads."""

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Done:
        """Run the steps of a plan that fits."""
        program = self.program
        if plan.num_steps > 1:
            return Done(self._several(plan, sampling))
        # What torch need not do is most of what a replay saves: behind the model's weights its code is cold.
        logits = program(plan)
        return Done(add_pooled(plan, program.hidden, self._sampler.sample(logits, sampling, program.largest)))

    def _several(self, plan: StepPlan, sampling: SamplingBatch) -> list[Sampled]:
        """Run several decode steps of one plan, each of which computes what the last one sampled."""
        program = self.program
        if program.largest is not None and is_greedy(sampling):
            return self._sampler.likeliest(*program.several(plan))
        tokens = [a.token_ids[0] for a in self._sampler.sample(program(plan), sampling, program.largest)]
        steps = [tokens]
        for i in range(1, plan.num_steps):
            tokens = self._sampler.follow(program.follow(tokens), sampling, i, program.largest)
            steps.append(tokens)
        return [Sampled(ids) for ids in zip(*steps, strict=True)]


def record_program(
    decoder: Decoder,
    store: StateStore,
    executor: NativeExecutor | None,
    groups: Sequence[BlockGroup],
    capacity: Capacity,
    sampler: Sampler,
) -> tuple[ProgramReplay | None, str]:
    """Record a step for a CPU: what replays it, and what was recorded or why it could not be.

    The largest of each row of logits is found in the same call, if the sampler's function can be recorded.
    """
    if executor is None:
        return None, "there is no executor of native kernels"
    if not decoder.spec.causal:
        return None, "the model is not causal: a step has no fixed form"
    static = StaticBatch(capacity, groups, store.block_size)
    try:
        program = StepProgram(decoder, store, executor, static, sampler.plain_largest)
    except CannotRecord as error:
        return None, str(error)
    return ProgramReplay(program, static, sampler), str(program)
