"""Find the first op at which two ways of computing the same tokens diverge, bit for bit.

A trace wraps the ops that are bound on a decoder: a wrapper calls its op and looks at the result. The ops
are put back at the end, so nothing is traced unless requested.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.model.decoder import Decoder
from plait.ops.registry import REGISTRY
from plait.schedule.plan import Chunk, SamplingBatch, StepPlan, Ticket

Watch = Callable[[str, str, object], None]  # where an op is bound, its name, what it returned
Key = tuple[int, int]  # a position of the sequence, an op's place in the order of calls
OWNERS = ("plait.model.", "plait.ops.linear")  # modules of the objects that hold bound ops
AFTER_ROWS = ("_take_rows", "head")  # places with the rows of logits only, not of all tokens


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """The first op with another result, and by how much it differs (`largest`, infinite if it is no number).

    `where`: a branch, or an end of the model; `part`: which of its ops; `rows`: tokens in that step.
    """

    where: str
    part: str
    op: str
    position: int
    largest: float
    rows: int

    def __str__(self) -> str:
        name = f"{self.op} ({self.part})" if self.part else self.op
        place = f"{self.where}: {name} differs first, at position {self.position}"
        return f"{place} (max |d| = {self.largest:.3g}), in a step of {self.rows} tokens"


def is_default_composition(value: object) -> bool:
    """Whether a bound callable is a fused op's parts, which are bound where no kernel of it is."""
    found = (op.composition for op in REGISTRY.values())
    return isinstance(value, functools.partial) and any(
        made is not None and made.is_default and made.compute is value.func for made in found
    )


def op_names() -> Mapping[object, str]:
    """Every function that may be bound for an op, with the op's name."""
    names: dict[Any, str] = {}
    for op in REGISTRY.values():
        composed = [op.composition.compute] if op.composition else []
        for fn in (op.reference, *composed, *(variant.fn for variant in op.variants)):
            names[fn] = op.name
            if (apply := getattr(fn, "apply", None)) is not None:  # of a variant that packs its weight
                names[apply] = op.name
    return names


def op_of(value: object, names: Mapping[object, str]) -> str | None:
    """The op that a bound callable computes, or None if it is something else."""
    while isinstance(value, functools.partial):
        value = value.func
    if not callable(value) or type(value).__hash__ is None:
        return None
    return names.get(value) or names.get(type(value))  # itself, or its class: a variant with state


@contextmanager
def watch_ops(decoder: Decoder, watch: Watch) -> Iterator[None]:
    """Inside, `watch` sees what every op of this decoder returns, in the order of calls."""
    replacing = _Replacing(watch, op_names())
    try:
        for name, value in [*vars(decoder).items()]:
            if name != "branches":
                replacing.attribute(decoder, name, value, name)
        for (name, _), branch in zip(decoder.spec.branches(), decoder.branches, strict=True):
            replacing.visit(branch, name)
        yield
    finally:
        replacing.undo()


class _Replacing:
    """Replaces each bound op in a tree of objects with a wrapper, and remembers the op to put it back."""

    def __init__(self, watch: Watch, names: Mapping[object, str]) -> None:
        self._watch, self._names = watch, names
        self._undo: list[tuple[object, str, object]] = []
        self._seen: set[int] = set()
        self._is_inside = False

    def undo(self) -> None:
        for owner, name, value in reversed(self._undo):
            setattr(owner, name, value)

    def visit(self, owner: object, path: str) -> None:
        if id(owner) in self._seen:
            return
        self._seen.add(id(owner))
        for name, value in [*vars(owner).items()]:
            self.attribute(owner, name, value, f"{path}.{name}")

    def attribute(self, owner: object, name: str, value: object, path: str) -> None:
        made = self._replace(value, path)
        if made is not value:
            self._undo.append((owner, name, value))
            setattr(owner, name, made)

    def _replace(self, value: Any, path: str) -> Any:
        if is_default_composition(value):
            return functools.partial(value.func, *(self._replace(part, path) for part in value.args))
        if (op := op_of(value, self._names)) is not None:
            return self._wrap_op(value, path, op)
        if type(value) in (list, tuple):
            made = [self._replace(item, path) for item in value]
            same = all(new is old for new, old in zip(made, value, strict=True))
            return value if same else type(value)(made)
        if type(value).__module__.startswith(OWNERS) and hasattr(value, "__dict__"):
            self.visit(value, getattr(value, "name", path))  # parallel mixers have names of their own
        return value

    def _wrap_op(self, fn: Callable[..., object], path: str, op: str) -> Callable[..., object]:
        """A wrapper of an op. It skips calls by other ops: their number may depend on data (experts)."""

        @functools.wraps(fn, assigned=())
        def call(*args: object, **kwargs: object) -> object:
            if self._is_inside:
                return fn(*args, **kwargs)
            self._is_inside = True
            try:
                result = fn(*args, **kwargs)
            finally:
                self._is_inside = False
            self._watch(path, op, result if result is not None else kwargs.get("out"))
            return result

        return call


