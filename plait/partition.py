"""How the sizes of a model are divided among ranks, as plain data. No torch.

A *rank* is one of several processes that compute one model together. A sum over inputs is divided into
*shares* at fixed places, and a rank computes neighbouring shares. By default there are as many shares as
ranks. With `--deterministic` their number is the model's, so that any number of ranks adds the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from plait.errors import CannotDivide
from plait.spec.model import Mixer

MOST_SHARES = 8
Range = tuple[int, int]  # start, stop


@dataclass(frozen=True, slots=True)
class Rank:
    """Rank `index` of `size`. Raises CannotDivide if the shares cannot be divided equally.

    `shares`: how many the sums are divided into, 0: as many as ranks. `block`: how many columns the largest
    block of the checkpoint's storages has. `whole_experts`: experts are not cut, a rank has some of them.
    """

    index: int = 0
    size: int = 1
    shares: int = 0
    block: int = 1
    whole_experts: bool = False

    def __post_init__(self) -> None:
        if self.num_shares % self.size or not 0 <= self.index < self.size:
            raise CannotDivide(f"{self.num_shares} shares cannot be divided among {self.size} ranks")

    @property
    def num_shares(self) -> int:
        return self.shares or self.size

    @property
    def own_shares(self) -> range:
        """The shares that this rank computes."""
        each = self.num_shares // self.size
        return range(each * self.index, each * (self.index + 1))

    def divide(self, count: int, what: str, unit: int = 1) -> tuple[Range, ...]:
        """Of `count` things, those of each of its shares: equal parts, `unit` numbers each.

        `what`: their name for the error. Raises CannotDivide.
        """
        if count % self.num_shares:
            raise CannotDivide(f"{count} {what} cannot be divided equally among {self.num_shares}")
        each = count // self.num_shares * unit
        return tuple((each * share, each * (share + 1)) for share in self.own_shares)

    def divide_blocks(self, count: int, what: str) -> tuple[Range, ...]:
        """Of `count` numbers, those of each of its shares: whole blocks where there are enough of them.

        Parts differ by at most one block. Raises CannotDivide if there are fewer numbers than shares.
        """
        unit = self.block if count % self.block == 0 and count // self.block >= self.num_shares else 1
        units = count // unit
        if units < self.num_shares:
            raise CannotDivide(f"{count} {what} cannot be divided among {self.num_shares}")
        edges = [units * share // self.num_shares * unit for share in range(self.num_shares + 1)]
        return tuple((edges[share], edges[share + 1]) for share in self.own_shares)

    def divide_for_heads(self, count: int, heads: int, what: str, unit: int = 1) -> Range:
        """Of `count` things that equal groups of `heads` use in order, those that this rank's heads need.

        Several ranks have the same one where there are fewer things than ranks. Raises CannotDivide where a
        rank's heads would not be equal groups, too.
        """
        low, high = join_ranges(self.divide(heads, "heads"))
        group = heads // count
        first, last = low // group, -(-high // group)
        if (last - first > 1 and low % group) or (high - low) % (last - first):
            raise CannotDivide(f"{count} {what} for {heads} heads cannot be divided among {self.size}")
        return first * unit, last * unit


@dataclass(frozen=True, slots=True)
class Cut:
    """Which part of a tensor a rank keeps. None: all.

    `rows`: ranges of its first dimension, joined in this order. `cols`: of a matrix, for each share the
    ranges of its inputs that are summed. `is_dropped`: the rank needs nothing of it.
    """

    rows: tuple[Range, ...] | None = None
    cols: tuple[tuple[Range, ...], ...] | None = None
    is_dropped: bool = False


@dataclass(frozen=True, slots=True)
class Division:
    """A mixer's part on one rank: a spec with this rank's sizes, and the cuts of its tensors by their names.

    A name is below the mixer's own: "q" cuts its weight and its bias. `*` stands for the number of an expert.
    `sums`, `gathers`: what ranks exchange within the mixer, before the sum of its outputs.
    """

    spec: Mixer
    cuts: Mapping[str, Cut] = field(default_factory=dict)
    sums: int = 0
    gathers: int = 0


def join_ranges(ranges: tuple[Range, ...]) -> Range:
    """The range that neighbouring ranges cover."""
    return ranges[0][0], ranges[-1][1]


def scale_range(piece: Range, unit: int) -> Range:
    """The range of the numbers that things of `unit` numbers each have."""
    return piece[0] * unit, piece[1] * unit


def shift_range(piece: Range, by: int) -> Range:
    return piece[0] + by, piece[1] + by


def width(piece: Range) -> int:
    return piece[1] - piece[0]


def sum_of(ranges: tuple[Range, ...]) -> tuple[tuple[Range, ...], ...]:
    """The columns of shares of one range each."""
    return tuple((piece,) for piece in ranges)
