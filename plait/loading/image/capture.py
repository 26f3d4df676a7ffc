"""Makes a startup image of a model that runs: where its recorded step points, and what lies there.

Every address of a launch must lie in memory that is known here. A step with one that does not is not kept, so
an image never has an address of the process that made it.
"""

from __future__ import annotations

import ctypes
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from torch import Tensor

from plait.checkpoint.packed_cache.cache import KeptBlock
from plait.checkpoint.readers.mmap_json import list_mapped
from plait.errors import CannotRecord
from plait.kernels.load import find_kernel, find_places, find_targets, list_loops
from plait.loading.image.file_format import (
    Bytes,
    FilePart,
    HeadPart,
    KernelPart,
    LaunchPart,
    ProgramPart,
    Region,
    Result,
    StepPart,
    TilesPart,
    lay_out,
)
from plait.loading.image.restore import as_bytes, list_buffers
from plait.memory import PagedState
from plait.runner.host.block_passes import HostBlockPasses, HostMaskedPasses, RecordedPasses
from plait.runner.host.program import HostProgram
from plait.state.host_store import HostStore

LINE = 64  # bytes of a cache line
# No size, stride or float is larger. Addresses may be smaller: the heap of a Python that is not
# position-independent, as Debian's is, begins below, and a float may have the bits of an address there.
# So launches and tables say which words are addresses; other words below this are numbers.
LEAST_ADDRESS = 1 << 32


@dataclass(frozen=True, slots=True)
class MemoryRange:
    """Memory of this process: the first address, its bytes, and what it becomes."""

    start: int
    nbytes: int
    region: Region
    content: Bytes | None = None  # of a constant


@dataclass(frozen=True, slots=True)
class CapturedImage:
    """The step, the object code of its kernels, its constants, and the files that it points into."""

    step: StepPart
    code: Sequence[bytes]
    constants: Sequence[Bytes]
    files: tuple[FilePart, ...]


class Memory:
    """Ranges of memory that do not overlap, and kernels; those that are found get numbers."""

    def __init__(self, ranges: Iterable[MemoryRange]) -> None:
        self.ranges = sorted(ranges, key=lambda one: one.start)
        self._starts = [one.start for one in self.ranges]
        self._used: dict[int, int] = {}  # by place among `ranges`: number of the region
        self._kernels: dict[int, int] = {}  # by address: number of the kernel
        self.kernels: list[Any] = []

    def holds(self, address: int) -> bool:
        """Whether that memory is known."""
        at = bisect_right(self._starts, address) - 1
        return at >= 0 and address < self.ranges[at].start + self.ranges[at].nbytes

    def find(self, address: int, what: str) -> tuple[int, int]:
        """(number of the region, offset), or (-1 - number of the kernel, 0). Raises CannotRecord."""
        at = bisect_right(self._starts, address) - 1
        if self.holds(address):
            return self._used.setdefault(at, len(self._used)), address - self.ranges[at].start
        if (kernel := find_kernel(address)) is not None:
            return -1 - self.kernel(kernel), 0
        raise CannotRecord(f"{what} leads to memory that is not known")

    def kernel(self, kernel: Any) -> int:
        """The number of a kernel."""
        if kernel.address not in self._kernels:
            self._kernels[kernel.address] = len(self.kernels)
            self.kernels.append(kernel)
        return self._kernels[kernel.address]

    def used(self) -> list[MemoryRange]:
        """The ranges in the order of their numbers."""
        return [self.ranges[at] for at in self._used]


