"""What every kernel with state in slots keeps: the bits of a row depend on it and its history alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SLOTS = 6
Where = tuple[Tensor, Tensor, Tensor]  # slots, query_start, has_history


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """An op on made-up rows. run(rows of each input, state, where) -> rows; it moves the state on."""

    inputs: tuple[Tensor, ...]  # each [T, …]
    state: Tensor  # [SLOTS, …]
    run: Callable[[tuple[Tensor, ...], Tensor, Where], Tensor]

    def step(self, state: Tensor, seqs: Sequence[tuple[int, slice, bool]]) -> list[Tensor]:
        """Rows of each sequence, given as (slot, rows of the inputs, has history)."""
        slots = torch.tensor([slot for slot, _, _ in seqs])
        counts = [rows.stop - rows.start for _, rows, _ in seqs]
        query_start = torch.tensor([0, *counts]).cumsum(0)
        history = torch.tensor([past for _, _, past in seqs])
        inputs = tuple(torch.cat([m[rows] for _, rows, _ in seqs]) for m in self.inputs)
        return list(self.run(inputs, state, (slots, query_start, history)).split(counts))

    def walk(self, state: Tensor, slot: int, cuts: Sequence[int]) -> Tensor:
        """A whole prompt in a slot that is garbage, cut into so many rows each."""
        out, start = [], 0
        for count in cuts:
            out += self.step(state, [(slot, slice(start, start + count), start > 0)])
            start += count
        return torch.cat(out)


def check_cuts(layer: RecurrentLayer, cuts: Sequence[Sequence[int]]) -> None:
    """However a prompt is cut, token by token included, its rows and its state have the same bits."""
    state = torch.full_like(layer.state, float("nan"))
    want = layer.walk(state, 2, [len(layer.inputs[0])])
    assert bool(want.isfinite().all())
    for cut in cuts:
        again = torch.full_like(state, float("nan"))
        assert torch.equal(layer.walk(again, 3, cut), want), cut
        assert torch.equal(again[3], state[2]), cut
        assert bool(again[[0, 1, 2, 4, 5]].isnan().all())  # of other slots nothing is written


def check_composition(layer: RecurrentLayer) -> None:
    """Decodes, prompts and padding in one step give each sequence what it gets alone."""
    seqs = [
        (1, slice(0, 1), True),
        (4, slice(1, 6), False),
        (0, slice(6, 7), True),
        (2, slice(7, 8), False),
        (0, slice(8, 9), True),
        (5, slice(9, 12), True),
    ]
    state = layer.state.clone()
    together = layer.step(state, seqs)
    for seq, rows in zip(seqs, together, strict=True):
        slot = seq[0]
        if slot == 0:
            continue  # padding, of which several are in one slot
        alone = layer.state.clone()
        assert torch.equal(layer.step(alone, [seq])[0], rows)
        assert torch.equal(alone[slot], state[slot])
    assert torch.equal(state[3], layer.state[3])
