"""Low-rank adapters on a GPU: factors of all slots in one tensor, so that a captured step reads any slot."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.low_rank import AdapterLimits, AdapterRows, LowRankFactors, check_factors
from plait.ops.registry import Arguments, Op, op

LEAST_RANKS = 16  # ranks that a matrix unit multiplies at a time
MOST_RANKS = 64  # ranks of a kernel's product; more are several products
ALIGNED = 16  # numbers: where a row of factors begins


class StackedSite:
    """What adapters of up to `rank` add to one linear layer, of one or more parts side by side.

    down: [slots, parts, ranks, in], up: [slots, out, ranks], outputs of all parts side by side;
    scales: [slots, parts] float32; starts: [parts + 1] int64, where the outputs of each part begin.
    Rows of `down` may be longer than `in`. What a slot does not add is zeros. Slots count from 1; all of it
    stays where it is.
    """

    def __init__(self, n_in: int, out_sizes: Sequence[int], limits: AdapterLimits, rank: int) -> None:
        self.n_in, self.out_sizes, device = n_in, tuple(out_sizes), limits.stacked_on
        self.num_slots, self.max_rank = limits.num_slots, rank
        slots, parts, ranks = self.num_slots, len(self.out_sizes), round_rank(rank)
        self.starts = torch.tensor([0, *accumulate(self.out_sizes)], dtype=torch.int64, device=device)
        columns = -(-n_in // ALIGNED) * ALIGNED
        self.down = torch.zeros(slots, parts, ranks, columns, dtype=limits.dtype, device=device)[..., :n_in]
        self.up = torch.zeros(slots, sum(self.out_sizes), ranks, dtype=limits.dtype, device=device)
        self.scales = torch.zeros(slots, parts, device=device)

    @property
    def op(self) -> Op:
        return add_stacked_low_rank

    @property
    def num_parts(self) -> int:
        return len(self.out_sizes)

    @property
    def nbytes(self) -> int:
        return self.down.nbytes + self.up.nbytes

    def put(self, slot: int, part: int, factors: LowRankFactors) -> None:
        """Keep an adapter's factors. No step may run meanwhile. Raises ShapeMismatch."""
        check_factors(factors, self.n_in, self.out_sizes[part])
        start = sum(self.out_sizes[:part])
        self.down[slot - 1, part, : factors.rank] = factors.down.to(self.down)
        self.up[slot - 1, start : start + self.out_sizes[part], : factors.rank] = factors.up.to(self.up)
        self.scales[slot - 1, part] = factors.scale

    def clear(self, slot: int, count: int = 1) -> None:
        """Forget an adapter, or those in `count` slots. No step may run meanwhile."""
        for kept in (self.down, self.up, self.scales):
            kept[slot - 1 : slot - 1 + count].zero_()

    def add_slot(self, slot: int, y: Tensor, x: Tensor) -> Tensor:
        """y and x as the op has them -> y with what one slot adds to all rows, in y's dtype."""
        ends = accumulate(self.out_sizes)
        places = [slice(end - size, end) for size, end in zip(self.out_sizes, ends, strict=True)]
        found = []
        for part, place in enumerate(places):
            own_x = x[:, part] if x.dim() == 3 else x
            before = y[:, part] if y.dim() == 3 else y[:, place]
            hidden = own_x.to(self.down.dtype).float() @ self.down[slot - 1, part].float().T
            added = hidden.to(self.up.dtype).float() @ self.up[slot - 1, place].float().T
            found.append((before.float() + self.scales[slot - 1, part] * added).to(y.dtype))
        return torch.stack(found, 1) if y.dim() == 3 else torch.cat(found, -1)


def round_rank(rank: int) -> int:
    """The ranks that are kept for those of up to `rank`: a power of two, or whole products."""
    return (
        -(-rank // MOST_RANKS) * MOST_RANKS
        if rank > MOST_RANKS
        else max(LEAST_RANKS, 1 << (rank - 1).bit_length())
    )


CASES: list[Case] = [
    dict(rows=1, n_in=64, outs=(48,), ranks=(8,)),
    dict(rows=7, n_in=101, outs=(40, 7, 70), ranks=(4, 16, 33)),
    dict(rows=6, n_in=48, outs=(20,), ranks=(8, 8), is_idle=True),
    dict(rows=5, n_in=40, outs=(24, 24), ranks=(3, 4), heads=2),
    dict(rows=520, n_in=33, outs=(20,), ranks=(1, 9)),
]


@op(cases=CASES)
def add_stacked_low_rank(
    y: Tensor, x: Tensor, site: StackedSite, rows: AdapterRows, tokens: Tensor | None = None
) -> Tensor:
    """y: [n, out] of a linear layer and its x: [n, in] -> y with what each row's adapter adds, in y's dtype.

    Where each part has an input of its own, as heads have, y is [n, parts, out of each] and x [n, parts, in].
    tokens: [n] int64, of which token of the step each row is; None: row i is token i. y is changed in place:
    its linear layer has just made it, and nothing else knows of it yet.
    """
    slots = rows.slots[: len(y)] if tokens is None else rows.slots[tokens]
    for slot in range(1, site.num_slots + 1):  # each of them: a step that asks which waits for the device
        here = (slots == slot).view(-1, *[1] * (y.dim() - 1))
        y.copy_(torch.where(here, site.add_slot(slot, y, x), y))
    return y


@add_stacked_low_rank.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    count, n_in, outs, ranks = case["rows"], case["n_in"], case["outs"], case["ranks"]
    limits = AdapterLimits(len(ranks) + 1, max(ranks), dtype, stacked_on=torch.device(device))
    site, has_heads = StackedSite(n_in, outs, limits, max(ranks)), "heads" in case
    for slot, rank in enumerate(ranks, 1):
        for part, n_out in enumerate(outs):
            if (slot + part) % 3 or len(outs) == 1:
                down, up = torch.randn(rank, n_in) / n_in**0.5, torch.randn(n_out, rank) / rank**0.5
                site.put(slot, part, LowRankFactors(down, up, 0.75))
    is_picked = count % 2 == 1 and count > 1 and not has_heads  # rows are some of the step's tokens
    slots = torch.randint(0, len(ranks) + 2, (count + 3 * is_picked,)) * (not case.get("is_idle"))
    slots[: -(-count // 2)] = 0 if case.get("is_idle") else 1  # neighbours of one adapter
    shapes: list[tuple[int, ...]] = [(count, sum(outs)), (count, n_in)]
    if has_heads:
        shapes = [(count, len(outs), outs[0]), (count, len(outs), n_in)]
    y, x = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    tokens = torch.randperm(count + 3, device=device)[:count] if is_picked else None
    return (y, x, site, AdapterRows.of(slots.to(device)), tokens), {}
