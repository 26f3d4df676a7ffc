"""The protocol of a weight in some storage, the plain one, and one from the packed-weight cache.

Every format has `shape` (out, in), exact `nbytes`, `dequantize`, row and column slices, concatenation and a
move between devices; `ops.linear` works on any of them through `dequantize`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from plait.errors import ShapeMismatch

PIECE = 1 << 20  # elements decoded at a time: 4 MiB of float32, so the peak does not follow the matrix
DEVICE_PIECE = 1 << 21  # the same on other devices than a CPU: a launch costs as much as a million numbers


@runtime_checkable
class Weight(Protocol):
    """A weight matrix [out, in] in some storage."""

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def format(self) -> str:
        """The name of the storage, like 'float32' or 'Q4_K'."""
        ...

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All weights as numbers, [out, in]."""
        ...

    def gather(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows as numbers: index [n] -> [n, in]. This is how an embedding reads its table."""
        ...

    def rows(self, start: int, stop: int) -> Self: ...
    def cols(self, start: int, stop: int) -> Self:
        """Columns start..stop. Raises ShapeMismatch if that would cut a block of the format."""
        ...

    def pick(self, index: Tensor) -> Self:
        """Some rows in the same storage, in any order, also twice: index [n] int64 -> (n, in).

        Raises ShapeMismatch for a row that is not there.
        """
        ...

    @classmethod
    def cat(cls, parts: Sequence[Self]) -> Self:
        """Row-wise concatenation of parts of one format and width."""
        ...

    def to(self, device: torch.device) -> Self: ...


@dataclass(frozen=True, slots=True)
class Dense:
    """Plain numbers in any float dtype."""

    tensor: Tensor  # [out, in]

    @property
    def shape(self) -> tuple[int, int]:
        rows, cols = self.tensor.shape
        return rows, cols

    @property
    def nbytes(self) -> int:
        return self.tensor.numel() * self.tensor.element_size()

    @property
    def format(self) -> str:
        return str(self.tensor.dtype).removeprefix("torch.")

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        return self.tensor.to(dtype)

    def gather(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        return self.tensor[index].to(dtype)

    def rows(self, start: int, stop: int) -> Dense:
        return Dense(self.tensor[start:stop])

    def cols(self, start: int, stop: int) -> Dense:
        return Dense(self.tensor[:, start:stop])

    def pick(self, index: Tensor) -> Dense:
        return Dense(self.tensor[check_rows(index, self)])

    @classmethod
    def cat(cls, parts: Sequence[Dense]) -> Dense:
        if len({p.tensor.dtype for p in parts}) > 1 or len({p.shape[1] for p in parts}) > 1:
            raise ShapeMismatch(f"cannot stack the rows of {[f'{p.format}{p.shape}' for p in parts]}")
        return Dense(torch.cat([p.tensor for p in parts]))

    def to(self, device: torch.device) -> Dense:
        return Dense(self.tensor.to(device))


def as_tensor(value: Tensor | Weight, dtype: torch.dtype = torch.float32) -> Tensor:
    """Numbers of anything a checkpoint returns; a plain tensor keeps its own dtype."""
    return value if isinstance(value, Tensor) else value.dequantize(dtype)


def as_weight(value: Tensor | Weight, name: str = "a matrix") -> Weight:
    """A tensor [out, in] as a weight. Raises ShapeMismatch, with the name, for what has other dimensions."""
    if isinstance(value, Tensor) and value.ndim != 2:
        raise ShapeMismatch(f"{name}: the file has shape {list(value.shape)}, the model wants two dimensions")
    return Dense(value) if isinstance(value, Tensor) else value


def take_rows(value: Tensor | Weight, start: int, stop: int) -> Tensor | Weight:
    """Rows start..stop of a tensor or a weight, without decoding it."""
    return value[start:stop] if isinstance(value, Tensor) else value.rows(start, stop)


def pick_rows(value: Tensor | Weight, index: Tensor) -> Tensor | Weight:
    """Some rows of a tensor (of its first dimension) or a weight, in any order, without decoding it."""
    return value[index] if isinstance(value, Tensor) else value.pick(index)


def join_stored(parts: Sequence[Tensor | Weight]) -> Tensor | Weight:
    """The rows of all parts, one behind the other, in their own storage. Raises ShapeMismatch."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat([as_tensor(x) for x in parts])
    return type(first).cat([as_weight(x) for x in parts])


def check_rows(index: Tensor, weight: Weight | BlockWeight) -> Tensor:
    """The index, if all rows it names are there: [n], of integers. Raises ShapeMismatch."""
    rows = weight.shape[0]
    if index.dim() != 1 or index.is_floating_point() or index.dtype == torch.bool:
        raise ShapeMismatch(f"rows are picked by integers [n], got {index.dtype} {list(index.shape)}")
    if len(index) and not 0 <= int(index.min()) <= int(index.max()) < rows:
        raise ShapeMismatch(
            f"rows {int(index.min())}..{int(index.max())} of a {weight.format} weight of {list(weight.shape)}"
        )
    return index


def check_range(what: str, start: int, stop: int, size: int, weight: Weight | BlockWeight) -> None:
    """Raises ShapeMismatch if start..stop is no part of 0..size. `what`: "rows" or "columns"."""
    if not 0 <= start <= stop <= size:
        raise ShapeMismatch(f"{what} {start}..{stop} of a {weight.format} weight of {list(weight.shape)}")


def piece_of(device: torch.device) -> int:
    """Elements that are decoded at a time there."""
    return PIECE if device.type == "cpu" else DEVICE_PIECE


def decode_in_pieces(
    decode: Callable[[int, int], Tensor], shape: tuple[int, int], dtype: torch.dtype, device: torch.device
) -> Tensor:
    """The whole matrix, [out, in]: `decode(start, stop)` gives some rows in float32, and they are cast."""
    rows, cols = shape
    out = torch.empty(rows, cols, dtype=dtype, device=device)
    step = max(1, piece_of(device) // max(1, cols))
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        out[start:stop] = decode(start, stop)
    return out


@dataclass(frozen=True, slots=True, eq=False)
class BlockWeight(ABC):
    """What storages in blocks have in common; the tensors among a subclass's fields are all its bytes."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, int]: ...
    @property
    @abstractmethod
    def format(self) -> str: ...
    @abstractmethod
    def _decode(self, start: int, stop: int) -> Tensor:
        """Rows start..stop as numbers, float32."""

    @abstractmethod
    def _take(self, index: Tensor | slice) -> Self:
        """Some rows in the same storage; rows that are there."""

    def _tensors(self) -> dict[str, Tensor]:
        found = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in found if isinstance(value, Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.numel() * tensor.element_size() for tensor in self._tensors().values())

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """All weights as numbers, [out, in]: decoded in float32, a few rows at a time, then cast."""
        device = next(iter(self._tensors().values())).device
        return decode_in_pieces(self._decode, self.shape, dtype, device)

    def gather(self, index: Tensor, dtype: torch.dtype) -> Tensor:
        """index [n] -> [n, in]; only those rows are read and decoded."""
        return self._take(index).dequantize(dtype)

    def rows(self, start: int, stop: int) -> Self:
        """Rows start..stop, a view. Raises ShapeMismatch outside the matrix."""
        check_range("rows", start, stop, self.shape[0], self)
        return self._take(slice(start, stop))

    def pick(self, index: Tensor) -> Self:
        """Some rows, copied. Raises ShapeMismatch for a row that is not there."""
        return self._take(check_rows(index, self))

    def to(self, device: torch.device) -> Self:
        return replace(self, **{name: tensor.to(device) for name, tensor in self._tensors().items()})


def stack_key(weight: Weight) -> Hashable:
    """Weights with equal keys can be joined by `cat`: the format, and what else a storage adds."""
    return getattr(weight, "stack_key", weight.format)


@runtime_checkable
class Scalable(Protocol):
    """A weight with rows that can be multiplied without decoding it."""

    def times(self, factor: Tensor) -> Weight:
        """factor: float32, one number [] or one for each row [out]."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class CachedWeight:
    """What a variant of `linear` made of a weight (out, in) in an earlier run, and would make of it again.

    `format`: of the weight; `rounding`: what its inputs are rounded to; `layout`: the fields of the
    variant's own description of its tiles; `tiles`: uint8, at a multiple of 64 bytes; `order`: int32 [in] or
    None, which input a column belongs to.
    """

    format: str
    shape: tuple[int, int]
    rounding: Any
    layout: tuple[Any, ...]
    tiles: Tensor
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return self.tiles.numel()

    @property
    def stack_key(self) -> Hashable:
        """No two of them are stacked: what could be, was so when it was packed."""
        return id(self)
