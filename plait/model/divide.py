"""A model's part on one rank: the spec with that rank's sizes, and what it keeps of every tensor.

Mixers are built from the rank's spec and know nothing of the others. Their outputs are summed over the ranks
in one place, `decoder.Branch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from plait.errors import CannotDivide
from plait.model.mixers.registry import divide
from plait.model.shared_block import divide_aside
from plait.partition import MOST_SHARES, Cut, Rank
from plait.spec.model import BranchSpec, ModelSpec

_ALONE = Rank()


def divide_model(s: ModelSpec, rank: Rank) -> tuple[ModelSpec, Mapping[str, Cut]]:
    """(the spec with this rank's sizes, cuts by our names). A name without a cut is whole on every rank.

    Raises CannotDivide, which names the branch, the part and its size.
    """
    if rank.num_shares == 1:
        return s, {}
    cuts: dict[str, Cut] = {}
    layers = []
    for i, layer in enumerate(s.layers):
        branches = []
        for branch in layer:
            name = f"layers.{i}.{branch.name}"
            branches.append(_divide_branch(branch, name, s.hidden_size, rank, cuts))
        layers.append(tuple(branches))
    return replace(s, layers=tuple(layers)), cuts


def _divide_branch(
    branch: BranchSpec, name: str, hidden_size: int, rank: Rank, cuts: dict[str, Cut]
) -> BranchSpec:
    try:
        part = divide(branch.mixer, rank, hidden_size)
        cuts |= {f"{name}.{key}": cut for key, cut in part.cuts.items()}
        aside = branch.aside
        if aside:
            aside, its_cuts, shared = divide_aside(aside, rank)
            cuts |= {f"{name}.aside.{key}": cut for key, cut in its_cuts.items()}
            cuts |= {f"shared.{aside.block}.{key}": cut for key, cut in shared.items()}
    except CannotDivide as error:
        raise CannotDivide(f"{name}: {error}") from None
    return replace(branch, mixer=part.spec, aside=aside)


def count_shares(s: ModelSpec, like: Rank = _ALONE) -> int:
    """Into how many shares, at most 8, all sums of a model can be divided: the most ranks that it runs on.

    `like`: says how large blocks are, and whether experts stay whole.
    """
    shares = MOST_SHARES
    while shares > 1:
        try:
            for index in range(shares):  # as many ranks: where one share ends, another rank's heads begin
                divide_model(s, replace(like, index=index, size=shares, shares=shares))
            return shares
        except CannotDivide:
            shares //= 2
    return 1
