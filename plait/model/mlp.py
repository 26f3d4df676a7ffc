"""Feed-forward layers: gated (SwiGLU, GeGLU; Shazeer 2020) or plain."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch.nn.functional as F
from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.memory import State
from plait.model.batch import Batch
from plait.state.store import StateStore

ACTIVATIONS: Mapping[spec.Activation, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


class Mlp:
    def __init__(self, s: spec.Mlp, w: Weights) -> None:
        self.spec, self.states = s, dict[str, State]()
        hidden = w.target.hidden_size
        names = ("gate", "up") if s.gated else ("up",)
        self.up = w.linear(*names, in_size=hidden, out_sizes=(s.size,) * len(names), split="out")
        self.down = w.linear("down", in_size=s.size, out_sizes=(hidden,), split="in")
        self._activate = ACTIVATIONS[s.activation]

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., hidden] -> [..., hidden]."""
        h = self.up(x)
        if self.spec.gated:
            gate, h = h.chunk(2, -1)
            return self.down(self._activate(gate) * h)
        return self.down(self._activate(h))

    def __call__(self, x: Tensor, batch: Batch, store: StateStore) -> Tensor:
        return self.forward(x)
