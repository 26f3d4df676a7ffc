"""The same layout in another storage: every tensor keeps its name, the other files stay as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod

import torch
from torch import Tensor

from plait.checkpoint.storages import Checkpoint
from plait.convert.plan.choose_storage import DOWN, GATE_UP, is_map
from plait.convert.plan.source import Model, NeededTensor
from plait.convert.plan.tensor_plan import Made, TensorPart
from plait.errors import PlaitError
from plait.families.common.recipes import expert_rows
from plait.quant.weight import Dense, Weight, as_tensor

MATRIX = "#"  # between the name of a stack and the number of a matrix in it
_FAULTS = (PlaitError, RuntimeError, IndexError, TypeError, ValueError, AttributeError)


class Copied:
    """Tensors as files have them, whatever they are to the model."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.wanted: Mapping[str, NeededTensor] = {
            name: NeededTensor(checkpoint.shape(name), name, {}) for name in checkpoint.names()
        }

    def read(self, name: str) -> Tensor | Weight:
        return self.checkpoint.read(name)

    def list_made(self) -> list[Made]:
        """All of them, to be written again byte by byte."""
        return [Made(name, wanted.shape, (TensorPart(name),), ()) for name, wanted in self.wanted.items()]


class PassthroughTarget:
    """A checkpoint under its own names. A stack's matrices have names, too: the stack's, `#` and a number."""

    def __init__(self, model: Model) -> None:
        self.checkpoint: Checkpoint = model.checkpoint
        self.wanted: dict[str, NeededTensor] = {
            name: NeededTensor(self.checkpoint.shape(name), name, {}) for name in self.checkpoint.names()
        }
        self._model = model
        self._lies: dict[tuple[str, tuple[int, ...]], str] = {}
        self._roles: dict[str, list[str]] = {}
        for ours, wanted in model.wanted.items():
            for source in wanted.sources:
                self._roles.setdefault(source, []).append(ours)

    def read(self, name: str) -> Tensor | Weight:
        stack, mark, number = name.rpartition(MATRIX)
        if not mark:
            return self.checkpoint.read(name)
        return expert_rows(self.checkpoint.read(stack), int(number), self.wanted[stack].shape[0])

    def list_made(self) -> list[Made]:
        """All its tensors, those too that no mixer reads."""
        return [self._make(name, wanted.shape) for name, wanted in list(self.wanted.items())]

    def apart(self, made: Sequence[Made]) -> list[Made]:
        """The same with stacks of experts taken apart, as checkpoints are published that pack them."""
        return [part for one in made for part in self._apart(one)]

    def _apart(self, made: Made) -> Iterator[Made]:
        is_known = made.name.endswith((GATE_UP, DOWN)) and is_map(made) and len(made.shape) == 3
        if not is_known or made.turned or made.is_odd:
            yield made
            return
        stem, _, kind = made.name.rpartition(".")
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        count, rows, cols = made.shape
        size = rows // len(names)
        for number in range(count):
            matrix = f"{made.name}{MATRIX}{number}"
            self.wanted[matrix] = NeededTensor((rows, cols), made.name, {})
            for n, name in enumerate(names):
                part = TensorPart(matrix, rows=torch.arange(n * size, (n + 1) * size))
                yield Made(f"{stem}.{number}.{name}.weight", (size, cols), (part,), made.roles)

    def _make(self, name: str, shape: tuple[int, ...]) -> Made:
        roles = tuple(self._roles.get(name, ()))
        made = Made(name, shape, (TensorPart(name),), roles)
        if len(shape) < 3 or not is_map(made):
            return made
        is_packed = not isinstance(self.checkpoint.read(name), Tensor)
        match self._how_it_lies(name, shape, roles, is_packed):
            case "alike":
                return made
            case "turned":
                return replace(made, is_packed=is_packed, turned=self._turn(name, shape, roles, is_packed))
            case _:
                return replace(made, is_packed=is_packed, is_odd=True)

    def _turn(self, name: str, shape: tuple[int, ...], roles: tuple[str, ...], is_packed: bool) -> Made:
        """The same stack the other way round, a matrix at a time."""
        count, rows, cols = shape
        parts = []
        for number in range(count):
            matrix = f"{name}{MATRIX}{number}"
            self.wanted[matrix] = NeededTensor((rows, cols), name, {})
            parts.append(TensorPart(matrix, fn=_transpose))
        return Made(name, (count, cols, rows), tuple(parts), roles, is_packed=not is_packed)

    def _how_it_lies(self, name: str, shape: tuple[int, ...], roles: Sequence[str], is_packed: bool) -> str:
        """How a recipe reads a packed stack, in which matrices lie one below the other.

        "alike": as it reads a plain one; "turned": as a plain one turned; "odd": neither. It is the same for
        all stacks of one name and shape.
        """
        key = re.sub(r"\d+", "0", name), shape
        if key not in self._lies:
            tried = ("alike", "turned") if len(shape) == 3 else ("alike",)
            ends = (roles[0], roles[-1])
            fitting = (way for way in tried if all(self._reads(ours, name, way, is_packed) for ours in ends))
            self._lies[key] = next(fitting, "odd")
        return self._lies[key]

    def _reads(self, ours: str, name: str, way: str, is_packed: bool) -> bool:
        """Whether a recipe reads a stack this `way`.

        It runs on stacks that are numbered by rows and by columns, in both forms.
        """
        wanted, (*stack, rows, cols) = self._model.wanted[ours], self.wanted[name].shape
        if isinstance(wanted.source, str):
            return False
        if way == "turned" and not is_packed:
            rows, cols = cols, rows  # of what is packed; nothing is copied below, these are views
        others: list[object] = [torch.zeros(()).expand(self.checkpoint.shape(s)) for s in wanted.sources]
        at = wanted.sources.index(name)
        lines = prod(stack) * rows
        for line in (
            torch.arange(lines, dtype=torch.float32)[:, None],
            torch.arange(cols, dtype=torch.float32),
        ):
            packed = line.expand(lines, cols)
            plain = packed.view(*stack, rows, cols)
            forms = (plain.mT if way == "turned" else plain, Dense(packed))
            try:
                found = [
                    as_tensor(wanted.source.fn(*others[:at], form, *others[at + 1 :], **wanted.fields))
                    for form in forms
                ]
            except _FAULTS:
                return False
            if not torch.equal(*found):
                return False
        return True


def _transpose(matrix: Tensor) -> Tensor:
    return matrix.T
