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
from plait.ops.low_rank import LowRankFactors
from plait.ops.ranks import Alone, Comm, GatheredLinear, ShareLinear
from plait.ops.registry import Bind
from plait.partition import Cut, Range, Rank, shift_range, width
from plait.quant.encode import find_encoder
from plait.quant.weight import Dense, Weight, as_weight, join_stored, take_rows

_ALONE = Rank()
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

    def part_of(self, name: str, encoding: str | None = None) -> StoredPart:
        """What this rank reads of a tensor, by its whole name. Columns are cut of weights, not of biases.

        encoding: the format in which plain numbers will be kept.
        """
        cut = self.find(name)
        if cut is None or (cut.cols is not None and not name.endswith(".weight")):
            return WHOLE
        if cut.cols is None:
            return StoredPart(name, cut.rows)
        edges, own = tuple(self.all_ranges(name)), [piece for share in cut.cols for piece in share]
        cols = min(start for start, _ in own), max(stop for _, stop in own)
        how = find_encoder(encoding, max(stop for _, stop in edges)) if encoding else None
        return StoredPart(name, None, cols, edges, how.kind.elements if how else 1, self.comm.rank)

    def for_share(self, share: int) -> Cuts:
        """The cuts of one share alone, as if it were a rank."""
        return replace(self, own=self.of(_share_of(self.comm.rank, share)), share=share)

    @property
    def first_share(self) -> int:
        """The number of its first share; that of number 0 adds the biases."""
        return self.comm.rank.own_shares.start if self.share is None else self.share

    def factor_part(self, name: str) -> FactorPart:
        """What this rank adds of an adapter's change of a weight that it has some rows of, or all.

        Of an expert also where it has some inputs: one range of them.
        """
        cut = self.find(name)
        if cut is not None and cut.cols is not None:
            ((own,),) = cut.cols
            return FactorPart(cols=own, num_cols=max(stop for _, stop in self.all_ranges(name)))
        if cut is None or cut.rows is None:
            return WHOLE_CHANGE
        rank = self.comm.rank
        cuts = [_find(self.of(replace(rank, index=index)), name) for index in range(rank.size)]
        return FactorPart(
            cut.rows, num_rows=max(stop for each in cuts if each for _, stop in each.rows or ())
        )

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
    for key in (name, stem, _EXPERT.sub(".experts.*", stem)):
        if key in cuts:
            return cuts[key]
    return None


@dataclass(frozen=True, slots=True)
class StoredPart:
    """What a rank reads of a stored tensor; nothing else of it leaves the file.

    `rows`: ranges of its first dimension, joined in this order; None: all. `cols`: of a matrix, from the
    first to the last column that the rank sums; None: all. `edges`: every range that any share sums by
    itself. `unit`: columns of a block that plain numbers will be encoded in.
    """

    name: str = ""
    rows: tuple[Range, ...] | None = None
    cols: Range | None = None
    edges: tuple[Range, ...] = ()
    unit: int = 1
    rank: Rank = _ALONE

    def keep(self, value: Tensor | Weight) -> Tensor | Weight:
        """The part, mostly a view. Raises ShapeMismatch.

        Where some range would cut a block of the storage, or columns lie in another order, it is the rank's
        share of the rows, with all columns: see `divide_linear`.
        """
        if self.cols is None:
            return keep_rows(value, self.rows)
        weight = as_weight(value)
        if self._can_cut(weight, self.edges):
            return weight.cols(*self.cols)
        if ".experts." in self.name and self.rank.size > 1:
            raise ShapeMismatch(
                f"{self.name}: a {weight.format} weight of {list(weight.shape)} cannot be cut along its "
                f"inputs for {self.rank.size} ranks; whole experts can be divided (--ep)"
            )
        return weight.rows(*_own_outputs(self.rank, weight.shape[0]))

    def is_cut(self, weight: Weight, own: Sequence[Range]) -> bool:
        """Whether `weight`, which `keep` gave, has this part's columns; own: those of the rank's shares."""
        assert self.cols is not None
        return weight.shape[1] == width(self.cols) and self._can_cut(
            weight, [_back(p, self.cols) for p in own]
        )

    def _can_cut(self, weight: Weight, ranges: Sequence[Range]) -> bool:
        unit = self.unit if isinstance(weight, Dense) else 1
        if any(edge % unit for piece in ranges for edge in piece):
            return False
        try:
            for piece in ranges:
                weight.cols(*piece)
        except ShapeMismatch:
            if max(stop for _, stop in ranges) > weight.shape[1]:
                raise
            return False
        return True


WHOLE = StoredPart()


@dataclass(frozen=True, slots=True)
class FactorPart:
    """What a rank adds of an adapter's change of a weight: ranges of its rows, or one of its inputs.

    None: all. num_rows, num_cols: of the whole weight, where they are cut.
    """

    rows: tuple[Range, ...] | None = None
    cols: Range | None = None
    num_rows: int = 0
    num_cols: int = 0

    def keep(self, factors: LowRankFactors) -> LowRankFactors:
        """The part. Raises ShapeMismatch for factors of a weight of another size."""
        down, up = factors.down, factors.up
        for found, wanted, what in (
            (up.shape[0], self.rows and self.num_rows, "lora_B has {} outputs"),
            (down.shape[1], self.cols and self.num_cols, "lora_A has {} inputs"),
        ):
            if wanted and found != wanted:
                raise ShapeMismatch(f"{what.format(found)}; the layer has {wanted}")
        if self.rows is not None:
            up = torch.cat([up[slice(*piece)] for piece in self.rows])
        if self.cols is not None:
            down = down[:, slice(*self.cols)]
        return LowRankFactors(down, up, factors.scale)


