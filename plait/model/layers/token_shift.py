"""RWKV's token shift: every channel takes a share of what the last token had (Peng et al. 2023, 2024)."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.checkpoint.weights import Weights
from plait.model.layers.layers import Batch
from plait.ops.activation import combine, rescale
from plait.ops.heads import map_heads
from plait.ops.wkv import mix_shift, shift_rows

SHIFT = "shift"  # the last token, among a mixer's states


class TokenShift:
    """x + share · (last x - x), once for each of `names`; the shares are `shift.{name}`, [hidden].

    `whole`: the first is last x itself, of a share of 1.
    """

    shape: tuple[tuple[int, ...], str]

    def __init__(self, w: Weights, *names: str, whole: bool = False) -> None:
        hidden = w.target.hidden_size
        self.shape = (1, hidden), "model"
        kept = w.scope("shift")
        shares = [kept.tensor(name, (hidden,)) for name in names]
        self._shares = torch.stack([*([torch.ones_like(shares[0])] if whole else []), *shares])
        self._taps = torch.tensor([1.0, -1.0], dtype=w.target.dtype, device=w.target.device).repeat(hidden, 1)
        self._shift = w.bind(shift_rows, channels=hidden, kernel=2)

    def __call__(self, x: Tensor, batch: Batch, state: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """x: [T, hidden] -> one [T, hidden] for each name."""
        where = (state[SHIFT], batch.state_slots, batch.query_start, batch.has_history)
        found: tuple[Tensor, ...] = self._shift(x, self._taps, self._shares, *where)
        return found


class MovedShift:
    """The same, with shares that every token moves by what it and the last one make (Peng et al. 2024).

    `shift.x`: the share of what `shift.down` reads, [hidden]. The tanh of that, `rank` numbers for each of
    `names`, goes through a matrix for each, `shift.up` [names, hidden, rank].
    """

    def __init__(self, w: Weights, rank: int, *names: str) -> None:
        hidden, count, bind = w.target.hidden_size, len(names), w.bind
        self._shift, self._sizes = TokenShift(w, "x", *names, whole=True), (count, rank)
        self.shape = self._shift.shape
        self._down = w.scope("shift").linear("down", in_size=hidden, out_sizes=(count * rank,))
        self._up = w.scope("shift").tensor("up", (count, hidden, rank))
        self._tanh, self._map, self._mix = bind(rescale), bind(map_heads, heads=count), bind(mix_shift)
        self._combine = bind(combine)

    def __call__(self, x: Tensor, batch: Batch, state: dict[str, Tensor]) -> tuple[Tensor, ...]:
        """x: [T, hidden] -> one [T, hidden] for each name."""
        last, reads, *mixed = self._shift(x, batch, state)
        change, narrow = self._combine(last, x, -1.0), self._tanh(self._down(reads), 1.0, 1.0)
        moves = self._map(narrow.unflatten(-1, self._sizes), self._up).unbind(1)
        return tuple(self._mix(each, change, move) for each, move in zip(mixed, moves, strict=True))
