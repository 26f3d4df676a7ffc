"""The linear layers of all experts of a layer as one: weights that a kernel finds by the expert's number."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from plait.ops.expert_low_rank import AddedToExperts
from plait.ops.linear import Linear
from plait.quant.planes import Planes
from plait.quant.stack import TensorStack
from plait.quant.weight import Weight, stack_key

log = logging.getLogger("plait")
Pack = Callable[[Weight, torch.dtype], object]  # a weight -> a tensor [out, in], Planes, or the weight itself


class ExpertStack:
    """One linear layer for each of `count` experts, all [n_in] -> [n_out], with weights that `pack` prepared.

    parts: a stack for each run of rows of one storage (gate and up are one run if they are stored alike);
    widths: its rows; bias: [count, n_out] in `dtype`, or None. Experts of different storages are kept as
    plain numbers, all of them.
    """

    def __init__(self, count: int, dtype: torch.dtype, pack: Pack) -> None:
        self.count, self.dtype = count, dtype
        self.parts: list[TensorStack] = []
        self.widths: list[int] = []
        self.n_in = self.n_out = 0
        self.bias: Tensor | None = None
        self.added: AddedToExperts | None = None  # what adapters add to its result, if it may have some
        self._pack, self._is_plain = pack, False

    @classmethod
    def from_linears(cls, linears: Sequence[Linear], dtype: torch.dtype, pack: Pack) -> ExpertStack:
        """From layers with weights that their variant keeps as they are stored."""
        stack = cls(len(linears), dtype, pack)
        for e, one in enumerate(linears):
            weights, biases, _ = zip(*one.parts, strict=True)
            stack.put(e, weights, biases)
        return stack

    def put(self, e: int, weights: Sequence[Weight], biases: Sequence[Tensor | None]) -> None:
        """Expert e: its weights, row-wise one under the other, and the bias of each."""
        runs = [list(same) for _, same in groupby(weights, key=stack_key)]
        made = [self._pack(run[0] if len(run) == 1 else type(run[0]).cat(run), self.dtype) for run in runs]
        if not self.parts:
            self.parts = [TensorStack(self.count) for _ in made]
            self.widths = [sum(w.shape[0] for w in run) for run in runs]
            self.n_in, self.n_out = weights[0].shape[1], sum(self.widths)
        if self._is_plain:
            made = [self._decode(made)]
        elif len(made) != len(self.parts) or not all(map(TensorStack.fits, self.parts, made)):
            made = [self._become_plain(e, made)]
        for part, item in zip(self.parts, made, strict=True):
            part.put(e, item)
        self._put_bias(e, [w.shape[0] for w in weights], biases)

    def decode(self, e: int) -> Tensor:
        """The weights of expert e as numbers, [n_out, n_in]."""
        return self._decode([part[e] for part in self.parts])

    def pick(self, at: Tensor) -> Tensor:
        """As `decode`, of an expert that only the device knows: at [1]."""
        return self._decode([part.pick(at) for part in self.parts])

    @property
    def is_changed(self) -> bool:
        """Whether adapters add to its result in the step that this thread computes."""
        return self.added is not None and self.added.is_used

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def _decode(self, items: Iterable[object]) -> Tensor:
        found = [self._numbers(item) for item in items]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _numbers(self, item: Any) -> Tensor:
        if isinstance(item, Tensor):
            return item
        found: Tensor = item.decode(self.dtype) if isinstance(item, Planes) else item.dequantize(self.dtype)
        return found

    def _become_plain(self, e: int, made: list[object]) -> Tensor:
        """Decode the experts before e, and return e's numbers: their storages differ."""
        log.warning("experts are stored in several ways; all of a layer are kept as %s", self.dtype)
        plain = TensorStack(self.count)
        for before in range(e):
            plain.put(before, self.decode(before))
        self.parts, self.widths, self._is_plain = [plain], [self.n_out], True
        return self._decode(made)

    def _put_bias(self, e: int, sizes: Sequence[int], biases: Sequence[Tensor | None]) -> None:
        if all(bias is None for bias in biases):
            return
        start = 0
        for size, bias in zip(sizes, biases, strict=True):
            if bias is not None:
                if self.bias is None:
                    self.bias = bias.new_zeros(self.count, self.n_out, dtype=self.dtype)
                self.bias[e, start : start + size] = bias
            start += size
