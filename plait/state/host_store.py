"""State of running sequences in host memory: blocks and slots as rows of bytes, and copies of them.

Nothing here needs torch: a `StateStore` on a CPU makes tensors of this memory.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from plait.errors import EngineError
from plait.memory import DTYPE_BYTES, PagedState, State, block_groups, group_name

Pairs = Iterable[tuple[int, int]]
SLOTS = "slots"
Bytes = npt.NDArray[np.uint8]
Sizes = tuple[tuple[int, ...], bool]  # blocks of each group, and whether there is a slot


class DiskCopies(Protocol):
    """Where copies with handles below 0 are: on their way to the disk, or from there (`state.disk.cache`)."""

    def write(self, handle: int, saved: SavedState) -> None: ...
    def get(self, handle: int) -> SavedState | None: ...
    def drop(self, handle: int) -> None: ...


class HostStore:
    """Memory of all running sequences. `store["layers.3.attn"]` is a dict of arrays [rows, bytes]: a row is a
    block of the state's group, or a slot.

    `dtype`: of what is kept as the model computes, a key of `DTYPE_BYTES`. Block groups are counted in the
    order of `block_groups(states)`. See `StateStore` for what blocks and slots are.
    """

    def __init__(
        self,
        states: Mapping[str, State],
        num_blocks: Mapping[str, int],
        num_slots: int,
        block_size: int,
        dtype: str,
    ) -> None:
        self.block_size, self.states = block_size, states
        self._arrays: dict[str, dict[str, Bytes]] = {}
        self._saved: dict[int, SavedState] = {}
        self.disk: DiskCopies | None = None
        names = [*(group.name for group in block_groups(states)), SLOTS]
        rows: dict[str, list[Bytes]] = {name: [] for name in names}
        sizes = DTYPE_BYTES | {"model": DTYPE_BYTES[dtype]}
        for name, state in states.items():
            is_paged = isinstance(state, PagedState)
            group = group_name(state.window) if isinstance(state, PagedState) else SLOTS
            count, entries = (num_blocks[group], block_size) if is_paged else (num_slots, 1)
            self._arrays[name] = {
                key: map_rows(count, entries * prod(entry) * sizes[kind])
                for key, (entry, kind) in state.tensors.items()
            }
            rows[group] += self._arrays[name].values()
        self._rows = [*map(HostRows, rows.values())]  # of each block group, then of slots

    def __getitem__(self, name: str) -> dict[str, Bytes]:
        return self._arrays[name]

    @property
    def arrays(self) -> dict[str, Bytes]:
        """All memory, by `state.tensor`."""
        return {f"{name}.{key}": a for name, found in self._arrays.items() for key, a in found.items()}

    def zero_slots(self, slots: Iterable[int]) -> None:
        """Zero the slots of new sequences, because a one-token prompt must never read the last owner's."""
        self._rows[-1].zero(slots)

    def copy_rows(self, group: int, pairs: Pairs) -> None:
        """Copy blocks of a group, or slots (group -1), (from, to), one after the other."""
        self._rows[group].copy(pairs)

    def save(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        """Copy blocks (a sequence per group) and a slot (0: none) elsewhere, over what had that name."""
        self._check_groups(blocks)
        self.drop(handle)
        index = (*blocks, (slot,) if slot else ())
        nbytes = sum(len(some) * rows.nbytes for rows, some in zip(self._rows, index, strict=True))
        content = np.empty(nbytes, np.uint8)
        for rows, some, part in self._parts(index, content):
            rows.save(some, part)
        saved = SavedState(tuple(map(len, blocks)), bool(slot), content)
        if handle < 0 and self.disk is not None:
            self.disk.write(handle, saved)
        else:
            self._saved[handle] = saved

    def load(self, handle: int, blocks: Sequence[Sequence[int]], slot: int) -> None:
        """Copy a saved state back to as many blocks and a slot (0: none was saved); the copy stays.

        Raises EngineError, changing nothing, if there is no such copy or it is of another size.
        """
        self._check_groups(blocks)
        saved = self._saved.get(handle)
        if handle < 0 and self.disk is not None:
            saved = self.disk.get(handle)
        check_saved(handle, saved.sizes if saved else None, (tuple(map(len, blocks)), bool(slot)))
        assert saved is not None
        for rows, some, part in self._parts((*blocks, (slot,) if slot else ()), saved.content):
            rows.load(some, part)

    def drop(self, handle: int) -> None:
        """Free a saved copy; one that is not there (a step failed before it was saved) is free already."""
        self._saved.pop(handle, None)
        if handle < 0 and self.disk is not None:
            self.disk.drop(handle)

    @property
    def layout(self) -> RowLayout:
        """How copies are laid out."""
        widths = tuple(rows.widths for rows in self._rows)
        return RowLayout(widths[:-1], widths[-1], self.block_size)

    @property
    def nbytes_saved(self) -> int:
        """Bytes of the copies."""
        return sum(saved.content.nbytes for saved in self._saved.values())

    def _parts(
        self, index: Sequence[Sequence[int]], content: Bytes
    ) -> Iterator[tuple[HostRows, Sequence[int], Bytes]]:
        """The rows of every group and of slots, and where a saved copy has them."""
        at = 0
        for rows, some in zip(self._rows, index, strict=True):
            nbytes = len(some) * rows.nbytes
            yield rows, some, content[at : at + nbytes]
            at += nbytes

    def _check_groups(self, blocks: Sequence[Sequence[int]]) -> None:
        check_groups(len(blocks), len(self._rows) - 1)


class SavedState(Struct, frozen=True):
    """A copy: blocks of each group, whether a slot, and the bytes."""

    tables: tuple[int, ...]
    has_slot: bool
    content: Bytes

    @property
    def sizes(self) -> Sizes:
        return self.tables, self.has_slot


class RowLayout(Struct, frozen=True):
    """How copies are laid out: bytes of a row in each array of each block group (`groups`), and of a slot."""

    groups: tuple[tuple[int, ...], ...]
    slot: tuple[int, ...]
    block_size: int

    @property
    def num_groups(self) -> int:
        return len(self.groups)

    @property
    def has_slots(self) -> bool:
        return bool(self.slot)

    def nbytes(self, tables: Sequence[int], has_slot: bool) -> int:
        """Bytes of a copy with so many blocks of each group, and a slot."""
        blocks = sum(count * sum(widths) for count, widths in zip(tables, self.groups, strict=True))
        return blocks + (sum(self.slot) if has_slot else 0)

    def pick(self, saved: SavedState, rows: Sequence[Sequence[int]]) -> SavedState:
        """The copy of some blocks alone: by group, their places in `saved`, which has no slot."""
        assert not saved.has_slot, "a slot is not picked from"
        if tuple(map(len, rows)) == saved.tables:
            return saved
        tables = tuple(map(len, rows))
        content, at, to = np.empty(self.nbytes(tables, False), np.uint8), 0, 0
        for widths, count, chosen in zip(self.groups, saved.tables, rows, strict=True):
            for width in widths:
                source = saved.content[at : at + count * width].reshape(count, width)
                target = content[to : to + len(chosen) * width].reshape(len(chosen), width)
                target[:] = source[list(chosen)]
                at, to = at + count * width, to + len(chosen) * width
        return SavedState(tables, False, content)


class HostRows:
    """Arrays with rows that belong together: row i of all of them is the content of one block or slot.

    A row is copied as bytes, one after the other and without memory in between.
    """

    def __init__(self, arrays: Sequence[Bytes]) -> None:
        self._arrays = arrays
        self.widths = tuple(int(array.shape[1]) for array in arrays)  # bytes of a row in each
        self.nbytes = sum(self.widths)

    def zero(self, index: Iterable[int]) -> None:
        """Fill these rows with zeros."""
        if rows := list(index):
            for array in self._arrays:
                array[rows] = 0

    def copy(self, pairs: Pairs) -> None:
        """Copy rows, (from, to), one after the other."""
        for source, target in pairs:
            for array in self._arrays:
                array[target] = array[source]

    def save(self, index: Sequence[int], content: Bytes) -> None:
        """Copy rows into `content`, [len(index) * nbytes]."""
        for array, part in zip(self._arrays, self._split(content, len(index)), strict=True):
            for kept, row in zip(part, index, strict=True):
                kept[:] = array[row]

    def load(self, index: Sequence[int], content: Bytes) -> None:
        """Copy what `save` wrote back into rows."""
        for array, part in zip(self._arrays, self._split(content, len(index)), strict=True):
            for kept, row in zip(part, index, strict=True):
                array[row] = kept

    def _split(self, content: Bytes, count: int) -> Iterator[Bytes]:
        """Each array's rows of what was saved, [count, bytes]."""
        at = 0
        for array in self._arrays:
            nbytes = count * array.shape[1]
            yield content[at : at + nbytes].reshape(count, array.shape[1])
            at += nbytes


def map_rows(count: int, nbytes: int) -> Bytes:
    """Memory of the system for rows, [count, nbytes]: zeros, which take no memory before they are written."""
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    memory = mmap.mmap(-1, max(count * nbytes, 1), **private)
    return np.frombuffer(memory, np.uint8, count * nbytes).reshape(count, nbytes)


def check_groups(given: int, groups: int) -> None:
    """Raises EngineError if blocks of another number of groups are named than the model has."""
    if given != groups:
        raise EngineError(f"blocks of {given} groups are named and the model has {groups}")


def check_saved(handle: int, saved: Sizes | None, wanted: Sizes) -> None:
    """Raises EngineError if there is no saved copy, or one of another size."""
    if saved is None:
        raise EngineError(f"nothing is saved as {handle}: it was never saved, or was dropped")
    if saved != wanted:
        raise EngineError(
            f"{saved[0]} blocks and {int(saved[1])} slots are saved as {handle}, not the {wanted[0]} blocks "
            f"and {int(wanted[1])} slots that are to be loaded"
        )
