"""Connections over several layers (block skip connections; Solar Pro): what was read is read again."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.layers.layers import Batch
from plait.model.mixers.registry import mixer
from plait.partition import Division, Rank
from plait.spec.branches import SkipSpec
from plait.state.store import StateStore

KEPT = "kept in place {}"  # in `Batch.step`


def _words(m: SkipSpec) -> str:
    kept = " and ".join(map(str, m.keeps))
    return f"kept in place {kept}" if m.gives is None else f"mixed with what place {m.gives} keeps"


def _divide(s: SkipSpec, rank: Rank, hidden_size: int) -> Division:
    """Whole on every rank, so nothing is summed."""
    return Division(s, {}, sums=-1)


@mixer(SkipSpec, _words, _divide)
class Skip:
    """It has no weights."""

    is_summed = True

    def __init__(self, s: SkipSpec, w: Weights) -> None:
        self.spec, self.states = s, dict[str, State]()

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> x, or what was kept in a place, its like."""
        batch.step.update({KEPT.format(place): x for place in self.spec.keeps})
        given: Tensor = x if self.spec.gives is None else batch.step[KEPT.format(self.spec.gives)]
        return given
