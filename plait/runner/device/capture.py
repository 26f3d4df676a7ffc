"""A step as a device would capture it, checked on a CPU: its launches, and what no graph of a device may do.

A captured step is replayed without Python. So nothing in it may ask for a value, have a shape that depends on
data, copy to or from the host, or read memory that is neither static nor made in the step. `StepCapture` sees
torch's operators through a dispatch mode, and Triton's kernels through `launch`. Its `replay` runs the same
operators over the same memory, so a step can be replayed here as it would be there.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from plait.errors import CannotRecord
from plait.memory import BlockGroup
from plait.model.decoder import Decoder
from plait.model.layers.layers import Batch, PagedIndex
from plait.model.mixers.registry import list_mixers
from plait.ops.launch import watch_launches
from plait.runner.steps.replay import find_tensors
from plait.state.store import StateStore

# On a CPU these read memory without an operator; on a device they wait for it.
READS = frozenset(
    [
        "tolist",
        "item",
        "numpy",
        "cpu",
        "__bool__",
        "__int__",
        "__float__",
        "__index__",
        "__array__",
        "__contains__",
    ]
)
WAITS = frozenset({"_local_scalar_dense", "is_nonzero", "equal", "item"})
SHAPED_BY_DATA = frozenset(
    [
        "nonzero",
        "nonzero_numpy",
        "_unique",
        "_unique2",
        "unique_dim",
        "unique_consecutive",
        "masked_select",
        "bincount",
    ]
)
FROM_HOST = frozenset({"lift_fresh", "lift_fresh_copy", "_pin_memory"})
INDEXED = frozenset({"index", "index_put", "index_put_", "_index_put_impl_"})
# Memory, no launch.
ALLOCATES = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})


class StepCapture(TorchDispatchMode):
    """Records what a step launches while it is entered. `inputs`: weights, states and static buffers.

    A broken rule raises CannotRecord, or is added to `faults` with its place if not `strict`. Two captures of
    steps of one size are equal in `stream`, whatever the data are, or a value was baked in. `is_dry`: kernels
    are recorded and not run, so what they return is 0, which torch's operators can read as the number of an
    expert; those run all the same. `is_kept` False: the step's memory is given back as it goes, and nothing
    can be replayed.
    """

    def __init__(
        self, inputs: Iterable[Tensor], *, strict: bool = True, is_dry: bool = False, is_kept: bool = True
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._is_dry, self._is_kept = is_dry, is_kept
        self._memory = {_storage(t): i for i, t in enumerate(inputs)}
        self.stream: list[tuple[Any, ...]] = []
        self.launches: list[str] = []
        self.faults: list[str] = []
        self._runs: list[Callable[[], None]] = []
        self._kept: list[Any] = []  # memory of a captured step is its own for ever
        self._strict, self._modes, self._is_paused = strict, ExitStack(), False

    def __enter__(self) -> StepCapture:
        self._modes.enter_context(watch_launches(self))
        self._modes.enter_context(_HostReads(self))
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)  # type: ignore[no-untyped-call]
        self._modes.close()

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> object:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        self._check(name, args, kwargs)
        out = func(*args, **kwargs)
        made = [t for t in find_tensors(out) if _storage(t) not in self._memory]
        for t in made:
            self._memory[_storage(t)] = len(self._memory)
        if not self._is_kept:
            return out
        self._kept += [args, kwargs, out]
        if name in ALLOCATES:
            for t in made if self._is_dry else ():
                t.zero_()
            return out
        shown = (self._show(args), self._show(sorted(kwargs.items())))
        self.stream.append((name, *shown))
        if made or func._schema.is_mutable:
            self.launches.append(name)
            self._runs.append(lambda: _repeat(func, args, kwargs, out if made else None))
        return out

    def record_launch(
        self, name: str, run: Callable[[], None], tensors: Sequence[Tensor], rest: tuple[object, ...]
    ) -> None:
        """Record a launch of a kernel of ours, and run it: now, and at each replay."""
        self._check_memory(name, tensors)
        if self._is_kept:
            self.stream.append((name, self._show(tensors), rest))
            self.launches.append(name)
            self._kept.append(tensors)
            self._runs.append(run)
        if self._is_dry:
            return
        self._is_paused = True  # the interpreter computes with torch, too
        try:
            with _disable_current_modes():
                run()
        finally:
            self._is_paused = False

    @torch.inference_mode()
    def replay(self) -> None:
        """Run the launches again, over what the buffers hold now; results are where they were."""
        for run in self._runs:
            run()

    def break_rule(self, why: str) -> None:
        """Report a rule that the step breaks. Raises CannotRecord if the capture is strict."""
        if self._is_paused:
            return
        if self._strict:
            raise CannotRecord(why)
        frames = [f for f in traceback.extract_stack() if "/plait/" in f.filename and f.filename != __file__]
        place = f"{frames[-1].filename.rpartition('/plait/')[2]}:{frames[-1].lineno}" if frames else "?"
        self.faults.append(f"{place}: {why}")

    def _check(self, name: str, args: Any, kwargs: Any) -> None:
        if name in WAITS:
            self.break_rule(f"{name} asks for a value, which waits for the device")
        if name in SHAPED_BY_DATA:
            self.break_rule(f"the shape that {name} returns depends on data")
        if name == "repeat_interleave" and kwargs.get("output_size") is None and isinstance(args[-1], Tensor):
            self.break_rule("the shape that repeat_interleave returns depends on data, without output_size")
        if name in INDEXED and any(t is not None and t.dtype in (torch.bool, torch.uint8) for t in args[1]):
            self.break_rule(f"{name} by a mask: the shape depends on data")
        if name in FROM_HOST:
            self.break_rule(f"{name} makes a tensor of Python's numbers, which is a copy from the host")
        device = kwargs.get("device")
        if (
            name in ("_to_copy", "to")
            and device is not None
            and any(_is_elsewhere(t, device) for t in find_tensors(args))
        ):
            self.break_rule(f"{name} copies from one device to another")
        self._check_memory(name, list(find_tensors((args, kwargs))))

    def _check_memory(self, name: str, tensors: Iterable[Tensor]) -> None:
        for t in tensors:
            if t.numel() and _storage(t) not in self._memory:
                what = f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}"
                self.break_rule(f"{name} reads memory that is neither static nor of the step: {what}")
                self._memory[_storage(t)] = len(self._memory)

    def _show(self, value: Any) -> Any:
        """A value as `stream` has it: of tensors where they are, not what they hold."""
        if isinstance(value, Tensor):
            return self._memory.get(_storage(value)), value.dtype, tuple(value.shape), value.stride()
        if isinstance(value, list | tuple):
            return tuple(map(self._show, value))
        return value if isinstance(value, int | float | str | None) else str(value)


def decode_batch(groups: Sequence[BlockGroup], seqs: int, blocks: int, store: StateStore) -> Batch:
    """A batch of decodes as a captured step has it: all sequences in block and slot 0, where padding is.

    `blocks`: the width of block tables, which bounds the length of a sequence.
    """
    some = store.tensors[0]

    def ints(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int64, device=some.device)

    rows = torch.arange(seqs + 1, device=some.device)
    return Batch(
        token_ids=ints(seqs),
        positions=ints(seqs),
        query_start=rows,
        seq_lens=ints(seqs) + 1,
        num_decodes=seqs,
        paged={group.name: PagedIndex(ints(seqs, blocks), ints(seqs)) for group in groups},
        state_slots=ints(seqs),
        has_history=torch.ones(seqs, dtype=torch.bool, device=some.device),
        logit_rows=rows[:seqs].clone(),
    )


def batch_tensors(batch: Batch) -> list[Tensor]:
    """Every tensor of a batch: the static buffers of a captured step."""
    fields = [getattr(batch, name) for name in batch.__slots__]
    canvas = batch.canvas
    fields += [canvas.start, canvas.is_place, canvas.is_fresh, canvas.temperatures] if canvas else []
    paged = [t for index in batch.paged.values() for t in (index.block_table, index.slot_mapping)]
    slots = [batch.adapters.slots] if batch.adapters else []
    return [*(t for t in fields if isinstance(t, Tensor)), *paged, *slots]


def capture_step(
    decoder: Decoder, store: StateStore, batch: Batch, *, strict: bool = True, is_dry: bool = False
) -> tuple[StepCapture, Tensor]:
    """The decoder's step over a batch, captured, and its logits. Raises CannotRecord if it is strict.

    A model that is not causal has no step to capture, strict or not: each token needs the whole sequence.
    """
    if not decoder.spec.causal:
        raise CannotRecord("the model is not causal: a step has no fixed form")
    inputs = [*decoder_tensors(decoder), *store.tensors, *batch_tensors(batch)]
    with torch.inference_mode(), StepCapture(inputs, strict=strict, is_dry=is_dry) as capture:
        logits = decoder(batch, store)
    return capture, logits


def decoder_tensors(decoder: Decoder) -> list[Tensor]:
    """Every tensor that a model holds: weights in any storage, tables, what kernels packed."""
    found: dict[int, Tensor] = {}
    # Ours, and those of the plug-ins that have mixers.
    packages = {"plait", *(entry.build.__module__.partition(".")[0] for entry in list_mixers().values())}
    seen: dict[int, object] = {}  # held, because the number of an object that is gone is another's

    def visit(value: object) -> None:
        if id(value) in seen or isinstance(value, str | int | float | type(None) | type):
            return
        seen[id(value)] = value
        if isinstance(value, Tensor):
            found[id(value)] = value
        elif isinstance(value, dict):
            visit(list(value.values()))
        elif isinstance(value, list | tuple):
            for item in value:
                visit(item)
        elif isinstance(value, partial):
            visit((value.args, value.keywords))
        elif type(value).__module__.partition(".")[0] in packages:
            visit(getattr(value, "__dict__", None))
            visit([getattr(value, n, None) for c in type(value).__mro__ for n in getattr(c, "__slots__", ())])
        elif callable(value):
            cells = getattr(value, "__closure__", None) or ()
            visit([cell.cell_contents for cell in cells])
            visit(getattr(value, "__self__", None))

    visit(decoder)
    return list(found.values())


class _HostReads(TorchFunctionMode):
    """Sees the reads that never become an operator on a CPU."""

    def __init__(self, capture: StepCapture) -> None:
        super().__init__()
        self._capture = capture

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in READS:
            self._capture.break_rule(f"{name} asks for a value, which waits for the device")
        return func(*args, **(kwargs or {}))


def _repeat(func: Any, args: Any, kwargs: Any, results: object) -> None:
    """Run an operator again; what it returned gets the new numbers."""
    fresh = func(*args, **kwargs)
    for target, value in zip(find_tensors(results), find_tensors(fresh), strict=False):
        if _storage(value) != _storage(target):
            target.copy_(value)


def _is_elsewhere(t: Tensor, device: torch.device) -> bool:
    """Whether a tensor is on another device; one without a number is the current one of its type."""
    return t.device.type != device.type or device.index not in (None, t.device.index)


def _storage(t: Tensor) -> int:
    """Where a tensor's memory is; of shapes alone ("meta"), which have none, a number of its own."""
    storage = t.untyped_storage()
    return storage.data_ptr() or int(storage._cdata)
