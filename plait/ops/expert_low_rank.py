"""Low-rank adapters of experts on a GPU: each adapter has factors for each expert of a layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.low_rank import AdapterLimits, AdapterRows, LowRankFactors, StepRows
from plait.ops.registry import Arguments, Bind, Bound, Op, op
from plait.ops.stacked_low_rank import StackedSite

PIECE = 64  # pairs of which the reference gathers factors at a time


class ExpertSite:
    """What adapters of up to `rank` add to one linear layer of each of `count` experts.

    stacked: has a slot for each adapter and expert: those of adapter s are (s - 1) · count + 1 and so on.
    """

    def __init__(
        self, n_in: int, out_sizes: Sequence[int], limits: AdapterLimits, rank: int, count: int
    ) -> None:
        self.n_in, self.count, self.max_rank = n_in, count, rank
        every = replace(limits, num_slots=limits.num_slots * count)
        self.stacked = StackedSite(n_in, out_sizes, every, rank)

    @property
    def op(self) -> Op:
        return add_expert_low_rank

    @property
    def nbytes(self) -> int:
        return self.stacked.nbytes

    def put(self, slot: int, part: int, factors: LowRankFactors) -> None:
        """As `StackedSite.put`; parts are those of the first expert, then those of the next."""
        expert, own = divmod(part, self.stacked.num_parts)
        self.stacked.put((slot - 1) * self.count + expert + 1, own, factors)

    def clear(self, slot: int) -> None:
        """Forget an adapter. No step may run meanwhile."""
        self.stacked.clear((slot - 1) * self.count + 1, self.count)

    def find_slots(self, rows: AdapterRows, index: Tensor) -> Tensor:
        """index: [T, k] -> slots of `stacked` for each pair of a token and an expert, [T k]; 0: none."""
        own = rows.slots[: len(index), None]
        return torch.where(own > 0, (own - 1) * self.count + index + 1, 0).flatten()


CASES: list[Case] = [
    dict(tokens=1, experts=4, top_k=2, n_in=64, outs=(48,), ranks=(8,)),
    dict(tokens=7, experts=5, top_k=3, n_in=101, outs=(40, 40), ranks=(4, 16, 33), each=True),
    dict(tokens=6, experts=3, top_k=2, n_in=48, outs=(20,), ranks=(8, 8), is_idle=True),
    dict(tokens=270, experts=4, top_k=2, n_in=33, outs=(20,), ranks=(1, 9)),
]


@op(cases=CASES)
def add_expert_low_rank(y: Tensor, x: Tensor, site: ExpertSite, rows: AdapterRows, index: Tensor) -> Tensor:
    """y: [T k, out] of the experts that tokens chose, and what they read -> y with what adapters add.

    x: [T, in], or [T k, in] where each pair of a token and an expert has an input of its own; index: [T, k]
    int64. y may be wider than x, in float32, and is changed in place: its product has just made it.
    """
    factors, slots = site.stacked, site.find_slots(rows, index)
    if len(x) != len(y):
        x = x.repeat_interleave(index.shape[1], 0)
    places = zip(factors.starts.tolist(), factors.starts.tolist()[1:], strict=False)
    for part, (start, stop) in enumerate(places):
        for at in range(0, len(y), PIECE):
            some = slice(at, at + PIECE)
            which = (slots[some] - 1).clamp(min=0)
            given = x[some].to(factors.down.dtype).float()
            hidden = torch.einsum("pri,pi->pr", factors.down[which, part].float(), given)
            hidden = hidden.to(factors.up.dtype).float()
            added = torch.einsum("por,pr->po", factors.up[which, start:stop].float(), hidden)
            before = y[some, start:stop]
            changed = (before.float() + factors.scales[which, part, None] * added).to(y.dtype)
            before.copy_(torch.where(slots[some, None] > 0, changed, before))
    return y


@add_expert_low_rank.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    tokens, count, k, ranks = case["tokens"], case["experts"], case["top_k"], case["ranks"]
    limits = AdapterLimits(len(ranks) + 1, max(ranks), dtype, stacked_on=torch.device(device))
    site = ExpertSite(case["n_in"], case["outs"], limits, max(ranks), count)
    for slot, rank in enumerate(ranks, 1):
        for part in range(count * len(case["outs"])):
            if (slot + part) % 3:
                down = torch.randn(rank, case["n_in"]) / case["n_in"] ** 0.5
                up = torch.randn(case["outs"][part % len(case["outs"])], rank) / rank**0.5
                site.put(slot, part, LowRankFactors(down, up, 0.75))
    slots = torch.randint(0, len(ranks) + 2, (tokens + 2,)) * (not case.get("is_idle"))
    index = torch.stack([torch.randperm(count)[:k] for _ in range(tokens)]).to(device)
    y = torch.randn(tokens * k, sum(case["outs"]), dtype=dtype, device=device)
    x = torch.randn(tokens * k if case.get("each") else tokens, case["n_in"], dtype=dtype, device=device)
    return (y, x, site, AdapterRows.of(slots.to(device)), index), {}


class AddedToExperts:
    """What a stack of experts with adapters calls behind a product."""

    def __init__(self, site: ExpertSite, step: StepRows, bind: Bind) -> None:
        self.site, self.step = site, step
        self._add: Bound = bind(site.op)

    @property
    def is_used(self) -> bool:
        """Whether the step that this thread computes has adapters."""
        return self.step.current is not None

    def __call__(self, y: Tensor, x: Tensor, index: Tensor) -> Tensor:
        """See `add_expert_low_rank`; in a step without adapters y as it is."""
        rows = self.step.current
        if rows is None:
            return y
        out: Tensor = self._add(y, x, self.site, rows, index)
        return out
