"""Lightning attention (MiniMax-01): linear attention with heads that forget at fixed rates.

It is the recurrence of Mamba2 with a step of 1: x = v, B = k, C = q, A = -slope, and no D.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.layers import Batch, Norm, own_part
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, gate
from plait.ops.ranks import gather_columns
from plait.ops.ssm import mamba2_scan
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, sum_of
from plait.state.store import StateStore


def _words(m: spec.LightningSpec) -> str:
    return f"lightning attention, {m.num_heads} heads × {m.head_dim}"


def _divide(s: spec.LightningSpec, rank: Rank, hidden_size: int) -> Division:
    ranges = rank.divide(s.num_heads, "heads", s.head_dim)
    (first, last), own = join_ranges(rank.divide(s.num_heads, "heads")), join_ranges(ranges)
    cuts = {"qkv": Cut((scale_range(own, 3),)), "gate": Cut((own,)), "o": Cut(cols=sum_of(ranges))}
    part = replace(s, num_heads=last - first, slopes=s.slopes[first:last])
    return Division(part, cuts, gathers=1)


@mixer(spec.LightningSpec, _words, _divide)
class Lightning:
    """The file's one projection has q, k and v of each head next to each other."""

    def __init__(self, s: spec.LightningSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, size, device = w.target.hidden_size, s.num_heads * s.head_dim, w.target.device
        self.qkv = w.linear("qkv", in_size=hidden, out_sizes=(3 * size,))
        self.gate = w.linear("gate", in_size=hidden, out_sizes=(size,))
        self.out = w.linear("o", in_size=size, out_sizes=(hidden,))
        self._comm, self._size = w.target.comm, size
        self.norm = Norm(s.norm, w.scope("gated_norm"), size * self._comm.rank.size)
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
        y = gather_columns(self._comm, y.flatten(1), [self._size] * self._comm.rank.size)
        return self.out(self._gate(own_part(self._comm, self.norm(y), self._size), self.gate(x)))