def capture_step(
    program: HostProgram,
    store: HostStore,
    chosen: Mapping[str, object],
    kept: Iterable[KeptBlock] = (),
    head: RecordedPasses | None = None,
    tile_check: tuple[object, tuple[bytes, ...], tuple[bytes, bytes, bytes]] | None = None,
) -> CapturedImage:
    """A recorded step as an image has it, with the passes of a head if there is one.

    chosen: kernels that run apart from it, by name; kept: blocks of weights that also lie in a file;
    tile_check: what `record_tile_check` gives, of programs that run on AMX. Raises CannotRecord where an
    address leads to memory that is not known.
    """
    memory = Memory(_ranges(program, store, kept, head))
    programs, made, own = [program], _program(memory, program), None
    if head is not None:
        states = {name: s for name, s in head.store.states.items() if isinstance(s, PagedState)}
        blocks, masks = None, head.form if isinstance(head, HostMaskedPasses) else None
        if isinstance(head, HostBlockPasses):
            blocks = _program(memory, head.blocks), head.form
        own = HeadPart(_program(memory, head.program), blocks, masks, _result(memory, head.before), states)
        programs += _list_passes(head)
    tables = [word for held in _list_held(programs) for word in _table_words(memory, held)]
    loops = {name: memory.kernel(kernel) for name, kernel in list_loops().items()}
    numbers = {name: memory.kernel(kernel) for name, kernel in chosen.items()}
    tiles = tile_check and TilesPart(memory.kernel(tile_check[0]), *tile_check[1:])
    regions, constants, files = _regions(memory.used())
    kernels, code = _machine_code(memory.kernels)
    names = program.table.names
    step = StepPart(
        program=made,
        head=own,
        regions=tuple(regions),
        tables=tuple(tables),
        kernels=tuple(kernels),
        loops=loops,
        chosen=numbers,
        description=f"{len(names)} launches of {len(set(names))} native kernels, one call",
        tiles=tiles,
    )
    return CapturedImage(step, code, constants, tuple(map(_describe_file, files)))


def _program(memory: Memory, program: HostProgram) -> ProgramPart:
    table, results, capacity = program.table, program.results, program.static.capacity
    largest = results.largest
    return ProgramPart(
        launches=tuple(_launch(memory, launch) for launch in table.launches),
        scratch=table.scratch,
        shared=table.shared,
        hidden=_result(memory, results.hidden),
        logits=_result(memory, results.logits),
        largest=(_result(memory, largest[0]), _result(memory, largest[1])) if largest else None,
        capacity=(capacity.tokens, capacity.logits, capacity.seqs, capacity.blocks),
        keeps_rows=program.keeps_rows,
        observed=None if results.observed is None else _result(memory, results.observed),
    )


def _ranges(
    program: HostProgram, store: HostStore, kept: Iterable[KeptBlock], head: RecordedPasses | None
) -> list[MemoryRange]:
    """All memory that a step may point into. Regions of files have their paths for names."""
    programs, arrays, states = [program], dict(program.static.arrays), store.arrays
    if head is not None:
        programs, states = [program, *_list_passes(head)], states | head.store.arrays
        arrays |= list_buffers(*(one.static for one in _list_passes(head)), before=head.before)
    found = [_range("block", "", block) for one in programs for block in one.table.blocks]
    found += [_range("static", name, as_bytes(array)) for name, array in arrays.items()]
    found += [_range("store", name, array.reshape(-1)) for name, array in states.items()]
    found.append(MemoryRange(program.threads.counters, 2 * LINE, Region("sync", "", 0, 2 * LINE)))

    def in_file(path: Path, start: int, nbytes: int, at: int) -> MemoryRange:
        return MemoryRange(start, nbytes, Region("file", str(path), at, nbytes))

    found += [in_file(path, start, nbytes, 0) for path, start, nbytes in list_mapped()]
    found += [in_file(block.path, block.start, block.nbytes, block.at) for block in kept]
    known = Memory(found)
    ranges = [extent_of(held) for held in _list_held(programs) if not known.holds(held.data_ptr())]
    for start, end in join_ranges(ranges):
        content = np.ctypeslib.as_array((ctypes.c_uint8 * (end - start)).from_address(start))
        found.append(MemoryRange(start, end - start, Region("constant", "", 0, end - start), content))
    return found


def _list_passes(head: RecordedPasses) -> list[HostProgram]:
    return [head.program, head.blocks] if isinstance(head, HostBlockPasses) else [head.program]


