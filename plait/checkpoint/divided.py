"""A rank's part of a checkpoint: what is read of each tensor, and linear layers with divided inputs."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from plait.checkpoint.names import NameMap, UnknownName, sources_of
from plait.errors import ShapeMismatch
from plait.ops.activation import combine
from plait.ops.linear import Linear
from plait.ops.ranks import Alone, Comm, GatheredLinear, ShareLinear
from plait.ops.registry import Bind
from plait.partition import Cut, Range, Rank, width
from plait.quant.weight import Weight

_EXPERT = re.compile(r"\.experts\.\d+(?=\.)")


def _cut_nothing(rank: Rank) -> Mapping[str, Cut]:
    return {}


@dataclass(frozen=True, slots=True)
class Cuts:
    """What a rank keeps of each tensor, by our names; an empty one keeps everything.

    comm: its connection to the other ranks; of: the cuts of any rank of this model; share: of this alone.
    """

    comm: Comm = field(default_factory=Alone)
    of: Callable[[Rank], Mapping[str, Cut]] = _cut_nothing
    own: Mapping[str, Cut] = field(default_factory=dict)
    share: int | None = None

    @classmethod
    def for_rank(cls, comm: Comm, of: Callable[[Rank], Mapping[str, Cut]]) -> Cuts:
        """`of` divides a whole model, and each layer with divided inputs needs it: results are kept."""
        known = cache(of)
        return cls(comm, known, known(comm.rank))

    def find(self, name: str) -> Cut | None:
        """The cut of `name`, with or without `.weight` or `.bias` at its end."""
        return _find(self.own, name)

    def for_share(self, share: int) -> Cuts:
        """The cuts of one share alone, as if it were a rank."""
        return replace(self, own=self.of(_share_of(self.comm.rank, share)), share=share)

    @property
    def first_share(self) -> int:
        """The number of its first share; that of number 0 adds the biases."""
        return self.comm.rank.own_shares.start if self.share is None else self.share

    def inputs(self, name: str) -> Sequence[tuple[Range, ...]]:
        """The columns that each rank has of a layer with divided inputs, in ascending order."""
        rank, found = self.comm.rank, []
        for index in range(rank.size):
            cut = _find(self.of(replace(rank, index=index)), name)
            ranges = (piece for share in (cut.cols if cut and cut.cols else ()) for piece in share)
            found.append(tuple(sorted(ranges)))
        return found

    def all_ranges(self, name: str) -> list[Range]:
        """Every range of columns that any share sums by itself."""
        rank, found = self.comm.rank, list[Range]()
        for share in range(rank.num_shares):
            cut = _find(self.of(_share_of(rank, share)), name)
            found += [piece for ranges in (cut.cols if cut and cut.cols else ()) for piece in ranges]
        return found


def _share_of(rank: Rank, share: int) -> Rank:
    return replace(rank, index=share, size=rank.num_shares, shares=rank.num_shares)


def _find(cuts: Mapping[str, Cut], name: str) -> Cut | None:
    if not cuts:
        return None
    stem = name.removesuffix(".weight").removesuffix(".bias")
    for key in (stem, _EXPERT.sub(".experts.*", stem)):
        if key in cuts:
            return cuts[key]
    return None


def keep_rows(value: Tensor | Weight, cut: Cut | None) -> Tensor | Weight:
    """What a cut keeps of the first dimension; a view where that is one range. Raises ShapeMismatch."""
    if cut is None or cut.rows is None:
        return value
    if isinstance(value, Tensor):
        if cut.rows[-1][1] > len(value):
            raise ShapeMismatch(f"rows {cut.rows} of {list(value.shape)}: there are too few")
        parts = [value[start:stop] for start, stop in cut.rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    some = [value.rows(start, stop) for start, stop in cut.rows]
    return some[0] if len(some) == 1 else type(some[0]).cat(some)


def divide_linear(
    name: str,
    weight: Weight,
    bias: Tensor | None,
    cuts: Cuts,
    build: Callable[[Weight, Tensor | None], Linear],
    bind: Bind,
) -> Any:
    """A linear layer with divided inputs: `name` has a cut of columns, `weight` is whole.

    build: makes a `Linear` of a weight and a bias; the first share alone adds the bias. Where some range
    would cut a block of the storage, or its columns lie in another order, inputs are gathered.
    """
    cut = cuts.find(name)
    assert cut is not None
    assert cut.cols is not None
    if not _can_cut(weight, cuts.all_ranges(name)):
        return _gather_inputs(name, weight, bias, cuts, build)
    own = sorted(piece for share in cut.cols for piece in share)
    places, at = dict[Range, Range](), 0
    for piece in own:
        places[piece] = (at, at + width(piece))
        at += width(piece)
    shares = []
    for number, ranges in enumerate(cut.cols, cuts.first_share):
        first = bias if number == 0 else None
        parts = [(piece, first if i == 0 else None) for i, piece in enumerate(ranges)]
        shares.append([(places[piece], build(weight.cols(*piece), added)) for piece, added in parts])
    if len(shares) == 1 and len(shares[0]) == 1:
        return shares[0][0][1]
    add = bind(combine)
    return ShareLinear(shares, lambda a, b: add(a, b, 1.0))


def _can_cut(weight: Weight, ranges: Sequence[Range]) -> bool:
    try:
        for piece in ranges:
            weight.cols(*piece)
    except ShapeMismatch:
        if max(stop for _, stop in ranges) > weight.shape[1]:
            raise
        return False
    return True


def _gather_inputs(
    name: str,
    weight: Weight,
    bias: Tensor | None,
    cuts: Cuts,
    build: Callable[[Weight, Tensor | None], Linear],
) -> object:
    rank, n_out = cuts.comm.rank, weight.shape[0]
    if rank.size == 1:
        return build(weight, bias)
    if ".experts." in name:
        raise ShapeMismatch(
            f"{name}: a {weight.format} weight of {list(weight.shape)} cannot be cut along its inputs for "
            f"{rank.size} ranks; whole experts can be divided (--ep)"
        )
    own = (n_out * rank.index // rank.size, n_out * (rank.index + 1) // rank.size)
    inputs = cuts.inputs(name)
    widths = [sum(map(width, ranges)) for ranges in inputs]
    columns = torch.cat([torch.arange(*piece) for ranges in inputs for piece in ranges])
    is_sorted = bool((columns[1:] > columns[:-1]).all())
    order = None if is_sorted else columns.argsort()
    rows = build(weight.rows(*own), None if bias is None else bias[slice(*own)])
    return GatheredLinear(rows, own, n_out, cuts.comm, widths, order)


def list_dropped(cuts: Cuts, names: NameMap, checkpoint: Container[str]) -> Iterator[str]:
    """Tensors of the checkpoint that other ranks read: those of whole experts."""
    for name in [name for name, cut in cuts.own.items() if cut.is_dropped]:
        for part, end in itertools.product(("gate", "up", "down"), ("weight", "bias")):
            with suppress(UnknownName):
                source, _ = names.resolve(f"{name}.{part}.{end}", checkpoint)
                yield from sources_of(source)
