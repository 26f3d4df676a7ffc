"""What ranks exchange while they compute one model together, and the linear layers that they divide.

A sum that is divided is added up in one binary tree over its shares: ((0 1) (2 3)) ((4 5) (6 7)). A rank adds
its own part of the tree. Ranks exchange these sums, and each adds the rest of the same tree. So the number of
ranks changes no bit, if the shares are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.ops.linear import Linear
from plait.partition import Range, Rank, width

Add = Callable[[Tensor, Tensor], Tensor]


class Comm(Protocol):
    """How one rank reaches the others. All of them make the same calls in the same order."""

    rank: Rank

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        """What every rank passed, in the order of ranks. The shapes must be equal."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what every rank passed, in x's dtype and in any order; all ranks get the same bits."""
        ...


class Alone:
    """The only rank. Its sums may be divided into shares all the same."""

    def __init__(self, rank: Rank | None = None) -> None:
        self.rank = rank or Rank()

    def gather(self, x: Tensor) -> Sequence[Tensor]:
        return (x,)

    def sum(self, x: Tensor) -> Tensor:
        return x


def sum_ranks(x: Tensor, comm: Comm, dtype: torch.dtype) -> Tensor:
    """The sum over ranks of what each passed, like x, in `dtype`.

    Where a model has shares of its own it is added in float32 in the tree's order, else as ranks sum fastest.
    """
    if comm.rank.size == 1 or not comm.rank.shares:
        total = comm.sum(x)
        return total if total.dtype == dtype else total.to(dtype)
    return add_in_tree([part.float() for part in comm.gather(x)], torch.add).to(dtype)


def gather_columns(comm: Comm, x: Tensor, widths: Sequence[int]) -> Tensor:
    """[..., own width] -> [..., all widths], side by side in the order of ranks."""
    if comm.rank.size == 1:
        return x
    most = max(widths)
    if x.shape[-1] < most:
        x = torch.nn.functional.pad(x, (0, most - x.shape[-1]))
    parts = comm.gather(x.contiguous())
    return torch.cat([part[..., :size] for part, size in zip(parts, widths, strict=True)], -1)


def add_in_tree(parts: Sequence[Tensor], add: Add) -> Tensor:
    """The sum of a power of two of tensors, or of any number: neighbours are added first."""
    parts = list(parts)
    while len(parts) > 1:
        pairs = [add(a, b) for a, b in zip(parts[0::2], parts[1::2], strict=False)]
        parts = pairs + parts[len(pairs) * 2 :]
    return parts[0]


class ShareLinear:
    """A linear layer with divided inputs: of each share, linear layers over ranges of this rank's inputs.

    [..., in of this rank] -> [..., out]: this rank's part of the tree, float32. Otherwise as `Linear`.
    """

    only_part = None

    def __init__(self, shares: Sequence[Sequence[tuple[Range, Linear]]], add: Add) -> None:
        self._shares, self._add = shares, add
        self.n_in = sum(width(piece) for share in shares for piece, _ in share)
        self.n_out = shares[0][0][1].n_out

    @property
    def nbytes(self) -> int:
        return sum(linear.nbytes for share in self._shares for _, linear in share)

    @property
    def parts(self) -> list[tuple[object, Tensor | None, object]]:
        return [part for share in self._shares for _, linear in share for part in linear.parts]

    def __call__(self, x: Tensor) -> Tensor:
        sums = []
        for share in self._shares:
            parts = [linear.in_float32(x[..., start:stop]) for (start, stop), linear in share]
            total = parts[0]
            for part in parts[1:]:
                total = self._add(total, part)
            sums.append(total)
        return add_in_tree(sums, self._add)


class GatheredLinear:
    """A linear layer that cannot be cut along its inputs: each rank has all inputs and some of the outputs.

    [..., in of this rank] -> [..., out], zero but for this rank's outputs: the sum over ranks joins them.
    `order`: for each input of the weight its place among the gathered ones; None: the same order.
    """

    only_part = None

    def __init__(
        self, rows: Linear, own: Range, n_out: int, comm: Comm, widths: Sequence[int], order: Tensor | None
    ) -> None:
        self._rows, self._own, self.n_out, self._comm = rows, own, n_out, comm
        self._widths, self._order = widths, order
        self.n_in = widths[comm.rank.index]

    @property
    def nbytes(self) -> int:
        return self._rows.nbytes

    @property
    def parts(self) -> list[tuple[Any, Tensor | None, Any]]:
        return self._rows.parts

    def __call__(self, x: Tensor) -> Tensor:
        whole = gather_columns(self._comm, x, self._widths)
        if self._order is not None:
            whole = whole.index_select(-1, self._order)
        start, stop = self._own
        return torch.nn.functional.pad(self._rows(whole), (start, self.n_out - stop))
