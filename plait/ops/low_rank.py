"""Low-rank adapters (LoRA; Hu et al. 2021): y += scale · (x Aᵀ) Bᵀ, each row by the adapter that it names."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.ops.case import Case
from plait.ops.registry import Arguments, Bind, Bound, Op, op

LANES = 16  # ranks, or outputs, that kernels compute at a time
WORDS = 4  # of a table's entry: addresses of A and B, rank, scale as float32 bits


@dataclass(frozen=True, slots=True)
class FactorOrder:
    """The order of a weight's rows [out], and of its inputs [in], as indices; None: they stay as they are."""

    rows: Tensor | None = None
    columns: Tensor | None = None


@dataclass(frozen=True, slots=True)
class LowRankFactors:
    """What an adapter adds to one weight: scale · up · down. down: [rank, in], up: [out, rank]."""

    down: Tensor
    up: Tensor
    scale: float

    @property
    def rank(self) -> int:
        return self.down.shape[0]

    def product(self) -> Tensor:
        """The change of the weight, [out, in] float32."""
        return self.scale * (self.up.float() @ self.down.float())

    def in_order(self, order: FactorOrder) -> LowRankFactors:
        """The same change of a weight in another order; what is of another size stays as it is."""
        down, up = self.down, self.up
        if order.rows is not None and len(order.rows) == len(up):
            up = up[order.rows]
        if order.columns is not None and len(order.columns) == down.shape[1]:
            down = down[:, order.columns]
        return LowRankFactors(down, up, self.scale)


@dataclass(frozen=True, slots=True)
class AdapterRows:
    """Which adapter each token of a step has. slots: [T] int64, 0: none.

    count: [1] int64, how many tokens have one; order: [T] int64, tokens by slot: the last `count` have one.
    """

    slots: Tensor
    count: Tensor
    order: Tensor

    @classmethod
    def of(cls, slots: Tensor) -> AdapterRows:
        """Of a step that is not recorded."""
        if slots.is_cuda:
            return cls.on_device(slots)
        return cls(slots, (slots > 0).sum()[None], slots.argsort(stable=True))

    @classmethod
    def on_device(cls, slots: Tensor) -> AdapterRows:
        """Of a GPU, where kernels read `slots` alone: the rest is empty."""
        return cls(slots, slots[:0], slots[:0])


class StepRows(threading.local):
    """The rows of the step that this thread computes. Mixers give a linear layer x alone; so the decoder
    says here which rows they are, before each pass."""

    current: AdapterRows | None = None


