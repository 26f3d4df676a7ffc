"""Mixers that read the same input, with outputs that are summed (Falcon-H1)."""

from __future__ import annotations

from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import build, describe, mixer
from plait.ops.activation import combine
from plait.state.store import StateStore


def _words(m: spec.ParallelSpec) -> str:
    return " ∥ ".join(f"{name}: {describe(part)}" for name, part in m.parts.items())


@mixer(spec.ParallelSpec, _words)
class Parallel:
    """Its parts have the names of the spec's."""

    def __init__(self, s: spec.ParallelSpec, w: Weights) -> None:
        self.parts = [build(part, w.scope(name)) for name, part in s.parts.items()]
        norms, hidden = s.norms, w.target.hidden_size
        self.norms = [
            Norm(norms[name], w.scope(f"{name}.norm"), hidden) if name in norms else None for name in s.parts
        ]
        self._combine = w.bind(combine)
        self.states: dict[str, State] = {
            name: state for part in self.parts for name, state in part.states.items()
        }

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        both = zip(self.parts, self.norms, strict=True)
        total, *others = (part(norm(x) if norm else x, batch, store) for part, norm in both)
        for other in others:
            total = self._combine(total, other, 1.0)
        return total
