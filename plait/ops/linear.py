"""Linear maps over weights in any storage: y = x Wᵀ + b.

The reference decodes the weight each time it is used. The `dense` variant decodes it once, when the model is
built, and costs the memory of plain numbers; kernels that read packed weights register beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.registry import Arguments, op
from plait.quant.weight import Dense, Weight

CASES = [
    dict(rows=1, n_in=64, n_out=32),
    dict(rows=7, n_in=256, n_out=130),
    dict(rows=33, n_in=512, n_out=96),
]


@op(cases=CASES)
def linear(x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """x: [..., in], weight: (out, in) in any format, bias: [out] -> [..., out], in x's dtype."""
    return F.linear(x, weight.dequantize(x.dtype), bias)


@linear.inputs
def _inputs(case: Mapping[str, int], dtype: torch.dtype, device: str) -> Arguments:
    x = torch.randn(case["rows"], case["n_in"], dtype=dtype, device=device)
    w = torch.randn(case["n_out"], case["n_in"], dtype=dtype, device=device) / case["n_in"] ** 0.5
    return (x, Dense(w), torch.randn(case["n_out"], dtype=dtype, device=device)), {}


@dataclass(frozen=True, slots=True)
class Packing:
    """A variant of `linear` that prepares its weight once: `pack` at construction, `apply` at every step."""

    pack: Callable[[Weight, torch.dtype], Any]
    apply: Callable[[Tensor, Any, Tensor | None], Tensor]

    def __call__(self, x: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
        return self.apply(x, self.pack(weight, x.dtype), bias)


dense = Packing(
    pack=lambda weight, dtype: weight.dequantize(dtype).contiguous(),
    apply=F.linear,
)
linear.variant("dense", on="cpu")(dense)
linear.variant("dense", on="cuda")(dense)


class Linear:
    """One or more weights fused row-wise, ready to be called: [..., in] -> [..., out].

    Neighbours of one format are stacked; parts of several (Q4_K, Q6_K) are computed one after the other.
    `bind` is `Weights.bind`; `split` says how tensor parallelism divides the rows ("out") or columns ("in").
    """

    def __init__(
        self,
        weights: Sequence[Weight],
        biases: Sequence[Tensor | None],
        bind: Callable[..., Any],
        dtype: torch.dtype,
        split: Literal["out", "in"] | None = None,
    ) -> None:
        self.split = split
        self.n_in = weights[0].shape[1]
        self.n_out = sum(w.shape[0] for w in weights)
        self._parts: list[tuple[Callable[..., Tensor], Any, Tensor | None]] = []
        pairs = zip(weights, biases, strict=True)
        for _, same in groupby(pairs, key=lambda pair: (pair[0].format, pair[1] is None)):
            weight, bias = _stack(list(same))
            fn = bind(linear, n_in=weight.shape[1], n_out=weight.shape[0], format=weight.format)
            if isinstance(fn, Packing):
                self._parts.append((fn.apply, fn.pack(weight, dtype), bias))
            else:
                self._parts.append((fn, weight, bias))

    @property
    def nbytes(self) -> int:
        """Bytes of its weights as they are kept: packed, if the bound variant packs. Biases not counted."""
        return sum(int(weight.nbytes) for _, weight, _ in self._parts)

    def __call__(self, x: Tensor) -> Tensor:
        outputs = [apply(x, weight, bias) for apply, weight, bias in self._parts]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs, -1)


def _stack(pairs: list[tuple[Weight, Tensor | None]]) -> tuple[Weight, Tensor | None]:
    weights = [w for w, _ in pairs]
    biases = [b for _, b in pairs if b is not None]
    if len(weights) == 1:
        return pairs[0]
    return type(weights[0]).cat(weights), torch.cat(biases) if biases else None