class WrappedRunner(Protocol):
    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket: ...


@dataclass(slots=True)
class Trace:
    """The results of ops at each position of one sequence, observed while plans run (`TracedRunner`).

    `token_ids`: the sequence as both forms agree on it; what was computed from other tokens (a draft that
    was not accepted) is left out. `visit(key, path, op, row, rows)` gets every row of a result that belongs
    to one of its positions; `rows`: how many the step had.
    """

    token_ids: Sequence[int]
    visit: Callable[[Key, str, str, Tensor, int], None]
    seq_id: int | None = None
    _plan: StepPlan | None = None
    _calls: int = 0

    def begin(self, plan: StepPlan) -> None:
        self._plan, self._calls = plan, 0

    def watch(self, path: str, op: str, result: object) -> None:
        """One op's result: its rows are the step's tokens, or those with logits."""
        self._calls += 1
        if self._plan is None:
            return
        tensors = [result] if isinstance(result, Tensor) else result
        if not isinstance(tensors, tuple | list):
            return
        is_end = path.startswith(AFTER_ROWS)
        sizes = [chunk.num_logits if is_end else len(chunk.token_ids) for chunk in self._plan.chunks]
        for n, tensor in enumerate(tensors):
            if isinstance(tensor, Tensor) and tensor.ndim and tensor.shape[0] == sum(sizes):
                self._rows(tensor, sizes, (self._calls * 8 + n, path, op))

    def _rows(self, tensor: Tensor, sizes: Sequence[int], call: tuple[int, str, str]) -> None:
        start, (order, path, op) = 0, call
        for chunk, size in zip(self._plan.chunks if self._plan else (), sizes, strict=True):
            if chunk.seq_id == self.seq_id:
                first = chunk.end - size  # rows with logits are a chunk's last
                for position in range(first, min(chunk.start + self._num_known(chunk), chunk.end)):
                    row = tensor[start + position - first]
                    self.visit((position, order), path, op, row, sum(sizes))
            start += size

    def _num_known(self, chunk: Chunk) -> int:
        """How many of a chunk's first tokens are those of the sequence."""
        known = self.token_ids[chunk.start : chunk.end]
        pairs = zip(chunk.token_ids, known, strict=False)
        return next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(known), len(chunk.token_ids)))


@dataclass(slots=True)
class TracedRunner:
    """A runner with a trace that observes its steps."""

    runner: WrappedRunner
    trace: Trace

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        self.trace.begin(plan)
        return self.runner.launch(plan, sampling)


@dataclass(slots=True)
class Digests:
    """Digests of every row of the plain run, small enough to keep them all."""

    rows: dict[Key, bytes] = field(default_factory=dict)

    def visit(self, key: Key, path: str, op: str, row: Tensor, rows: int) -> None:
        self.rows[key] = digest(row)


@dataclass(slots=True)
class Parting:
    """Compares another run with the digests: the first row that differs, by position and then by op."""

    expected: Digests
    first: Key | None = None
    found: tuple[str, str, Tensor, int] | None = None
    num_compared: int = 0

    def visit(self, key: Key, path: str, op: str, row: Tensor, rows: int) -> None:
        want = self.expected.rows.get(key)
        if want is None or (self.first is not None and key >= self.first):
            return
        self.num_compared += 1
        if digest(row) != want:
            self.first, self.found = key, (path, op, row.detach().clone(), rows)


@dataclass(slots=True)
class OneRow:
    """Keeps the row of one key."""

    wanted: Key
    row: Tensor | None = None

    def visit(self, key: Key, path: str, op: str, row: Tensor, rows: int) -> None:
        if key == self.wanted:
            self.row = row.detach().clone()


def digest(row: Tensor) -> bytes:
    """A hash of a tensor's bits."""
    bits = row.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy()
    return hashlib.blake2b(bits.tobytes(), digest_size=12).digest()


def place_of(parting: Parting, plain: Tensor) -> FirstDifference:
    """Describe the first difference in words and numbers; `plain`: the row as it should be."""
    assert parting.first is not None
    assert parting.found is not None
    path, op, row, rows = parting.found
    gap = (row.double() - plain.double()).abs()
    largest = float(gap.nan_to_num(nan=torch.inf).max())
    where, part = _words(path)
    return FirstDifference(where, part, op, parting.first[0], largest, rows)


def _words(path: str) -> tuple[str, str]:
    """`layers.3.attn.mixer.qkv._parts` -> (`layer 3, attn`, `qkv`)."""
    names = [name for name in path.split(".") if name != "mixer" and not name.startswith("_")]
    if len(names) > 2 and names[0] == "layers":
        return f"layer {names[1]}, {names[2]}", ".".join(names[3:])
    return {"embed": "the embedding", "norm": "the last norm"}.get(path.split(".")[0], "the head"), ""
