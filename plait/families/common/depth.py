"""Families with attention residuals: branches that read a mean over blocks of layers, and their tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from plait.checkpoint.names import Back, Derived
from plait.errors import UnsupportedModel
from plait.families.common.recipes import Stored
from plait.quant.weight import as_tensor
from plait.spec.branches import DepthSpec, MessageSpec
from plait.spec.model import BranchSpec, ModelSpec, NormSpec

LAST = "depth"  # the branch behind the last layer's: what the model's last norm reads


def over_depth(
    spec: ModelSpec,
    size: int,
    eps: float | None = None,
    of_normed: bool = False,
    reads: Sequence[int] | None = None,
) -> ModelSpec:
    """The same model of two branches a layer, each over what blocks of `size` layers gave.

    A block ends in front of the first branch of every `size`-th layer. eps: of sources, if not that of the
    model's norm; of_normed, reads (of the first branch of each layer): see `DepthSpec`. Raises
    UnsupportedModel.
    """
    if type(size) is not int or size < 1:
        raise UnsupportedModel(f"blocks of {size!r:.80} layers are not implemented; known: one layer or more")

    eps = spec.norm.eps if eps is None else eps
    each_reads = [1] * len(spec.layers) if reads is None else reads
    plain = DepthSpec({}, eps=eps, of_normed=of_normed)

    def wrap(branch: BranchSpec, sources: int, ends: bool, reads: int = 1) -> BranchSpec:
        parts = {"inner": branch.mixer}
        inside = replace(plain, parts=parts, sources=sources, ends=ends, norm=branch.norm, reads=reads)
        return replace(branch, mixer=inside, norm=None, keep=0.0 if ends else None)

    layers = [
        (wrap(first, -(-i // size), i % size == 0, many), wrap(second, i // size + 1, False))
        for i, ((first, second), many) in enumerate(zip(spec.layers, each_reads, strict=True))
    ]
    whole = replace(plain, sources=(len(layers) - 1) // size + 1)
    *others, end = layers
    return replace(spec, layers=(*others, (*end, BranchSpec(LAST, whole, None, keep=0.0))))


@dataclass(frozen=True, slots=True)
class Passes:
    """Layers `start` to `end` - 1, whole blocks of `size`, run in `passes`; gates of messages have `rank`."""

    start: int
    end: int
    passes: int
    rank: int
    size: int

    @property
    def layers(self) -> range:
        return range(self.start, self.end)

    @property
    def added(self) -> int:
        """Layers that later passes add: by so many, those behind the loop have higher numbers."""
        return (self.passes - 1) * len(self.layers)


def over_passes(spec: ModelSpec, loop: Passes, gate_norm: NormSpec) -> ModelSpec:
    """What `over_depth` gave, with each pass over looped layers as layers of their own.

    Their weights are those of the first pass, and states their own.
    """

    def again(i: int, branch: BranchSpec, messages: int) -> BranchSpec:
        assert isinstance(branch.mixer, DepthSpec)
        same = {f.name: getattr(branch.mixer, f.name) for f in fields(branch.mixer)}
        starts = i == loop.start and branch is spec.layers[i][0]
        inside = MessageSpec(
            **same,
            messages=messages,
            sent=len(loop.layers) // loop.size,
            rank=loop.rank,
            restarts=loop.start // loop.size if starts else None,
            gate_norm=gate_norm,
        )
        return replace(branch, mixer=inside, source=f"layers.{i}.{branch.name}")

    first, later = list(spec.layers), []
    last = first[-1][2:]  # the mean that the model's norm reads
    first[-1] = first[-1][:2]
    for i in loop.layers:
        attn, ffn = first[i]
        later.append((again(i, attn, 3), again(i, ffn, 1)))
        first[i] = tuple(replace(b, source=f"layers.{i}.{b.name}") for b in first[i])
    layers = [*first[: loop.end], *later * (loop.passes - 1), *first[loop.end :]]
    return replace(spec, layers=(*layers[:-1], (*layers[-1], *last)))


def score_weights(theirs: str, norm: str = "norm.weight") -> Derived:
    """What scores a source: the weight of its norm, `theirs`_norm, times that of `theirs`_proj.

    norm: how the former's name ends.
    """

    def multiplied(norm: Stored, proj: Stored, **_: str) -> Tensor:
        return as_tensor(norm).float() * as_tensor(proj).float().flatten()

    back = (Back(torch.ones_like), Back(lambda w: w[None]))
    return Derived(multiplied, (f"{theirs}_{norm}", f"{theirs}_proj.weight"), back)
