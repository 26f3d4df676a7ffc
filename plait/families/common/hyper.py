"""Families with hyper-connections: their branches over several residual streams, and the tensors of these."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived, Rules, Source
from plait.errors import UnsupportedModel
from plait.families.common.recipes import Stored
from plait.quant.weight import as_tensor
from plait.spec.branches import GatedBranchSpec, HyperBranchSpec
from plait.spec.model import BranchSpec, HyperSpec, ModelSpec

MOST = 64  # residual streams, and rounds in which they are balanced


def over_streams(spec: ModelSpec, hyper: HyperSpec) -> ModelSpec:
    """The same model, each branch over several streams: its mixer is `inner`, its norm of what that reads.

    A branch without a norm stays as it is: it reads all streams by itself.
    """

    if not 1 < hyper.count <= MOST:
        raise UnsupportedModel(f"{hyper.count} residual streams are not implemented; known: 2 to {MOST}")

    if (hyper.rounds or 0) > MOST:
        raise UnsupportedModel(f"{hyper.rounds} rounds for each mix of streams; known: at most {MOST}")

    def wrap(branch: BranchSpec) -> BranchSpec:
        if branch.norm is None:
            return branch
        kind = GatedBranchSpec if hyper.rank else HyperBranchSpec
        inside = kind({"inner": branch.mixer}, hyper=hyper, norm=branch.norm)
        return replace(branch, mixer=inside, norm=None)

    layers = tuple(tuple(wrap(branch) for branch in layer) for layer in spec.layers)
    return replace(spec, layers=layers, streams=hyper.count, hyper=hyper)


def move_inside(names: Rules, branches: Sequence[str]) -> Rules:
    """The table of a model with branches over streams: all but their norms is one level further in."""
    found = dict[str, Source | tuple[Source, ...]]()
    for ours, theirs in names.items():
        start = next((f"layers.{{i}}.{b}." for b in branches if ours.startswith(f"layers.{{i}}.{b}.")), None)
        inside = start is not None and ours != f"{start}norm"
        found[ours.replace(start, f"{start}inner.") if start and inside else ours] = theirs
    return found


def stream_weights(ours: str, theirs: Sequence[tuple[str, str, str]], sizes: tuple[int, ...]) -> Rules:
    """A linear layer of weights of streams, of (fn, scale, base): rows of fn times their number of scale.

    sizes: how many rows each number is of. theirs: alternatives.
    """

    def scaled(fn: Stored, scale: Stored, **_: str) -> Tensor:
        by = as_tensor(scale).float().flatten().repeat_interleave(torch.tensor(sizes))
        return as_tensor(fn).float() * by[:, None]

    back = (Back(), Back(lambda w: torch.ones(len(sizes))))
    return {
        f"{ours}.weights.weight": tuple(Derived(scaled, (fn, scale), back) for fn, scale, _ in theirs),
        f"{ours}.weights.bias": tuple(base for _, _, base in theirs),
    }


def name_triples(prefixes: Iterable[str], words: Iterable[str]) -> list[tuple[str, str, str]]:
    """(fn, scale, base) below each prefix, each with each word before it."""
    return [(f"{p}{w}fn", f"{p}{w}scale", f"{p}{w}base") for p, w in product(prefixes, words)]