def _range(kind: str, name: str, memory: Bytes) -> MemoryRange:
    return MemoryRange(int(memory.ctypes.data), memory.nbytes, Region(kind, name, 0, memory.nbytes))


def _list_held(programs: Sequence[HostProgram]) -> list[Tensor]:
    """The tensors that programs read, outside of their arenas: of launches, and what tables point to."""
    direct = [tensor for one in programs for launch in one.table.launches for tensor in launch.held]
    return [*direct, *(target for tensor in direct for target in find_targets(tensor))]


def extent_of(tensor: Tensor) -> tuple[int, int]:
    """The first address of a tensor's numbers, and the one behind them, with a line that kernels may read."""
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    storage = tensor.untyped_storage()
    start = tensor.data_ptr()
    end = start + (last + 1) * tensor.element_size() + LINE if tensor.numel() else start
    return start, min(end, storage.data_ptr() + storage.nbytes())


def join_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """(first, behind the last) of what ranges cover, without overlaps."""
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif end > start:
            found.append((start, end))
    return found


def _launch(memory: Memory, launch: Any) -> LaunchPart:
    words = launch.words.tolist()
    moved = [*_addresses(memory, words, launch.addresses, f"of {launch.kernel.name}")]
    for i, *_ in moved:
        words[i] = 0
    return LaunchPart(memory.kernel(launch.kernel), tuple(words), tuple(moved))


def _addresses(
    memory: Memory, words: Sequence[int], places: Collection[int], what: str
) -> Iterator[tuple[int, int, int]]:
    """Every address among words with its place, and where it leads. `places`: of memory, not of kernels.

    Raises CannotRecord for a word that can only be an address, and is at no such place: an image that kept it
    as a number would have kernels read anywhere.
    """
    for i, word in enumerate(words):
        is_known = i in places or find_kernel(word) is not None
        if not is_known and word >= LEAST_ADDRESS:
            raise CannotRecord(f"word {i} {what} is an address, and is not known as one")
        if word and is_known:
            yield (i, *memory.find(word, f"word {i} {what}"))


def _table_words(memory: Memory, table: Tensor) -> Iterator[tuple[int, int, int, int]]:
    """Where a table of addresses lies, word for word, and where each leads."""
    if not find_targets(table):
        return
    words = table.reshape(-1).tolist()
    for i, number, offset in _addresses(
        memory, words, find_places(table.data_ptr()), "of a table of addresses"
    ):
        place = memory.find(table.data_ptr() + 8 * i, "a table of addresses")
        yield (*place, number, offset)


def _result(memory: Memory, array: npt.NDArray[Any]) -> Result:
    region, offset = memory.find(int(array.ctypes.data), "a result")
    return Result(region, offset, array.shape, array.strides, array.dtype.str)


def _regions(ranges: Sequence[MemoryRange]) -> tuple[list[Region], list[Bytes], list[str]]:
    """Regions in order, constants with their places and files with numbers; the constants; the files."""
    constants = [one.content for one in ranges if one.content is not None]
    places, files = iter(lay_out([content.nbytes for content in constants])[0]), dict[str, int]()
    regions = []
    for one in ranges:
        region = one.region
        if one.content is not None:
            region = replace(region, at=next(places))
        elif region.kind == "file":
            region = replace(region, name=str(files.setdefault(region.name, len(files))))
        regions.append(region)
    return regions, constants, list(files)


def _machine_code(kernels: Sequence[Any]) -> tuple[list[KernelPart], list[bytes]]:
    """Raises CannotRecord for a kernel of which no code is kept."""
    parts, code, at = [], [], 0
    for kernel in kernels:
        found = kernel.object_code()
        if found is None:
            raise CannotRecord(f"the machine code of {kernel.name} is not kept")
        parts.append(KernelPart(kernel.name, kernel.symbol, at, len(found)))
        code.append(found)
        at += len(found)
    return parts, code


def _describe_file(path: str) -> FilePart:
    status = Path(path).stat()
    return FilePart(path, status.st_size, status.st_mtime_ns)
