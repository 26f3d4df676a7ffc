"""The state store: tensors of the KV cache and of recurrent state, by block or slot, and copies of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from plait.memory import DTYPE_BYTES, PagedState, SlotState, State, block_groups, group_name
from plait.ops.entry import stored_dtype
from plait.state.host_store import SLOTS, HostStore, Pairs, Sizes, check_groups, check_saved
from plait.state.swap import DeviceSwap, HostPiece, HostPool, copy_index, pin_memory, view_widest


class StateStore:
    """Memory of all running sequences. `store["layers.3.attn"]` is a dict of tensors:

    paged: [num_blocks of its group, block_size, *entry]; slots: [num_slots, *shape]. Block 0 and slot 0 are
    garbage: padding writes there. They begin as zeros, because padding computes with them, and no number may
    come of it. Nothing else is initialised: a block is written before it is read, and a slot is zeroed when
    it is given out.

    Kernels may lay out the inside of a block or a slot as they like, so whole ones are copied, byte for byte.
    Block groups are counted in the order of `block_groups(states)`. With `host`, its memory is used, and it
    says how many blocks and slots there are.
    """

    def __init__(
        self,
        states: Mapping[str, State],
        num_blocks: Mapping[str, int],
        num_slots: int,
        block_size: int,
        device: torch.device,
        dtype: torch.dtype,
        host: HostStore | None = None,
    ) -> None:
        self.block_size = block_size
        self._tensors: dict[str, dict[str, Tensor]] = {}
        self.host = host
        if device.type == "cpu" and host is None:
            model = str(dtype).removeprefix("torch.")
            self.host = HostStore(states, num_blocks, num_slots, block_size, model)
        kinds = {name: stored_dtype(name) for name in DTYPE_BYTES} | {"model": dtype}
        for name, state in states.items():
            inner = (block_size,) if isinstance(state, PagedState) else ()
            self._tensors[name] = {}
            for key, (entry, kind) in state.tensors.items():
                if self.host is not None:
                    count = len(self.host[name][key])
                elif isinstance(state, PagedState):
                    count = num_blocks[group_name(state.window)]
                else:
                    count = num_slots
                shape = (count, *inner, *entry)
                self._tensors[name][key] = self._make(name, key, shape, kinds[kind], device)
        self._states = states
        if self.host is None:  # where block 0 and slot 0 are zeros
            for tensor in self.tensors:
                tensor[:1].zero_()
        self._on_device: DeviceStore | None = None
        if device.type == "cuda":
            self._copy_on(device, HostPool(pin_memory))

    def __getitem__(self, name: str) -> dict[str, Tensor]:
        return self._tensors[name]

    @property
    def tensors(self) -> list[Tensor]:
        """Every tensor that kernels see."""
        return [t for tensors in self._tensors.values() for t in tensors.values()]

    @property
    def slot_tensors(self) -> list[Tensor]:
        """Those of recurrent state."""
        names = [name for name, state in self._states.items() if isinstance(state, SlotState)]
        return [t for name in names for t in self._tensors[name].values()]

    def zero_slots(self, slots: Iterable[int]) -> None:
        """Zero the slots of new sequences, because a one-token prompt must never read the last owner's."""
        self._copier.zero_slots(slots)

    def copy_rows(self, group: int, pairs: Pairs) -> None:
        """Copy blocks of a group, or slots (group -1), (from, to), one after the other."""
        self._copier.copy_rows(group, pairs)

    def save(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        """Copy blocks (a sequence per group) and a slot (0: none) to host memory, over what had that name.

        From a GPU the copy is under way when this returns; what is loaded later, or written, waits for it.
        """
        self._copier.save(handle, blocks, slot)

    def load(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        """Copy a saved state back to as many blocks and a slot (0: none was saved); the copy stays.

        Raises EngineError, changing nothing, if there is no such copy or it is of another size.
        """
        self._copier.load(handle, blocks, slot)

    def drop(self, handle: int) -> None:
        """Free a saved copy; one that is not there (a step failed before it was saved) is free already."""
        self._copier.drop(handle)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors that kernels see."""
        return sum(t.nbytes for t in self.tensors)

    @property
    def nbytes_saved(self) -> int:
        """Bytes of the copies in host memory."""
        return self._copier.nbytes_saved

    @property
    def _copier(self) -> HostStore | DeviceStore:
        found = self._on_device or self.host
        assert found is not None, "there is no memory on this device"
        return found

    def _make(
        self, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        if self.host is None:
            return torch.empty(shape, dtype=dtype, device=device)
        if not prod(shape):
            return torch.empty(shape, dtype=dtype)
        return torch.from_numpy(self.host[name][key]).view(-1).view(dtype).view(shape)

    def _copy_on(self, device: torch.device, pool: HostPool) -> None:
        """Move rows as a GPU does: many at once, and by a stream of its own to and from `pool`."""
        names = [*(group.name for group in block_groups(self._states)), SLOTS]
        rows: dict[str, list[Tensor]] = {name: [] for name in names}
        for name, state in self._states.items():
            group = group_name(state.window) if isinstance(state, PagedState) else SLOTS
            rows[group] += self._tensors[name].values()
        self._on_device = DeviceStore([*map(DeviceRows, rows.values())], device, pool)


@dataclass(frozen=True, slots=True)
class SavedPieces:
    """A copy in host memory: blocks of each group, whether a slot, the bytes of all, and where they are."""

    tables: tuple[int, ...]
    has_slot: bool
    nbytes: int
    pieces: tuple[HostPiece, ...]

    @property
    def sizes(self) -> Sizes:
        return self.tables, self.has_slot


class DeviceStore:
    """Copies of rows on a GPU, and to and from host memory. `rows`: of each block group, then of slots."""

    def __init__(self, rows: Sequence[DeviceRows], device: torch.device, pool: HostPool) -> None:
        self._rows = rows
        self._saved: dict[int, SavedPieces] = {}
        self._swap = DeviceSwap([each.tensors for each in rows], device, pool)

    def zero_slots(self, slots: Iterable[int]) -> None:
        """See `StateStore`, here and below."""
        self._rows[-1].zero(slots)

    def copy_rows(self, group: int, pairs: Pairs) -> None:
        self._rows[group].copy(pairs)

    def save(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        check_groups(len(blocks), len(self._rows) - 1)
        self.drop(handle)
        index = (*blocks, (slot,) if slot else ())
        nbytes = sum(len(some) * rows.nbytes for rows, some in zip(self._rows, index, strict=True))
        pieces = self._swap.save(index)
        self._saved[handle] = SavedPieces(tuple(map(len, blocks)), bool(slot), nbytes, pieces)

    def load(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        check_groups(len(blocks), len(self._rows) - 1)
        saved = self._saved.get(handle)
        check_saved(handle, saved.sizes if saved else None, (tuple(map(len, blocks)), bool(slot)))
        assert saved is not None
        self._swap.load((*blocks, (slot,) if slot else ()), saved.pieces)

    def drop(self, handle: int) -> None:
        saved = self._saved.pop(handle, None)
        if saved is not None:
            self._swap.drop(saved.pieces)

    @property
    def nbytes_saved(self) -> int:
        return sum(saved.nbytes for saved in self._saved.values())


class DeviceRows:
    """Tensors with rows that belong together: row i of all of them is the content of one block or slot.

    As many rows as possible are copied at once, because each launch costs more than a row.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        wide = [tensor.view(tensor.shape[0], prod(tensor.shape[1:])) for tensor in tensors]
        self.tensors = [tensor.view(torch.uint8) for tensor in wide]  # [rows, bytes], the same memory
        self.nbytes = sum(tensor.shape[1] for tensor in self.tensors)  # of one row
        self._wide = [view_widest(tensor) for tensor in self.tensors]  # [rows, integers]

    def zero(self, index: Iterable[int]) -> None:
        """Fill these rows with zeros."""
        rows = list(index)
        if rows and self._wide:
            chosen = copy_index(rows, self._wide[0].device)
            for tensor in self._wide:
                tensor.index_fill_(0, chosen, 0)

    def copy(self, pairs: Pairs) -> None:
        """Copy rows, (from, to), as if one after the other."""
        for batch in _independent(pairs) if self._wide else ():
            device = self._wide[0].device
            to, of = copy_index([*batch], device), copy_index([*batch.values()], device)
            for tensor in self._wide:
                tensor.index_copy_(0, to, tensor.index_select(0, of))


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
