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


def float32_rows(facts: OpFacts) -> str | None:
    """The `when` of kernels that compute in float32 and nothing else."""
    return None if facts.dtype == torch.float32 else f"it computes in float32, not in {facts.dtype}"
