"""Lightning attention (MiniMax-01): linear attention with heads that forget at fixed rates.

It is the recurrence of Mamba2 with a step of 1: x = v, B = k, C = q, A = -slope, and no D.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.layers.kept_state import float_state_dtype
from plait.model.layers.layers import Batch, Norm, Rope, own_part
from plait.model.mixers.registry import mixer
from plait.ops.activation import activate, gate, rescale
from plait.ops.ranks import gather_columns
from plait.ops.ssm import mamba2_scan
from plait.partition import Cut, Division, Rank, join_ranges, scale_range, sum_of
from plait.spec.recurrent import LightningSpec
from plait.state.store import StateStore


def _words(m: LightningSpec) -> str:
    return f"lightning attention, {m.num_heads} heads × {m.head_dim}"


def _divide(s: LightningSpec, rank: Rank, hidden_size: int) -> Division:
    ranges = rank.divide(s.num_heads, "heads", s.head_dim)
    (first, last), own = join_ranges(rank.divide(s.num_heads, "heads")), join_ranges(ranges)
    cuts = {"qkv": Cut((scale_range(own, 3),)), "gate": Cut((own,)), "o": Cut(cols=sum_of(ranges))}
    part = replace(s, num_heads=last - first, slopes=s.slopes[first:last])
    return Division(part, cuts, gathers=1)


@mixer(LightningSpec, _words, _divide)
class Lightning:
    """The file's one projection has q, k and v of each head next to each other."""

    def __init__(self, s: LightningSpec, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, size, device = w.target.hidden_size, s.num_heads * s.head_dim, w.target.device
        self.qkv = w.linear("qkv", in_size=hidden, out_sizes=(3 * size,))
        self.gate = w.linear("gate", in_size=hidden, out_sizes=(size,))
        self.out = w.linear("o", in_size=size, out_sizes=(hidden,))
        self._comm, self._size = w.target.comm, size
        self.norm = Norm(s.norm, w.scope("gated_norm"), size * self._comm.rank.size, s.norm_groups)
        norms = (Norm(s.qk_norm, w.scope(f"{x}_norm"), s.head_dim) if s.qk_norm else None for x in "qk")
        self.q_norm, self.k_norm = norms
        self.rope, self._rescale = Rope(s.rope, w) if s.rope else None, w.bind(rescale)
        self.A = -torch.tensor(s.slopes, dtype=torch.float32, device=device)
        self.step = torch.ones(1, s.num_heads, device=device)
        self._activate = w.bind(activate, kind=s.activation, gated=False) if s.activation else None
        sizes = {"heads": s.num_heads, "dim": s.head_dim, "state": s.head_dim, "groups": s.num_heads}
        self._scan, self._gate = w.bind(mamba2_scan, **sizes), w.bind(gate)
        shape = (s.num_heads, s.head_dim, s.head_dim)
        self.states: dict[str, State] = {
            self.name: SlotState({"ssm": (shape, float_state_dtype(w.target, "lightning attention"))})
        }

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s = self.spec
        qkv = self.qkv(x)
        qkv = self._activate(qkv, s.activation, False) if self._activate else qkv
        q, k, v = qkv.unflatten(-1, (s.num_heads, 3, s.head_dim)).unbind(2)
        q, k = self._place(q, self.q_norm, batch), self._place(k, self.k_norm, batch)
        q = q if s.scale == 1.0 else self._rescale(q, s.scale, None)
        step = self.step.expand(len(x), -1)
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        operands = (v, step, self.A, k, q, None, store[self.name]["ssm"])
        y = self._scan(*operands, *where, positions=batch.positions)
        y = gather_columns(self._comm, y.flatten(1), [self._size] * self._comm.rank.size)
        return self.out(self._gate(own_part(self._comm, self.norm(y), self._size), self.gate(x)))

    def _place(self, x: Tensor, norm: Norm | None, batch: Batch) -> Tensor:
        """Queries or keys [T, heads, d], normed and turned where the spec says so."""
        x = norm(x) if norm else x
        return self.rope(x, batch.positions) if self.rope else x
