"""The tensors that together are one weight, read with their shapes and numbers checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from plait.checkpoint.quantized.scheme import Options
from plait.errors import BadFile, ShapeMismatch, UnsupportedFormat
from plait.quant.weight import Weight

FLOATS = ("float16", "bfloat16", "float32")


class Files(Protocol):
    """What is read: `SafetensorsFiles`, or what a test has instead."""

    def __contains__(self, name: object) -> bool: ...
    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def format_of(self, name: str) -> str: ...
    def nbytes(self, name: str) -> int: ...
    def read(self, name: str) -> Tensor: ...
    def release(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight that is there: its shape as a plain checkpoint has it, its storage, and how it is read.

    check: what must be checked before the first read, where checking costs more than reading (a stack
    is read once for each expert).
    """

    shape: tuple[int, ...]
    format: str
    read: Callable[[], Weight]
    check: Callable[[], object] = lambda: None


@dataclass(frozen=True, slots=True)
class WeightParts:
    """The tensors of the weight `name`. `names`: which part it is -> the tensor's name in the files."""

    name: str
    names: Mapping[str, str]
    files: Files
    options: Options

    def __contains__(self, part: object) -> bool:
        return part in self.names

    def shape(self, part: str) -> tuple[int, ...]:
        return self.files.shape(self.names[part])

    def dtype(self, part: str) -> str:
        return self.files.format_of(self.names[part])

    def need(self, part: str, *dtypes: str, dims: tuple[int, ...] = (2,)) -> tuple[int, ...]:
        """The shape of a part that must be there. Raises BadFile, or ShapeMismatch for its dimensions."""
        if part not in self.names:
            raise BadFile(
                f"{self.name}: its {part} is missing; the file has {', '.join(sorted(self.names.values()))}"
            )
        if self.dtype(part) not in dtypes:
            raise BadFile(f"{self.names[part]}: is {self.dtype(part)}; expected {' or '.join(dtypes)}")
        shape = self.shape(part)
        if len(shape) not in dims or 0 in shape:
            wanted = " or ".join(map(str, dims))
            raise ShapeMismatch(
                f"{self.names[part]}: {list(shape)}; expected {wanted} dimensions, none of them 0"
            )
        return shape

    def expect(self, part: str, shape: tuple[int, ...], *dtypes: str) -> None:
        """Raises BadFile or ShapeMismatch unless a part is there in just this shape."""
        if self.need(part, *dtypes, dims=(len(shape),)) != shape:
            raise ShapeMismatch(
                f"{self.names[part]}: the file has shape {list(self.shape(part))}, the weight's other "
                f"tensors want {list(shape)}"
            )

    def read(self, part: str) -> Tensor:
        return self.files.read(self.names[part])

    def finite(self, part: str) -> Tensor:
        """A part that must be finite numbers, in its own dtype. Raises BadFile."""
        found = self.read(part)
        numbers = found.float() if found.element_size() == 1 else found
        if not bool(numbers.isfinite().all()):
            raise BadFile(f"{self.names[part]}: holds numbers that are not finite; the file is damaged")
        return found

    def exponents(self, part: str) -> Tensor:
        """Bytes s that stand for 2**(s - 127), as float32. Raises BadFile as `check_exponents`."""
        self.check_exponents(part)
        return self.read(part).view(torch.uint8).view(torch.float8_e8m0fnu).float()

    def check_exponents(self, part: str) -> None:
        """Raises BadFile if there is a byte that stands for NaN."""
        if bool((self.read(part).view(torch.uint8) == 255).any()):
            raise BadFile(f"{self.names[part]}: holds scales that are no numbers; the file is damaged")

    def number(self, part: str) -> float:
        """A part of one number. Raises BadFile unless it is one, finite and not zero."""
        if part not in self.names or prod(self.shape(part)) != 1:
            raise BadFile(f"{self.name}: its {part} must be there and one number")
        value = float(self.finite(part).flatten()[0])
        if value == 0:
            raise BadFile(f"{self.names[part]}: is zero; the file is damaged")
        return value

    def agree(self, what: str, found: int, said: int | None) -> int:
        """What the tensors show, if the config does not say otherwise. Raises ShapeMismatch."""
        if said is not None and said != found:
            raise ShapeMismatch(f"{self.name}: the config says {what} {said}, its tensors show {found}")
        return found

    def unread(self, why: str) -> UnsupportedFormat:
        shown = ", ".join(f"{name} ({self.files.format_of(name)})" for name in sorted(self.names.values()))
        return UnsupportedFormat(f"{self.name}: {why}; it is stored as {shown}"[:600])
