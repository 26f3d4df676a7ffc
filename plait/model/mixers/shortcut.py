"""A mixer next to experts with an output that waits until the next feed-forward is computed."""

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
from plait.spec.branches import ShortcutSpec
from plait.state.store import StateStore

MOE = "moe"
WAITING = "shortcut"  # in `Batch.step`


def _name_now(s: ShortcutSpec) -> str:
    """The part with an output that is added at once."""
    return next(name for name in s.parts if name != MOE)


def _words(m: ShortcutSpec) -> str:
    now = describe(m.parts[_name_now(m)])
    return (
        f"{now} ∥ {describe(m.parts[MOE])}, added behind the next"
        if MOE in m.parts
        else f"{now}, and what waits"
    )


def _divide(s: ShortcutSpec, rank: Rank, hidden_size: int) -> Division:
    parts = {name: divide(part, rank, hidden_size) for name, part in s.parts.items()}
    cuts = {f"{name}.{key}": cut for name, part in parts.items() for key, cut in part.cuts.items()}
    sums, gathers = (sum(getattr(part, name) for part in parts.values()) for name in ("sums", "gathers"))
    part = replace(s, parts={n: p.spec for n, p in parts.items()})
    return Division(part, cuts, sums + len(parts) - 1, gathers)


@mixer(ShortcutSpec, _words, _divide)
class Shortcut:
    is_summed = True

    def __init__(self, s: ShortcutSpec, w: Weights) -> None:
        self._now, hidden = _name_now(s), w.target.hidden_size
        self.parts = {name: build(part, w.scope(name)) for name, part in s.parts.items()}
        self.norms = {name: Norm(norm, w.scope(f"{name}.norm"), hidden) for name, norm in s.norms.items()}
        self.states: dict[str, State] = {
            name: state for part in self.parts.values() for name, state in part.states.items()
        }
        self._combine, self._ranks = w.bind(combine), (w.target.comm, w.target.dtype)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        if MOE in self.parts:
            batch.step[WAITING] = self._part(MOE, x, batch, store)
            return self._part(self._now, x, batch, store)
        total: Tensor = self._combine(self._part(self._now, x, batch, store), batch.step.pop(WAITING), 1.0)
        return total

    def _part(self, name: str, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        part = self.parts[name]
        y = part(self.norms[name](x) if name in self.norms else x, batch, store)
        return y if getattr(part, "is_summed", False) else sum_ranks(y, *self._ranks)
