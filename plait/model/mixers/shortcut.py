"""A feed-forward next to experts with an output that waits until the next feed-forward is computed."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch
from plait.model.mixers.registry import build, describe, divide, mixer
from plait.ops.activation import combine
from plait.ops.ranks import sum_ranks
from plait.partition import Division, Rank
from plait.rare_specs import ShortcutSpec
from plait.state.store import StateStore

WAITING = "shortcut"  # in `Batch.step`


def _words(m: ShortcutSpec) -> str:
    if "moe" in m.parts:
        return f"{describe(m.parts['mlp'])} ∥ {describe(m.parts['moe'])}, added behind the next"
    return f"{describe(m.parts['mlp'])}, and what waits"


def _divide(s: ShortcutSpec, rank: Rank, hidden_size: int) -> Division:
    parts = {name: divide(part, rank, hidden_size) for name, part in s.parts.items()}
    cuts = {f"{name}.{key}": cut for name, part in parts.items() for key, cut in part.cuts.items()}
    return Division(replace(s, parts={n: p.spec for n, p in parts.items()}), cuts, len(parts) - 1)


@mixer(ShortcutSpec, _words, _divide)
class Shortcut:
    is_summed = True

    def __init__(self, s: ShortcutSpec, w: Weights) -> None:
        self.parts = {name: build(part, w.scope(name)) for name, part in s.parts.items()}
        self.states: dict[str, State] = {}
        self._combine, self._ranks = w.bind(combine), (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        if "moe" in self.parts:
            batch.step[WAITING] = self._part("moe", x, batch, store)
            return self._part("mlp", x, batch, store)
        total: Tensor = self._combine(self._part("mlp", x, batch, store), batch.step.pop(WAITING), 1.0)
        return total

    def _part(self, name: str, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        part = self.parts[name]
        y = part(x, batch, store)
        return y if getattr(part, "is_summed", False) else sum_ranks(y, *self._ranks)