WHOLE_CHANGE = FactorPart()
Build = Callable[[Weight, Tensor | None, FactorPart], Linear]


def keep_rows(value: Tensor | Weight, rows: tuple[Range, ...] | None) -> Tensor | Weight:
    """Ranges of the first dimension; a view where that is one range, None: all. Raises ShapeMismatch."""
    if rows is None:
        return value
    if isinstance(value, Tensor):
        if rows[-1][1] > len(value):
            raise ShapeMismatch(f"rows {rows} of {list(value.shape)}: there are too few")
        parts = [value[start:stop] for start, stop in rows]
        return parts[0] if len(parts) == 1 else torch.cat(parts)
    some = [value.rows(start, stop) for start, stop in rows]
    return some[0] if len(some) == 1 else type(some[0]).cat(some)


def keep_joined(parts: Sequence[Tensor | Weight], rows: tuple[Range, ...]) -> Tensor | Weight:
    """Ranges of the rows that parts have, one behind the other: nothing is read of parts without any of them.

    Raises ShapeMismatch.
    """
    starts = [0, *itertools.accumulate(part.shape[0] for part in parts)]
    if rows[-1][1] > starts[-1]:
        raise ShapeMismatch(f"rows {rows} of {len(parts)} parts with {starts[-1]} rows: there are too few")
    found = [
        take_rows(part, max(start - first, 0), min(stop - first, part.shape[0]))
        for start, stop in rows
        for first, part in zip(starts, parts, strict=False)
        if max(start, first) < min(stop, first + part.shape[0])
    ]
    return found[0] if len(found) == 1 else join_stored(found)


def divide_linear(
    part: StoredPart,
    weight: Weight,
    bias: Tensor | None,
    n_out: int,
    cuts: Cuts,
    build: Build,
    bind: Bind,
) -> Any:
    """A linear layer with divided inputs. part: of its weight; weight: what `part.keep` gave.

    build: makes a `Linear` of a weight, a bias, and the part of adapters' changes; the first share alone adds
    the bias. n_out: of the whole layer. Where its columns could not be cut, inputs are gathered, and a rank
    has some of the outputs.
    """
    cut, name = cuts.find(part.name), part.name.removesuffix(".weight")
    assert cut is not None
    assert cut.cols is not None
    assert part.cols is not None
    own = sorted(piece for share in cut.cols for piece in share)
    if not part.is_cut(weight, own):
        return _gather_inputs(name, weight, bias, n_out, cuts, build)
    places, at = dict[Range, Range](), 0
    for piece in own:
        places[piece] = (at, at + width(piece))
        at += width(piece)
    shares, num_cols = [], max(stop for _, stop in part.edges)
    for number, ranges in enumerate(cut.cols, cuts.first_share):
        first = bias if number == 0 else None
        parts = [(piece, first if i == 0 else None) for i, piece in enumerate(ranges)]
        made = [
            build(weight.cols(*_back(piece, part.cols)), added, FactorPart(cols=piece, num_cols=num_cols))
            for piece, added in parts
        ]
        shares.append([(places[piece], one) for (piece, _), one in zip(parts, made, strict=True)])
    # With shares of its own a model adds in float32: a result in the dtype of x would be rounded before.
    is_summed = cuts.comm.rank.shares and cuts.share is None  # of one share experts are built, say
    if len(shares) == 1 and len(shares[0]) == 1 and not is_summed:
        return shares[0][0][1]
    add = bind(combine)
    return ShareLinear(shares, lambda a, b: add(a, b, 1.0))


def _back(piece: Range, kept: Range) -> Range:
    """A range of a matrix's columns, counted within those that are kept."""
    return shift_range(piece, -kept[0])


def _own_outputs(rank: Rank, n_out: int) -> Range:
    """Where inputs are gathered: the outputs of a rank."""
    return n_out * rank.index // rank.size, n_out * (rank.index + 1) // rank.size


def _gather_inputs(
    name: str,
    weight: Weight,
    bias: Tensor | None,
    n_out: int,
    cuts: Cuts,
    build: Build,
) -> object:
    rank = cuts.comm.rank
    if rank.size == 1:
        return build(weight, bias, WHOLE_CHANGE)
    own, inputs = _own_outputs(rank, n_out), cuts.inputs(name)
    widths = [sum(map(width, ranges)) for ranges in inputs]
    if weight.shape != (width(own), sum(widths)):
        raise ShapeMismatch(
            f"{name}: of [{n_out}, {sum(widths)}] a rank has {width(own)} rows, and the file gives "
            f"{list(weight.shape)}"
        )
    columns = torch.cat([torch.arange(*piece) for ranges in inputs for piece in ranges])
    is_sorted = bool((columns[1:] > columns[:-1]).all())
    order = None if is_sorted else columns.argsort()
    rows = build(weight, None if bias is None else bias[slice(*own)], FactorPart((own,), num_rows=n_out))
    return GatheredLinear(rows, own, n_out, cuts.comm, widths, order)


def list_dropped(cuts: Cuts, names: NameMap, checkpoint: Container[str]) -> Iterator[str]:
    """Tensors of the checkpoint that other ranks read: those of whole experts, and some that stand alone."""
    for name, end in itertools.product(list_names_elsewhere(cuts), ("weight", "bias")):
        with suppress(UnknownName):
            source, _ = names.resolve(f"{name}.{end}", checkpoint)
            yield from sources_of(source)


def list_names_elsewhere(cuts: Cuts) -> Iterator[str]:
    """Names of ours that weights which other ranks have may go by."""
    dropped = (name for name, cut in cuts.own.items() if cut.is_dropped)
    for name, part in itertools.product(dropped, ("", ".gate", ".up", ".down")):
        yield f"{name}{part}"
