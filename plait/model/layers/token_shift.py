"""RWKV's token shift: every channel takes a share of what the last token had (Peng et al. 2023)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch
from plait.ops.wkv import shift_rows

SHIFT = "shift"  # the last token, among a mixer's states


class TokenShift:
    """x + share · (last x - x), once for each of `names`; the shares are `shift.{name}`, [hidden]."""

    shape: tuple[tuple[int, ...], str]

    def __init__(self, w: Weights, *names: str) -> None:
        hidden = w.target.hidden_size
        self.shape = (1, hidden), "model"
        kept = w.scope("shift")
        self._shares = torch.stack([kept.tensor(name, (hidden,)) for name in names])
        self._taps = torch.tensor([1.0, -1.0], dtype=w.target.dtype, device=w.target.device).repeat(hidden, 1)
        self._shift = w.bind(shift_rows, channels=hidden, kernel=2)

    def __call__(self, x: Tensor, batch: Batch, state: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """x: [T, hidden] -> one [T, hidden] for each name."""
        where = (state[SHIFT], batch.state_slots, batch.query_start, batch.has_history)
        found: tuple[Tensor, ...] = self._shift(x, self._taps, self._shares, *where)
        return found
