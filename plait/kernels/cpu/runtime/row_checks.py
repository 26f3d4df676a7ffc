"""How a tensor's rows lie in memory, as kernels are given it: checked in Python, because a kernel cannot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.ops.registry import OpFacts


@dataclass(frozen=True, slots=True)
class TensorRows:
    """A tensor [count, width] or [count, heads, width] with a dense last dimension; strides in bytes."""

    count: int
    heads: int
    width: int
    row_bytes: int
    head_bytes: int

    @classmethod
    def of(cls, x: Tensor, dtype: torch.dtype = torch.float32) -> TensorRows:
        """Raises ShapeMismatch if a kernel would misread x."""
        if x.dtype != dtype or x.dim() not in (2, 3) or (x.shape[-1] > 1 and x.stride(-1) != 1):
            raise ShapeMismatch(
                f"a kernel wants {dtype} [rows, n] or [rows, heads, n] with a dense last dimension, "
                f"got {x.dtype} {list(x.shape)} with strides {x.stride()}"
            )
        size = x.element_size()
        heads, head_bytes = (x.shape[1], x.stride(1) * size) if x.dim() == 3 else (1, 0)
        return cls(x.shape[0], heads, x.shape[-1], x.stride(0) * size, head_bytes)

    @property
    def strides(self) -> tuple[int, int]:
        return self.row_bytes, self.head_bytes


def dense(name: str, tensor: Tensor, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The tensor of that dtype and shape, dense. Raises ShapeMismatch if it is another."""
    if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ShapeMismatch(
            f"a kernel wants {name} as {dtype} {list(shape)}, dense; got {tensor.dtype} "
            f"{list(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor


@dataclass(frozen=True, slots=True)
class Sequences:
    """Where the sequences of a batch lie: what kernels read per sequence, checked (`frame.take_sequence`)."""

    words: tuple[Tensor, Tensor, Tensor]

    @classmethod
    def of(cls, slots: Tensor, query_start: Tensor, has_history: Tensor) -> Sequences:
        """Raises ShapeMismatch if a kernel would misread them."""
        dense("slots", slots, len(slots), dtype=torch.int64)
        dense("query_start", query_start, len(slots) + 1, dtype=torch.int64)
        dense("has_history", has_history, len(slots), dtype=torch.bool)
        return cls((slots, query_start, has_history))


def float32_rows(facts: OpFacts) -> str | None:
    """The `when` of kernels that compute in float32 and nothing else."""
    return None if facts.dtype == torch.float32 else f"it computes in float32, not in {facts.dtype}"
