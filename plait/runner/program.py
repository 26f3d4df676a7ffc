"""A CPU's step recorded once and replayed: a *program*, one native call for all layers.

The decoder runs once over static buffers that are as long as the largest step. Its ops record their launches
instead of running them. All that changes from step to step is read from the buffers, so one program serves
every batch, decodes and prompt chunks alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from plait.errors import CannotRecord
from plait.kernels.load import why_not_cached
from plait.memory import BlockGroup
from plait.model.decoder import Decoder
from plait.model.eagle import take_observed
from plait.model.layers.layers import Batch, PagedIndex
from plait.ops.low_rank import AdapterRows
from plait.runner.host.program import HostProgram, ProgramReplay, StepResults
from plait.runner.host.static_batch import Capacity, Found, NativeThreads, StaticBatch
from plait.runner.sampling.sampler import Sampler
from plait.runner.steps.replay import find_tensors
from plait.schedule.plan import StepPlan
from plait.state.store import StateStore

Largest = Callable[[Tensor], tuple[Tensor, Tensor]]


class NativeExecutor(NativeThreads, Protocol):
    """Threads that also record launches (`kernels.cpu.runtime.executor`)."""

    def record(self, tokens: int, logits: int) -> Any: ...
    def keep_rows(self, row_slots: Tensor) -> AbstractContextManager[set[tuple[int, int]]]: ...


# What most calls return: a size, an address. No torch call writes these.
PLAIN = frozenset({int, bool, torch.Size, torch.dtype, torch.device, torch.layout})


class ViewsOnly(TorchFunctionMode):
    """Refuses torch calls that compute, because a replay would not repeat them; views are allowed.

    What a torch function returns must be memory of its arguments, and it must not write. (A dispatch mode
    would also see deeper calls, but costs a second, because it imports torch's compiler.)
    """

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
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


class Recording:
    """A step's launches, recorded. `table`: as threads run them (`kernels.cpu.runtime.executor`).

    `keeps_rows`: it keeps all recurrent state behind the rows that have slots for it.
    """

    def __init__(self, table: Any, keeps_rows: bool) -> None:
        self.table, self.keeps_rows = table, keeps_rows

    @property
    def names(self) -> Sequence[str]:
        """The names of the kernels, in order."""
        return tuple(self.table.names)

    def __str__(self) -> str:
        """The summary that is printed at startup: launches, kernels, and the time to compile them."""
        kernels = {launch.kernel.name: launch.kernel for launch in self.table.launches}
        made = [kernel.compile_s for kernel in kernels.values() if kernel.compile_s]
        text = f"{len(self.names)} launches of {len(kernels)} native kernels, one call"
        once = "" if why_not_cached() else ", once"
        return f"{text}; compiled {len(made)} of them{once}: {sum(made):.1f} s" if made else text


def view_as_batch(static: StaticBatch, groups: Sequence[BlockGroup]) -> Batch:
    """The buffers of a recorded step as the decoder takes them: of its largest step, all of it prompts."""
    view = torch.from_numpy
    pairs = zip(groups, static.tables, static.mappings, strict=True)
    return Batch(
        token_ids=view(static.ids),
        positions=view(static.positions),
        query_start=view(static.starts),
        seq_lens=view(static.lens),
        num_decodes=0,
        paged={group.name: PagedIndex(view(table), view(mapping)) for group, table, mapping in pairs},
        state_slots=view(static.slots),
        has_history=view(static.history),
        logit_rows=view(static.logit_rows),
        adapters=_view_adapters(static),
    )


def _view_adapters(static: StaticBatch) -> AdapterRows | None:
    if static.adapters is None:
        return None
    return AdapterRows(*map(torch.from_numpy, (static.adapters, static.num_adapted, static.adapter_order)))


def record_step(
    decoder: Decoder,
    store: StateStore,
    executor: NativeExecutor,
    static: StaticBatch,
    groups: Sequence[BlockGroup],
    largest: Largest | None,
) -> tuple[Recording, StepResults]:
    """The decoder's step over static buffers. Raises CannotRecord, naming the op that cannot be recorded.

    `largest`: finds the largest of each row of logits; it is left out if it cannot be recorded.
    """
    batch, capacity = view_as_batch(static, groups), static.capacity
    recording = executor.record(capacity.tokens, capacity.logits)
    with recording as table, executor.keep_rows(torch.from_numpy(static.row_slots)) as kept, ViewsOnly():
        hidden = decoder.hidden(batch, store)  # held by the results, so that nothing takes its place
        observed = take_observed(decoder, hidden)
        logits = decoder.logits(hidden, batch)
        found = _record_largest(largest, logits) if largest else None
    slots = {(t.data_ptr(), t.numel()) for t in store.slot_tensors}
    return Recording(table, slots <= kept), StepResults(
        *(hidden.numpy(), logits.numpy(), found, observed.numpy() if observed is not hidden else None)
    )


def _record_largest(largest: Largest, logits: Tensor) -> Found | None:
    """Where each step leaves ids and values of the largest logits; None if that cannot be recorded."""
    try:
        ids, values = largest(logits)
    except CannotRecord:
        return None
    return ids.numpy(), values.numpy()


def keep_planned_rows(plan: StepPlan, executor: NativeExecutor | None) -> AbstractContextManager[object]:
    """Lets the native kernels of a step that runs op by op keep state where its chunks have slots for it."""
    if executor is None or not any(chunk.row_slots for chunk in plan.chunks):
        return nullcontext()
    slots: list[int] = []
    for chunk in plan.chunks:
        slots += [0] * (len(chunk.token_ids) - 1 - len(chunk.row_slots)) + [*chunk.row_slots, 0]
    return executor.keep_rows(torch.tensor(slots))


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
    static = StaticBatch(capacity, groups, store.block_size, has_adapters=decoder.adapters is not None)
    try:
        recording, results = record_step(decoder, store, executor, static, groups, sampler.plain_largest)
    except CannotRecord as error:
        return None, str(error)
    program = HostProgram(executor, recording.table, static, results, keeps_rows=recording.keeps_rows)
    return ProgramReplay(program, sampler.host, recording), str(recording)
