"""Families with attention residuals: branches that read a mean over blocks of layers, and their tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived
from plait.errors import UnsupportedModel
from plait.families.common.recipes import Stored
from plait.quant.weight import as_tensor
from plait.spec.branches import DepthSpec
from plait.spec.model import BranchSpec, ModelSpec

LAST = "depth"  # the branch behind the last layer's: what the model's last norm reads


def over_depth(spec: ModelSpec, size: int) -> ModelSpec:
    """The same model of two branches a layer, each over what blocks of `size` layers gave.

    A block ends in front of the first branch of every `size`-th layer. Raises UnsupportedModel.
    """
    if size < 1:
        raise UnsupportedModel(f"blocks of {size} layers are not implemented; known: one layer or more")

    def wrap(branch: BranchSpec, sources: int, ends: bool) -> BranchSpec:
        inside = DepthSpec(
            {"inner": branch.mixer}, sources=sources, ends=ends, norm=branch.norm, eps=spec.norm.eps
        )
        return replace(branch, mixer=inside, norm=None, keep=0.0 if ends else None)

    layers = [
        (wrap(first, -(-i // size), i % size == 0), wrap(second, i // size + 1, False))
        for i, (first, second) in enumerate(spec.layers)
    ]
    whole = DepthSpec({}, sources=(len(layers) - 1) // size + 1, eps=spec.norm.eps)
    *others, end = layers
    return replace(spec, layers=(*others, (*end, BranchSpec(LAST, whole, None, keep=0.0))))


def score_weights(theirs: str) -> Derived:
    """What scores a source: the weight of its norm, `theirs`_norm, times that of `theirs`_proj."""

    def multiplied(norm: Stored, proj: Stored, **_: str) -> Tensor:
        return as_tensor(norm).float() * as_tensor(proj).float().flatten()

    back = (Back(torch.ones_like), Back(lambda w: w[None]))
    return Derived(multiplied, (f"{theirs}_norm.weight", f"{theirs}_proj.weight"), back)
