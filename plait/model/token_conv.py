"""Short convolutions over a drafted block, around attention and around a feed-forward (DFlash2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.ops.dynamic_conv import head_conv
from plait.spec.draft_heads import BlockConvSpec


@dataclass(frozen=True, slots=True)
class BlockRows:
    """Which rows of a pass are a block: `starts`, [S+1] int64. `slots`, `history`: zeros, [S].

    There may be fewer blocks than S: behind the last one, `starts` is the number of rows.
    """

    starts: Tensor
    slots: Tensor
    history: Tensor

    @classmethod
    def of(cls, starts: Tensor) -> BlockRows:
        """Blocks between each two of `starts`."""
        return cls(starts, torch.zeros_like(starts[1:]), torch.zeros_like(starts[1:], dtype=torch.bool))


class TokenConv:
    """y[t] = Σ_k (base[k] + made[t, group, k]) x[t - k], of what a layer reads, and of what it gives.

    Both have taps of their own, which the token makes from what is read. `weights`: `taps` and `fixed`.
    Nothing is there before a block: the first rows see zeros.
    """

    def __init__(self, s: BlockConvSpec, w: Weights, hidden: int) -> None:
        self._width = hidden // s.group * s.kernel
        self.taps = w.linear("taps", in_size=hidden, out_sizes=(2 * self._width,))
        fixed = w.tensor("fixed", (2, s.kernel, hidden), torch.float32)
        self.fixed = [part.contiguous() for part in fixed]
        # What is kept behind a block is never read: blocks have no history.
        self._tail = torch.empty(1, s.kernel - 1, hidden, dtype=w.target.dtype, device=w.target.device)
        self._conv = w.bind(head_conv, channels=hidden, kernel=s.kernel)

    def enter(self, h: Tensor, rows: BlockRows) -> tuple[Tensor, Tensor]:
        """h: [T, hidden] -> (its like, the taps with which `leave` goes on)."""
        before, behind = self.taps(h).split(self._width, -1)
        return self._convolve(h, before, 0, rows), behind

    def leave(self, h: Tensor, taps: Tensor, rows: BlockRows) -> Tensor:
        """h: [T, hidden] -> its like."""
        return self._convolve(h, taps, 1, rows)

    def _convolve(self, h: Tensor, taps: Tensor, side: int, rows: BlockRows) -> Tensor:
        where = rows.slots, rows.starts, rows.history
        made: Tensor = self._conv(h, taps, self.fixed[side], self._tail, *where, 1.0)
        return made
