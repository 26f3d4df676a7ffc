"""The tensors behind every mixer's state, addressed by block table or by slot."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from plait.memory import PagedState, SlotState, State, group_name


class StateStore:
    """Memory of all running sequences. `store["layers.3.attn"]` is a dict of tensors:

    paged: [num_blocks of its group, block_size, *entry]; slots: [num_slots, *shape]. Block 0 and slot 0 are
    garbage: padding writes there. Nothing is initialised: a block is written before it is read, and a slot is
    zeroed when it is given out.
    """

    def __init__(
        self,
        states: Mapping[str, State],
        num_blocks: Mapping[str, int],
        num_slots: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.block_size = block_size
        self._slots: list[Tensor] = []
        self._tensors: dict[str, dict[str, Tensor]] = {}
        for name, state in states.items():
            match state:
                case PagedState():
                    rows = (num_blocks[group_name(state.window)], block_size)
                    kind = dtype_of(state.dtype, dtype)
                    self._tensors[name] = {
                        key: torch.empty(*rows, *shape, dtype=kind, device=device)
                        for key, shape in state.entry.items()
                    }
                case SlotState():
                    self._tensors[name] = {
                        key: torch.empty(num_slots, *shape, dtype=dtype_of(kind, dtype), device=device)
                        for key, (shape, kind) in state.tensors.items()
                    }
                    self._slots += self._tensors[name].values()

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        return self._tensors[name]

    def zero_slots(self, slots: Iterable[int]) -> None:
        """Make slots as a new sequence expects them: a one-token prompt must never read the last owner."""
        if index := list(slots):
            for tensor in self._slots:
                tensor[index] = 0

    def copy_slots(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Copy slot states, (from, to): snapshot, restore, fork."""
        if both := list(pairs):
            sources, targets = [a for a, _ in both], [b for _, b in both]
            for tensor in self._slots:
                tensor[targets] = tensor[sources]

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for group in self._tensors.values() for t in group.values())


def dtype_of(name: str, model: torch.dtype) -> torch.dtype:
    """A state's dtype by its name; "model" is the one the model computes in."""
    found: torch.dtype = model if name == "model" else getattr(torch, name)
    return found
