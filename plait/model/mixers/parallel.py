"""Mixers that read the same input, with outputs that are summed (Falcon-H1)."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import build, describe, divide, mixer
from plait.ops.activation import combine
from plait.ops.ranks import sum_ranks
from plait.partition import Division, Rank
from plait.spec.model import ParallelSpec
from plait.state.store import StateStore


def _words(m: ParallelSpec) -> str:
    return " ∥ ".join(f"{name}: {describe(part)}" for name, part in m.parts.items())


def _divide(s: ParallelSpec, rank: Rank, hidden_size: int) -> Division:
    parts = {name: divide(part, rank, hidden_size) for name, part in s.parts.items()}
    cuts = {f"{name}.{key}": cut for name, part in parts.items() for key, cut in part.cuts.items()}
    sums, gathers = (sum(getattr(part, name) for part in parts.values()) for name in ("sums", "gathers"))
    is_apart = _is_apart(s, rank) or any(part.sums < 0 for part in parts.values())
    sums += (len(parts) - 1) * is_apart
    return Division(replace(s, parts={n: part.spec for n, part in parts.items()}), cuts, sums, gathers)


def _is_apart(s: ParallelSpec, rank: Rank) -> bool:
    """Whether each part is summed over ranks by itself: as one rank alone adds them, or before its norm."""
    return rank.shares > 0 or bool(s.post_norms)


@mixer(ParallelSpec, _words, _divide)
class Parallel:
    """Its parts have the names of the spec's."""

    def __init__(self, s: ParallelSpec, w: Weights) -> None:
        self.parts = [build(part, w.scope(name)) for name, part in s.parts.items()]
        norms, hidden = s.norms, w.target.hidden_size
        self.norms = [
            Norm(norms[name], w.scope(f"{name}.norm"), hidden) if name in norms else None for name in s.parts
        ]
        self.post_norms = [
            Norm(s.post_norms[name], w.scope(f"{name}.post_norm"), hidden) if name in s.post_norms else None
            for name in s.parts
        ]
        self._combine, self._comm, self._dtype = w.bind(combine), w.target.comm, w.target.dtype
        self._are_summed = [getattr(part, "is_summed", False) for part in self.parts]
        self.is_summed = _is_apart(s, self._comm.rank) or any(self._are_summed)
        self.states: dict[str, State] = {
            name: state for part in self.parts for name, state in part.states.items()
        }

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        total, *others = (
            self._part(n, norm(x) if norm else x, batch, store) for n, norm in enumerate(self.norms)
        )
        for other in others:
            total = self._combine(total, other, 1.0)
        return total

    def _part(self, n: int, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        y = self.parts[n](x, batch, store)
        y = sum_ranks(y, self._comm, self._dtype) if self.is_summed and not self._are_summed[n] else y
        post_norm = self.post_norms[n]
        return post_norm(y) if post_norm else y
