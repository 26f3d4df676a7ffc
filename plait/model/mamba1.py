"""Mamba1 (Gu & Dao 2023): short convolution, input-dependent step, B and C, elementwise scan."""

from __future__ import annotations

import torch
from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import SlotState, State
from plait.model.batch import Batch
from plait.model.mamba2 import ShortConv
from plait.ops.activation import step_sizes
from plait.ops.gated_norm import gated_rms_norm
from plait.ops.ssm import mamba1_scan
from plait.state.store import StateStore


class Mamba1:
    def __init__(self, s: spec.Mamba1, w: Weights) -> None:
        self.spec, self.name = s, w.prefix
        hidden, inner = w.target.hidden_size, s.inner_size
        self.in_proj = w.linear("in", in_size=hidden, out_sizes=(2 * inner,))
        self.x_proj = w.linear("x", in_size=inner, out_sizes=(s.dt_rank + 2 * s.state_size,))
        self.dt_proj = w.linear("dt", in_size=s.dt_rank, out_sizes=(inner,))
        self.out = w.linear("out", in_size=inner, out_sizes=(hidden,))
        self.conv = ShortConv(w, inner, s.conv_kernel)
        self.A = w.tensor("A", (inner, s.state_size), torch.float32)
        self.D = w.tensor("D", (inner,), torch.float32)
        self._scan = w.bind(mamba1_scan, inner=inner, state=s.state_size)
        self._step_sizes = w.bind(step_sizes, heads=inner)
        self._gate = w.bind(gated_rms_norm, size=inner, groups=1)
        ssm, conv = (inner, s.state_size), self.conv.tail_shape
        state = SlotState({"conv": (conv, "model"), "ssm": (ssm, "float32")})
        self.states: dict[str, State] = {self.name: state}

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        """x: [T, hidden] -> [T, hidden]."""
        s, state = self.spec, store[self.name]
        h, gate = self.in_proj(x).chunk(2, -1)
        h = self.conv(h, batch, state["conv"])
        dt, B, C = self.x_proj(h).split([s.dt_rank, s.state_size, s.state_size], -1)
        dt = self._step_sizes(self.dt_proj(dt), None, 0.0, spec.UNLIMITED)
        where = (batch.state_slots, batch.query_start, batch.has_history, batch.num_decodes)
        y = self._scan(h, dt, self.A, B, C, self.D, state["ssm"], *where, s.state_limit)
        return self.out(self._gate(y, gate, None))