def _allocate_zeros(nbytes: int) -> Tensor:
    return torch.zeros(nbytes, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class _PaddedFactors:
    """Factors as kernels read them; what was added is 0.

    float32:   down [groups of 16 ranks, inputs, 16], up [ranks, outputs up to a multiple of 16]
    bfloat16:  down [groups of 16 ranks, pairs of inputs, 16, 2], up [pairs of ranks, outputs, 2]
    """

    down: Tensor
    up: Tensor
    rank: int
    scale: float

    @classmethod
    def of(cls, factors: LowRankFactors, n_in: int, n_out: int, limits: AdapterLimits) -> _PaddedFactors:
        each = 2 if limits.dtype == torch.bfloat16 else 1  # numbers that a lane has
        ranks, inputs, outputs = _whole(factors.rank, LANES), _whole(n_in, each), _whole(n_out, LANES)
        down = torch.zeros(ranks, inputs, dtype=limits.dtype)
        up = torch.zeros(_whole(factors.rank, each), outputs, dtype=limits.dtype)
        down[: factors.rank, :n_in], up[: factors.rank, :n_out] = factors.down, factors.up.T
        down = down.view(-1, LANES, inputs // each, each).transpose(1, 2)
        up = up.view(-1, each, outputs).transpose(1, 2)
        return cls(limits.keep(down), limits.keep(up), factors.rank, factors.scale)

    def add(self, y: Tensor, x: Tensor) -> Tensor:
        """x: [n, in], y: [n, out] -> y with what this adds, float32. Inputs are rounded as factors are."""
        down, up = self.down.transpose(1, 2).flatten(2).flatten(0, 1), self.up.transpose(1, 2).flatten(0, 1)
        hidden = x.to(down.dtype).float() @ down[: self.rank, : x.shape[1]].float().T
        return y.float() + self.scale * (hidden.to(up.dtype).float() @ up[: self.rank, : y.shape[1]].float())

    def words(self) -> list[int]:
        bits = struct.unpack("<i", struct.pack("<f", self.scale))[0]
        return [self.down.data_ptr(), self.up.data_ptr(), self.rank, bits]


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """What the sites of a model have in common. dtype: of factors as they are kept, float32 or bfloat16.

    used: int64 [1], how many times 16 ranks the largest of all adapters has; allocate: gives memory for
    factors, so many bytes. stacked_on: where a GPU's kernels read factors (`StackedSite`); None: a CPU's do.
    """

    num_slots: int
    max_rank: int
    dtype: torch.dtype = torch.float32
    used: Tensor = field(default_factory=lambda: torch.zeros(1, dtype=torch.int64))
    allocate: Callable[[int], Tensor] = _allocate_zeros
    stacked_on: torch.device | None = None

    def keep(self, numbers: Tensor) -> Tensor:
        """A dense copy in memory for factors."""
        kept = self.allocate(numbers.nbytes).view(numbers.dtype).view(numbers.shape)
        return kept.copy_(numbers)


class AdapterSite:
    """What the adapters in `num_slots` slots add to one linear layer, of one or more parts side by side.

    table: int64 [slots, parts, WORDS], zeros where a slot adds nothing; ranges: int64 [slots, 2], where a
    slot's factors begin, and bytes from there to their end. Both stay where they are, so a recorded step
    reads what was loaded after it was recorded. Slots count from 1.
    """

    def __init__(self, n_in: int, out_sizes: Sequence[int], limits: AdapterLimits) -> None:
        self.n_in, self.out_sizes, self.used = n_in, tuple(out_sizes), limits.used
        self.limits, self.max_rank = limits, _whole(limits.max_rank, LANES)
        self.starts = torch.tensor([0, *accumulate(self.out_sizes)], dtype=torch.int64)
        self.table = torch.zeros(limits.num_slots, len(self.out_sizes), WORDS, dtype=torch.int64)
        self.ranges = torch.zeros(limits.num_slots, 2, dtype=torch.int64)
        self._kept: dict[tuple[int, int], _PaddedFactors] = {}

    @property
    def op(self) -> Op:
        return add_low_rank

    @property
    def num_parts(self) -> int:
        return len(self.out_sizes)

    @property
    def kind(self) -> str:
        """The dtype of its factors, in a word."""
        return str(self.limits.dtype).removeprefix("torch.")

    def put(self, slot: int, part: int, factors: LowRankFactors) -> None:
        """Keep an adapter's factors. No step may run meanwhile. Raises ShapeMismatch."""
        check_factors(factors, self.n_in, self.out_sizes[part])
        self.used.clamp_(min=-(-factors.rank // LANES))
        kept = self._kept[slot, part] = _PaddedFactors.of(
            factors, self.n_in, self.out_sizes[part], self.limits
        )
        self.table[slot - 1, part] = torch.tensor(kept.words(), dtype=torch.int64)
        self.ranges[slot - 1] = torch.tensor(self._find_range(slot), dtype=torch.int64)

    def _find_range(self, slot: int) -> tuple[int, int]:
        """Where a slot's factors begin, and bytes to their end; those of the last part if they lie apart."""
        kept = [one for (of, _), one in self._kept.items() if of == slot]
        for some in (kept, kept[-1:]):
            ranges = [(t.data_ptr(), t.nbytes) for one in some for t in (one.down, one.up)]
            start, end = min(at for at, _ in ranges), max(at + nbytes for at, nbytes in ranges)
            if end - start <= 2 * sum(nbytes for _, nbytes in ranges):
                return start, end - start
        return 0, 0

    def clear(self, slot: int) -> None:
        """Forget an adapter. No step may run meanwhile."""
        self.table[slot - 1].zero_()
        self.ranges[slot - 1].zero_()
        for part in range(self.num_parts):
            self._kept.pop((slot, part), None)

    @property
    def nbytes(self) -> int:
        return sum(kept.down.nbytes + kept.up.nbytes for kept in self._kept.values())

    def add_slot(self, slot: int, y: Tensor, x: Tensor) -> Tensor:
        """y: [n, out], x: [n, in], rows of one slot -> y with what the slot adds, in y's dtype."""
        parts = list(y.split(list(self.out_sizes), -1))
        for part, before in enumerate(list(parts)):
            if kept := self._kept.get((slot, part)):
                parts[part] = kept.add(before, x).to(y.dtype)
        return torch.cat(parts, -1)


def check_factors(factors: LowRankFactors, n_in: int, n_out: int) -> None:
    """Raises ShapeMismatch for factors of a layer of another size."""
    wanted = (factors.rank, n_in), (n_out, factors.rank)
    found = tuple(factors.down.shape), tuple(factors.up.shape)
    if found != wanted:
        raise ShapeMismatch(
            f"lora_A is {list(found[0])} and lora_B {list(found[1])}; the layer wants {list(wanted[0])} "
            f"and {list(wanted[1])}"
        )


CASES: list[Case] = [
    dict(rows=1, n_in=64, outs=(48,), ranks=(8,)),
    dict(rows=20, n_in=101, outs=(40, 7, 70), ranks=(4, 16, 33)),
    dict(rows=45, n_in=33, outs=(16, 200), ranks=(1, 9)),
    dict(rows=6, n_in=48, outs=(20,), ranks=(8, 8), is_idle=True),
    dict(rows=20, n_in=101, outs=(40, 7, 70), ranks=(4, 17, 33), dtype="bfloat16"),
    dict(rows=45, n_in=64, outs=(16, 600), ranks=(1, 9), dtype="bfloat16"),
]


@op(cases=CASES)
def add_low_rank(
    y: Tensor, x: Tensor, site: AdapterSite, rows: AdapterRows, tokens: Tensor | None = None
) -> Tensor:
    """y: [n, out] of a linear layer and its x: [n, in] -> y with what each row's adapter adds, in y's dtype.

    tokens: [n] int64, of which token of the step each row is; None: row i is token i. y is changed in place:
    its linear layer has just made it, and nothing else knows of it yet.
    """
    slots = rows.slots[: len(y)] if tokens is None else rows.slots[tokens]
    for slot in slots.unique().tolist():
        if slot:
            at = torch.where(slots == slot)[0]
            y[at] = site.add_slot(slot, y[at], x[at])
    return y


@add_low_rank.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    count, n_in, outs, ranks = case["rows"], case["n_in"], case["outs"], case["ranks"]
    stored = getattr(torch, case.get("dtype", "float32"))
    site = AdapterSite(n_in, outs, AdapterLimits(len(ranks) + 1, max(ranks), stored))
    for slot, rank in enumerate(ranks, 1):
        for part, n_out in enumerate(outs):
            if (slot + part) % 3 or len(outs) == 1:
                down = (torch.randn(rank, n_in) / n_in**0.5).to(stored)
                site.put(
                    slot, part, LowRankFactors(down, (torch.randn(n_out, rank) / rank**0.5).to(stored), 0.75)
                )
    is_picked = count % 2 == 1 and count > 1  # rows are some of the step's tokens
    slots = torch.randint(0, len(ranks) + 2, (count + 3 * is_picked,)) * (not case.get("is_idle"))
    slots[: count // 2] = 0 if case.get("is_idle") else 1  # neighbours of one adapter
    rows = AdapterRows.of(slots.to(device))
    y = torch.randn(count, sum(outs), dtype=dtype, device=device)
    tokens = torch.randperm(count + 3, device=device)[:count] if is_picked else None
    return (y, torch.randn(count, n_in, dtype=dtype, device=device), site, rows, tokens), {}


class FactorSite(Protocol):
    """Where adapters' factors of one layer are kept, part by part: `AdapterSite`, or a GPU's."""

    n_in: int

    @property
    def op(self) -> Op: ...
    @property
    def nbytes(self) -> int: ...
    def put(self, slot: int, part: int, factors: LowRankFactors) -> None: ...
    def clear(self, slot: int) -> None: ...


class SitesByHead:
    """A site for each head, which is its part."""

    def __init__(self, sites: Sequence[AdapterSite]) -> None:
        self.sites, self.n_in = sites, sites[0].n_in

    @property
    def op(self) -> Op:
        return add_head_low_rank

    @property
    def nbytes(self) -> int:
        return sum(site.nbytes for site in self.sites)

    def put(self, slot: int, part: int, factors: LowRankFactors) -> None:
        self.sites[part].put(slot, 0, factors)

    def clear(self, slot: int) -> None:
        for site in self.sites:
            site.clear(slot)


class HeadSites:
    """What adapters add to MLA's up-projection, kv_b: of each head `nope` rows of keys, then `v` of values.

    It is absorbed: keys take q to the latent, so their factors change places; values take latents on.
    keys: of `nope` inputs and `latent` outputs of each head; values: of `latent` inputs and `v` outputs.
    """

    def __init__(self, sizes: tuple[int, int, int, int], max_rank: int, keys: FactorSite, values: FactorSite):
        """sizes: heads, nope, v, latent."""
        self.sizes, self.max_rank, self.keys, self.values = sizes, max_rank, keys, values

    def put(self, slot: int, part: int, factors: LowRankFactors) -> None:
        """As `AdapterSite.put`, of all heads."""
        heads, nope, v, latent = self.sizes
        if factors.up.shape[0] != heads * (nope + v) or factors.down.shape[1] != latent:
            raise ShapeMismatch(
                f"lora_A is {list(factors.down.shape)} and lora_B {list(factors.up.shape)}; the layer wants "
                f"{latent} inputs and {heads * (nope + v)} outputs"
            )
        ups = factors.up.view(heads, nope + v, -1)
        for head in range(heads):
            turned = LowRankFactors(ups[head, :nope].T, factors.down.T, factors.scale)
            self.keys.put(slot, head, turned)
            self.values.put(slot, head, LowRankFactors(factors.down, ups[head, nope:], factors.scale))

    def clear(self, slot: int) -> None:
        """As `AdapterSite.clear`."""
        self.keys.clear(slot)
        self.values.clear(slot)

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


HEAD_CASES: list[Case] = [
    dict(rows=1, heads=2, n_in=12, n_out=32),
    dict(rows=17, heads=3, n_in=40, n_out=7),
    dict(rows=5, heads=2, n_in=16, n_out=8, behind=4),
]


@op(cases=HEAD_CASES)
def add_head_low_rank(y: Tensor, x: Tensor, heads: SitesByHead, rows: AdapterRows) -> Tensor:
    """As `add_low_rank`, each head by a site of its own. y: [T, H, m], x: [T, H, n] -> like y."""
    for h, site in enumerate(heads.sites):
        add_low_rank.reference(y[:, h], x[:, h], site, rows)
    return y


@add_head_low_rank.inputs
def _head_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    count, heads, n_in, n_out = (case[name] for name in ("rows", "heads", "n_in", "n_out"))
    sites = [AdapterSite(n_in, (n_out,), AdapterLimits(2, 4)) for _ in range(heads)]
    for site in sites:
        site.put(1, 0, LowRankFactors(torch.randn(4, n_in) / n_in**0.5, torch.randn(n_out, 4) / 2, 1.5))
    rows = AdapterRows.of((torch.arange(count, device=device) + 1) % 3)
    y = torch.randn(count, heads, n_out, dtype=dtype, device=device)
    each = heads * (n_in + 3)  # what lies behind the heads of a row, is no head's
    x = torch.randn(count, each + case.get("behind", 0), dtype=dtype, device=device)[:, :each]
    return (y, x.unflatten(1, (heads, -1))[..., :n_in], SitesByHead(sites), rows), {}


class AddedAdapters:
    """What a linear layer with adapters calls behind its product."""

    def __init__(self, site: FactorSite, step: StepRows, bind: Bind) -> None:
        self.site, self.step = site, step
        self._add: Bound = bind(site.op)

    def words(self) -> tuple[Tensor | int, ...]:
        """Of the launch before: how many tokens have an adapter, slots, tokens in order, its ranges."""
        rows = self.step.current
        if rows is None or not isinstance(self.site, AdapterSite):
            return 0, 0, 0, 0
        return rows.count, rows.slots, rows.order, self.site.ranges

    def __call__(self, y: Tensor, x: Tensor, tokens: Tensor | None = None) -> Tensor:
        """See `add_low_rank`; in a step without adapters y as it is."""
        rows = self.step.current
        if rows is None:
            return y
        if x.dim() != 2:
            raise ShapeMismatch(f"adapters add to rows [n, {self.site.n_in}], not to {list(x.shape)}")
        out: Tensor = self._add(y, x, self.site, rows, tokens)
        return out


def _whole(count: int, unit: int) -> int:
    return -(-count // unit) * unit
