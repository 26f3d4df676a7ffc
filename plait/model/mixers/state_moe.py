"""Experts chosen by a small network over numbers that go from layer to layer (ZAYA)."""

from __future__ import annotations

from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.moe import Moe, divide_moe
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate
from plait.ops.linear import Linear
from plait.ops.wkv import mix_shift
from plait.spec.moe import StateMoeSpec
from plait.state.store import StateStore

STATE = "state of the router"  # in `Batch.step`


def _words(m: StateMoeSpec) -> str:
    return f"MoE, {m.top_k} of {m.num_experts} experts × {m.expert.size} or none, a router of {m.router_size}"


@mixer(StateMoeSpec, _words, divide_moe)
class StateMoe(Moe):
    """`router.enter` makes the numbers, `router.scale` says how much of the last layer's is added."""

    gives_back = False

    def __init__(self, s: StateMoeSpec, w: Weights) -> None:
        self._size = s.router_size
        super().__init__(s, w)
        own, size = w.scope("router"), (s.router_size,)
        self.enter = own.linear("enter", in_size=w.target.hidden_size, out_sizes=size)
        self.scale_state = None if s.first else own.tensor("scale", size)
        self.state_norm = Norm(s.norm, own.scope("norm"), s.router_size)
        self.inner = [own.linear(name, in_size=s.router_size, out_sizes=size) for name in ("first", "second")]
        self._activate, self._add = w.bind(activate, kind="gelu", gated=False), w.bind(mix_shift)

    def _build_router(self, w: Weights, scored: int) -> Linear:
        return w.scope("router").linear("last", in_size=self._size, out_sizes=(scored,))

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        state = self.enter(x)
        if self.scale_state is not None:
            state = self._add(state, batch.step[STATE], self.scale_state.expand(len(x), -1))
        batch.step[STATE] = state
        h = self.state_norm(state)
        for linear in self.inner:
            h = self._activate(linear(h), "gelu", False)
        return self.choose(self.router(h), x, x)
