"""From what a mixer is to what computes it: the one place that matches on the spec's type."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.batch import Batch
from plait.model.layers.mlp import Mlp
from plait.model.layers.moe import Moe
from plait.model.mixers.attention import Attention
from plait.model.mixers.delta_rule import DeltaNet
from plait.model.mixers.lightning import Lightning
from plait.model.mixers.mamba1 import Mamba1
from plait.model.mixers.mamba2 import Mamba2
from plait.model.mixers.mamba3 import Mamba3
from plait.model.mixers.mla import Mla
from plait.model.mixers.rg_lru import RgLru
from plait.model.mixers.short_conv import ShortConv
from plait.ops.activation import combine
from plait.state.store import StateStore


class Mixer(Protocol):
    """What happens inside a residual branch: a function of (x [T, hidden], batch, store) -> [T, hidden]."""

    states: dict[str, State]

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor: ...


class Parallel:
    """Mixers that read the same input and whose outputs are summed."""

    def __init__(self, s: spec.Parallel, w: Weights) -> None:
        self.parts = [build(part, w.scope(name)) for name, part in s.parts.items()]
        self._combine = w.bind(combine)
        self.states = {name: state for part in self.parts for name, state in part.states.items()}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        total, *others = (part(x, batch, store) for part in self.parts)
        for other in others:
            total = self._combine(total, other, 1.0)
        return total


_MIXERS: Mapping[type, Callable[[Any, Weights], Mixer]] = {
    spec.Attention: Attention,
    spec.Mla: Mla,
    spec.Mamba1: Mamba1,
    spec.Mamba2: Mamba2,
    spec.Mamba3: Mamba3,
    spec.ShortConv: ShortConv,
    spec.DeltaNet: DeltaNet,
    spec.Lightning: Lightning,
    spec.RgLru: RgLru,
    spec.Mlp: Mlp,
    spec.Moe: Moe,
    spec.Parallel: Parallel,
}


def build(s: spec.Mixer, w: Weights) -> Mixer:
    return _MIXERS[type(s)](s, w)
