"""Between stacks of layers that run in cycles, over a fast and a slow state (HRM; Wang et al. 2025)."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import mixer
from plait.ops.activation import combine
from plait.partition import Division, Rank
from plait.spec.branches import CycleSpec
from plait.state.store import StateStore

SLOW, FAST = "slow state", "fast state"  # in `Batch.step`
_STATES = {"slow": (SLOW,), "fast": (FAST,), "both": (SLOW, FAST)}  # what becomes the last stack's output


def _words(m: CycleSpec) -> str:
    if m.after == "alone":
        return "a norm between two rounds"
    if m.after == "both":
        return "a slow state and a fast one begin as this, normed"
    return f"the {m.after} state becomes this" if m.after else "a slow state and a fast one begin"


def _divide(s: CycleSpec, rank: Rank, hidden_size: int) -> Division:
    """Whole on every rank, so nothing is summed."""
    return Division(s, {}, sums=-1)


@mixer(CycleSpec, _words, _divide)
class Cycle:
    """`first` [hidden]: the fast state before the first stack."""

    is_summed = True

    def __init__(self, s: CycleSpec, w: Weights) -> None:
        hidden, self.states = w.target.hidden_size, dict[str, State]()
        self._is_alone, self._becomes = s.after == "alone", _STATES.get(s.after or "", ())
        self.norm = Norm(s.norm, w.scope("norm"), hidden) if s.after else None
        self.first = None if s.after else w.tensor("first", (hidden,))
        self._combine = w.bind(combine)

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden], what the last stack gave, or embeddings -> what the next one reads, its like."""
        if self._is_alone and self.norm:
            return self.norm(x)
        if self.first is not None:
            batch.step[SLOW], batch.step[FAST] = x, self.first.expand(len(x), -1)
        elif self.norm:
            batch.step.update(dict.fromkeys(self._becomes, self.norm(x)))
        read: Tensor = self._combine(batch.step[SLOW], batch.step[FAST], 1.0)
        return read
