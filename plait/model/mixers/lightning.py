"""Lightning attention (MiniMax-01): linear attention with heads that forget at fixed rates.

It is the recurrence of Mamba2 with a step of 1: x = v, B = k, C = q, A = -slope, and no D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch, Norm
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, gate
from plait.ops.ssm import mamba2_scan
from plait.state.store import StateStore


def _words(m: spec.LightningSpec) -> str:
    return f"lightning attention, {m.num_heads} heads × {m.head_dim}"


@mixer(spec.LightningSpec, _words)
class Lightning:
    """The file's one projection has q, k and v of each head next to each other."""

    def __init__(self, s: spec.LightningSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, size, device = w.target.hidden_size, s.num_heads * s.head_dim, w.target.device
        self.qkv = w.linear("qkv", in_size=hidden, out_sizes=(3 * size,))
        self.gate = w.linear("gate", in_size=hidden, out_sizes=(size,))
        self.out = w.linear("o", in_size=size, out_sizes=(hidden,))
        self.norm = Norm(s.norm, w.scope("gated_norm"), size)
        self.A = -torch.tensor(s.slopes, dtype=torch.float32, device=device)
        self.step = torch.ones(1, s.num_heads, device=device)
        self._activate = w.bind(activate, kind=s.activation, gated=False)
        sizes = {"heads": s.num_heads, "dim": s.head_dim, "state": s.head_dim, "groups": s.num_heads}
        self._scan, self._gate = w.bind(mamba2_scan, **sizes), w.bind(gate)
        shape = (s.num_heads, s.head_dim, s.head_dim)
        self.states: dict[str, State] = {self.name: SlotState({"ssm": (shape, "float32")})}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self.spec
        qkv = self._activate(self.qkv(x), s.activation, False)
        q, k, v = qkv.unflatten(-1, (s.num_heads, 3, s.head_dim)).unbind(2)
        step = self.step.expand(len(x), -1)
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        operands = (v, step, self.A, k, q, None, store[self.name]["ssm"])
        y = self._scan(*operands, *where, positions=batch.positions)
        return self.out(self._gate(self.norm(y.flatten(1)), self.gate(x)))
