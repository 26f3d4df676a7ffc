"""The state store: tensors of the KV cache and of recurrent state, by block or slot, and copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from plait.errors import EngineError
from plait.memory import DTYPE_BYTES, PagedState, State, block_groups, group_name
from plait.state.swap import DeviceSwap, HostPiece, HostPool, copy_index, pin_memory, view_widest

Pairs = Iterable[tuple[int, int]]
SLOTS = "slots"
Bytes = npt.NDArray[np.uint8]


class StateStore:
    """Memory of all running sequences. `store["layers.3.attn"]` is a dict of tensors:

    paged: [num_blocks of its group, block_size, *entry]; slots: [num_slots, *shape]. Block 0 and slot 0 are
    garbage: padding writes there. Nothing is initialised: a block is written before it is read, and a slot is
    zeroed when it is given out.

    Kernels may lay out the inside of a block or a slot as they like, so whole ones are copied, byte for byte.
    Block groups are counted in the order of `block_groups(states)`.
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
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self._saved: dict[int, SavedState] = {}
        names = [*(group.name for group in block_groups(states)), SLOTS]
        rows: dict[str, list[Tensor]] = {name: [] for name in names}
        kinds = {name: getattr(torch, name) for name in DTYPE_BYTES} | {"model": dtype}
        for name, state in states.items():
            if isinstance(state, PagedState):
                group = group_name(state.window)
                shape: tuple[int, ...] = (num_blocks[group], block_size)
            else:
                group, shape = SLOTS, (num_slots,)
            self._tensors[name] = {
                key: torch.empty(*shape, *entry, dtype=kinds[kind], device=device)
                for key, (entry, kind) in state.tensors.items()
            }
            rows[group] += self._tensors[name].values()
        self._rows = [*map(StateRows, rows.values())]  # of each block group, then of slots
        self._swap: DeviceSwap | None = None
        if device.type == "cuda":
            self._swap = DeviceSwap([rows.tensors for rows in self._rows], device, HostPool(pin_memory))

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        return self._tensors[name]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that kernels see."""
        return [t for tensors in self._tensors.values() for t in tensors.values()]

    def zero_slots(self, slots: Iterable[int]) -> None:
        """Zero the slots of new sequences, because a one-token prompt must never read the last owner's."""
        self._rows[-1].zero(slots)

    def copy_rows(self, group: int, pairs: Pairs) -> None:
        """Copy blocks of a group, or slots (group -1), (from, to), one after the other."""
        self._rows[group].copy(pairs)

    def save(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        """Copy blocks (a sequence per group) and a slot (0: none) to host memory, over what had that name.

        From a GPU the copy is under way when this returns; what is loaded later, or written, waits for it.
        """
        self._check_groups(blocks)
        self.drop(handle)
        index = (*blocks, (slot,) if slot else ())
        nbytes = sum(len(some) * rows.nbytes for rows, some in zip(self._rows, index, strict=True))
        content = host_memory(nbytes) if self._swap is None else self._swap.save(index)
        if isinstance(content, Tensor):
            for rows, some, part in self._parts(index, content):
                rows.save(some, part)
        self._saved[handle] = SavedState(tuple(map(len, blocks)), bool(slot), nbytes, content)

    def load(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        """Copy a saved state back to as many blocks and a slot (0: none was saved); the copy stays.

        Raises EngineError, changing nothing, if there is no such copy or it is of another size.
        """
        self._check_groups(blocks)
        if (saved := self._saved.get(handle)) is None:
            raise EngineError(f"nothing is saved as {handle}: it was never saved, or was dropped")
        sizes = tuple(map(len, blocks)), bool(slot)
        if sizes != (saved.tables, saved.has_slot):
            text = f"{saved.tables} blocks and {int(saved.has_slot)} slots are saved as {handle}, not the"
            raise EngineError(f"{text} {sizes[0]} blocks and {int(sizes[1])} slots that are to be loaded")
        index = (*blocks, (slot,) if slot else ())
        if isinstance(saved.content, Tensor):
            for rows, some, part in self._parts(index, saved.content):
                rows.load(some, part)
        elif self._swap is not None:
            self._swap.load(index, saved.content)

    def drop(self, handle: int) -> None:
        """Free a saved copy; one that is not there (a step failed before it was saved) is free already."""
        saved = self._saved.pop(handle, None)
        if saved is not None and self._swap is not None and not isinstance(saved.content, Tensor):
            self._swap.drop(saved.content)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that kernels see."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def nbytes_saved(self) -> int:
        """Bytes of the copies in host memory."""
        return sum(saved.nbytes for saved in self._saved.values())

    def _parts(
        self, index: Sequence[Sequence[int]], content: Tensor
    ) -> Iterator[tuple[StateRows, Sequence[int], Tensor]]:
        """The rows of every group and of slots, and where a saved copy has them."""
        at = 0
        for rows, some in zip(self._rows, index, strict=True):
            nbytes = len(some) * rows.nbytes
            yield rows, some, content[at : at + nbytes]
            at += nbytes

    def _check_groups(self, blocks: Sequence[Sequence[int]]) -> None:
        if len(blocks) != (groups := len(self._rows) - 1):
            raise EngineError(f"blocks of {len(blocks)} groups are named and the model has {groups}")


@dataclass(frozen=True, slots=True)
class SavedState:
    """A copy in host memory: blocks of each group, whether a slot, and the bytes of all.

    `content`: one tensor, or where a GPU's copy is in its pool.
    """

    tables: tuple[int, ...]
    has_slot: bool
    nbytes: int
    content: Tensor | tuple[HostPiece, ...]


class StateRows:
    """Tensors with rows that belong together: row i of all of them is the content of one block or slot.

    On a CPU a row is copied as bytes, one after the other and without memory in between. On a GPU as many
    rows as possible are copied at once, because each launch costs more than a row.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        wide = [tensor.view(tensor.shape[0], prod(tensor.shape[1:])) for tensor in tensors]
        self._tensors = [tensor.view(torch.uint8) for tensor in wide]  # [rows, bytes], the same memory
        self.nbytes = sum(tensor.shape[1] for tensor in self._tensors)  # of one row
        self._wide = [view_widest(tensor) for tensor in self._tensors]  # [rows, integers]
        self._arrays: list[Bytes] | None = None
        if all(tensor.device.type == "cpu" for tensor in tensors):
            self._arrays = [tensor.numpy() for tensor in self._tensors]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Each tensor as bytes, [rows, bytes]."""
        return self._tensors

    def zero(self, index: Iterable[int]) -> None:
        """Fill these rows with zeros."""
        rows = list(index)
        if not rows:
            return
        for array in self._arrays or ():
            array[rows] = 0
        if self._arrays is None and self._wide:
            chosen = copy_index(rows, self._wide[0].device)
            for tensor in self._wide:
                tensor.index_fill_(0, chosen, 0)

    def copy(self, pairs: Pairs) -> None:
        """Copy rows, (from, to), as if one after the other."""
        if self._arrays is None:
            for batch in _independent(pairs) if self._wide else ():
                device = self._wide[0].device
                to, of = copy_index([*batch], device), copy_index([*batch.values()], device)
                for tensor in self._wide:
                    tensor.index_copy_(0, to, tensor.index_select(0, of))
            return
        for source, target in pairs:
            for array in self._arrays:
                array[target] = array[source]

    def save(self, index: Sequence[int], content: Tensor) -> None:
        """Copy rows of a CPU's tensors into `content`, [len(index) * nbytes] uint8."""
        for array, part in zip(self._arrays or (), self._split(content, len(index)), strict=True):
            for kept, row in zip(part.numpy(), index, strict=True):
                kept[:] = array[row]

    def load(self, index: Sequence[int], content: Tensor) -> None:
        """Copy what `save` wrote back into rows."""
        for array, part in zip(self._arrays or (), self._split(content, len(index)), strict=True):
            for kept, row in zip(part.numpy(), index, strict=True):
                array[row] = kept

    def _split(self, content: Tensor, count: int) -> Iterator[Tensor]:
        """Each tensor's rows of what was saved, [count, bytes]; nothing is saved of no rows."""
        at = 0
        for tensor in self._tensors:
            nbytes = count * tensor.shape[1]
            yield content[at : at + nbytes].view(count, tensor.shape[1])
            at += nbytes


def _independent(pairs: Pairs) -> Iterator[dict[int, int]]:
    """Copies (to -> from) in runs in which none reads or writes again what one before it wrote."""
    batch: dict[int, int] = {}
    for source, target in pairs:
        if source in batch or target in batch:
            yield batch
            batch = {}
        batch[target] = source
    if batch:
        yield batch


def host_memory(nbytes: int) -> Tensor:
    """Bytes that are not initialised."""
    return torch.from_numpy(np.empty(nbytes, np.uint8))  # numpy asks for huge pages, torch does not
