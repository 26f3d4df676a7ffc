"""The adapters of a loaded model: which of its linear layers have a site, and what each slot adds there."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from plait.checkpoint.divided import FactorPart
from plait.errors import ShapeMismatch
from plait.ops.expert_low_rank import AddedToExperts, ExpertSite
from plait.ops.expert_stack import ExpertStack
from plait.ops.linear import Linear
from plait.ops.low_rank import (
    AdapterLimits,
    AdapterSite,
    AddedAdapters,
    FactorSite,
    HeadSites,
    LowRankFactors,
    SitesByHead,
    StepRows,
)
from plait.ops.registry import Bind
from plait.ops.stacked_low_rank import StackedSite


class FactorSource(Protocol):
    """An adapter by our names (`checkpoint.adapters.match.AdapterMatch`)."""

    @property
    def path(self) -> Path: ...
    def has(self, ours: str) -> bool: ...
    def rank_of(self, ours: str) -> int: ...
    def take(self, ours: str) -> LowRankFactors | None: ...
    def check_all_used(self) -> None: ...


BEHIND = "head.transform"  # its rows are those of logits, not the tokens of a step
AnySite = AdapterSite | StackedSite
UNREACHED = ("mimo_up", "mimo_down")  # layers that a kernel applies to each head


@dataclass(frozen=True, slots=True)
class _Place:
    """A site, and which part of the change of each weight it adds, by our names."""

    parts: Mapping[str, FactorPart]
    site: AnySite | HeadSites | ExpertSite


class AdapterSlots:
    """As many adapters at a time as `limits` say, numbered from 1. Sites are made while the model is built.

    known: adapters that will be loaded; is_open: others may come, so that all layers have sites. Without it
    layers that none changes stay as they are. elsewhere: names of weights that other ranks have.
    """

    def __init__(
        self,
        limits: AdapterLimits,
        known: Sequence[FactorSource],
        elsewhere: Collection[str] = (),
        *,
        is_open: bool = False,
    ) -> None:
        self.limits, self.step, self._known, self._elsewhere = limits, StepRows(), known, elsewhere
        self._is_open = is_open
        self._places: list[_Place] = []

    def attach(
        self, parts: Mapping[str, FactorPart], linear: Linear, out_sizes: Sequence[int], bind: Bind
    ) -> None:
        """Give a linear layer of these weights of ours, side by side, a site."""
        if any(name.rpartition(".")[2] in UNREACHED or name.startswith(BEHIND) for name in parts):
            return
        if (site := self._make_site(parts, linear.n_in, out_sizes)) is not None:
            linear.add(AddedAdapters(site, self.step, bind))

    def _make_site(
        self, parts: Mapping[str, FactorPart], n_in: int, out_sizes: Sequence[int]
    ) -> AnySite | None:
        if not self._may_change(parts):
            return None
        made: AnySite
        if self.limits.stacked_on is None:
            made = AdapterSite(n_in, out_sizes, self.limits)
        else:
            made = StackedSite(n_in, out_sizes, self.limits, self._rank_of(parts))
        self._places.append(_Place(parts, made))
        return made

    def attach_stack(
        self, parts: Mapping[str, FactorPart], stack: ExpertStack, out_sizes: Sequence[int], bind: Bind
    ) -> None:
        """Give linear layers of experts, the first one's first, a site if a known adapter changes one.

        Others of an open model get none, because each slot would have factors of all experts.
        """
        if any(match.has(name) for match in self._known for name in parts):
            made = ExpertSite(stack.n_in, out_sizes, self.limits, self._rank_of(parts), stack.count)
            self._places.append(_Place(parts, made))
            stack.added = AddedToExperts(made, self.step, bind)

    @property
    def has_experts(self) -> bool:
        """Whether experts have a site, in a stack or each of them."""
        return any(".experts." in name for place in self._places for name in place.parts)

    def head_sites(self, name: str, sizes: tuple[int, int, int, int], part: FactorPart) -> HeadSites | None:
        """The site of MLA's up-projection of that name; None: no adapter changes it.

        sizes: heads, nope, v, latent, of this rank.
        """
        if not self._may_change([name]):
            return None
        limits, rank, (heads, nope, v, latent) = self.limits, self._rank_of([name]), sizes

        def make(n_in: int, n_out: int) -> FactorSite:
            if limits.stacked_on is not None:
                return StackedSite(n_in, (n_out,) * heads, limits, rank)
            return SitesByHead([AdapterSite(n_in, (n_out,), limits) for _ in range(heads)])

        keys, values = make(nope, latent), make(latent, v)
        made = HeadSites(sizes, rank, keys, values)
        self._places.append(_Place({name: part}, made))
        return made

    def _rank_of(self, names: Collection[str]) -> int:
        """The largest rank of factors of these weights."""
        if self._is_open:
            return self.limits.max_rank
        return max(match.rank_of(name) for match in self._known for name in names)

    def _may_change(self, names: Collection[str]) -> bool:
        return self._is_open or any(match.has(name) for match in self._known for name in names)

    def load(self, slot: int, match: FactorSource) -> None:
        """Put an adapter into a slot that is free. No step may run meanwhile.

        Raises ShapeMismatch, UnsupportedFormat and UnusedTensor; the slot is free as before then.
        """
        try:
            for place in self._places:
                for number, (name, part) in enumerate(place.parts.items()):
                    factors = match.take(name)
                    if factors is not None:
                        _put(place.site, slot, number, part, factors, f"{match.path}: {name}")
            for name in self._elsewhere:
                match.take(name)
            match.check_all_used()
            if self.limits.stacked_on is not None and self.limits.stacked_on.type == "cuda":
                torch.cuda.synchronize(self.limits.stacked_on)  # steps run on another stream
        except BaseException:
            self.clear(slot)
            raise

    def clear(self, slot: int) -> None:
        """Free a slot. No step may run meanwhile."""
        for place in self._places:
            place.site.clear(slot)

    @property
    def nbytes(self) -> int:
        return sum(place.site.nbytes for place in self._places)


def _put(
    site: AnySite | HeadSites | ExpertSite,
    slot: int,
    number: int,
    part: FactorPart,
    factors: LowRankFactors,
    where: str,
) -> None:
    if factors.rank > site.max_rank:
        raise ShapeMismatch(f"{where}: rank {factors.rank} is more than {site.max_rank} (--max-lora-rank)")
    try:
        site.put(slot, number, part.keep(factors))
    except ShapeMismatch as error:
        raise ShapeMismatch(f"{where}: {error}") from None
