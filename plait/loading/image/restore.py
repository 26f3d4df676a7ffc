"""A recorded step from a startup image: its memory, its machine code, and its launches with new addresses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from plait.checkpoint.packed_cache.file_format import SUFFIX
from plait.checkpoint.readers.mmap_json import map_file, map_in_large_pages
from plait.errors import BadFile
from plait.kernels.load import (
    allocate_block,
    compare_tiles,
    link_code,
    new_table,
    start_threads,
    why_no_tiles,
)
from plait.loading.image.file_format import (
    BLOCKS,
    HEAD,
    Bytes,
    FilePart,
    Image,
    ProgramPart,
    Region,
    Result,
    TilesPart,
)
from plait.memory import State, block_groups
from plait.runner.host.block_passes import HostBlockPasses, HostMaskedPasses, RecordedPasses
from plait.runner.host.mtp_passes import HostPasses
from plait.runner.host.program import HostProgram, StepResults
from plait.runner.host.sampler import HostSampler
from plait.runner.host.static_batch import Capacity, StaticBatch
from plait.state.host_store import HostStore


def map_weights(files: Sequence[FilePart]) -> list[Bytes]:
    """The files of weights, mapped; packed ones in large pages. Raises BadFile for one that has changed."""
    found = []
    for file in files:
        path = Path(file.path)
        mapped = map_in_large_pages(path) if path.suffix == SUFFIX else map_file(path)
        try:
            status = path.stat()  # behind the mapping, so that what came before that is seen
        except OSError as error:
            raise BadFile(f"{path} cannot be read ({error.strerror})") from error
        if (status.st_size, status.st_mtime_ns) != (file.nbytes, file.changed_ns):
            raise BadFile(f"{path} has changed")
        found.append(np.frombuffer(mapped, np.uint8))
    return found


class RestoredStep:
    """A recorded step in this process, with the passes of a head if the image has one.

    store: state of the model; drafts: that of the head. `kernels`: those that run apart from it, by name.
    Raises BadFile for one that runs on AMX where this process may not, or where the tiles do not give the
    documented bits. RuntimeError for code that cannot be linked.
    """

    def __init__(
        self,
        image: Image,
        store: HostStore,
        threads: int,
        files: Sequence[Bytes],
        drafts: HostStore | None = None,
    ) -> None:
        step = image.header.step
        code = [(part.symbol, part.at, part.nbytes) for part in step.kernels]
        if step.tiles and (why := why_no_tiles("native")):
            raise BadFile(f"it runs on AMX: {why}")
        self._code = link_code(image.code, code)
        if step.tiles:
            _check_tiles(step.tiles, self._code[step.tiles.kernel].address)
        self.threads = start_threads(threads, self._code, step.loops)
        with ExitStack() as undo:
            undo.callback(self.threads.close)
            self._place(image, store, files, drafts)
            undo.pop_all()

    def _place(
        self, image: Image, store: HostStore, files: Sequence[Bytes], drafts: HostStore | None
    ) -> None:
        """Make or find all memory, and write the addresses that tables have."""
        model, step = image.header.model, image.header.step
        self._static = _make_static(step.program, model.states, model.block_size)
        self._buffers, self._states, self._drafts = dict(self._static.arrays), store.arrays, drafts
        if step.head and drafts:
            head, before = step.head, step.head.before
            parts = [head.program, *((head.blocks[0],) if head.blocks else ())]
            self._passes = [_make_static(part, head.states, model.block_size) for part in parts]
            rows = allocate_block(prod(before.shape) * 4).view(before.dtype).reshape(before.shape)
            self._buffers |= list_buffers(*self._passes, before=rows)
            self._states = self._states | drafts.arrays
        self._step, self._constants, self._files = step, image.constants, files
        self._memory = [self._find(region) for region in step.regions]
        self.kernels = {name: self._code[number] for name, number in step.chosen.items()}
        for region, offset, target, at in step.tables:
            memory, _ = self._memory[region]
            assert memory is not None
            memory[offset : offset + 8].view(np.int64)[0] = self._address(target) + at

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the kernels, in order."""
        return tuple(self._step.kernels[launch.kernel].name for launch in self._step.program.launches)

    def __str__(self) -> str:
        return f"{self._step.description}, from the startup image"

    def program(self) -> HostProgram:
        """The step, ready to run."""
        return self._make(self._step.program, self._static)

    def passes(self, sampler: HostSampler) -> RecordedPasses:
        """The passes of the head, ready to run. There must be one, and its state."""
        head, store = self._step.head, self._drafts
        assert head is not None
        assert store is not None
        own = self._make(head.program, self._passes[0]), self._view(head.before), store
        if head.masks is not None:
            return HostMaskedPasses(*own, sampler, head.masks)
        if head.blocks is None:
            return HostPasses(*own, sampler)
        part, form = head.blocks
        return HostBlockPasses(*own, self._make(part, self._passes[1]), sampler, form)

    def _make(self, part: ProgramPart, static: StaticBatch) -> HostProgram:
        table = new_table(part.scratch, part.shared)
        for launch in part.launches:
            words = np.array(launch.words, np.int64)
            for word, region, offset in launch.moved:
                words[word] = self._address(region) + offset
            table.entries += (self._code[launch.kernel].address, words.ctypes.data)
            table.kept.append(words)
        table.kept.append(self._memory)
        table.seal()
        largest = part.largest and (self._view(part.largest[0]), self._view(part.largest[1]))
        observed = None if part.observed is None else self._view(part.observed)
        results = StepResults(self._view(part.hidden), self._view(part.logits), largest, observed)
        return HostProgram(self.threads, table, static, results, keeps_rows=part.keeps_rows)

    def _address(self, region: int) -> int:
        return self._memory[region][1] if region >= 0 else self._code[-1 - region].address

    def _find(self, region: Region) -> tuple[Bytes | None, int]:
        """A region's memory, None if it is not to be written, and its address."""
        found: Bytes
        match region.kind:
            case "block":
                found = allocate_block(region.nbytes)
            case "static":
                found = as_bytes(self._buffers[region.name])
            case "store":
                found = self._states[region.name].reshape(-1)
            case "constant":
                found = self._constants[region.at : region.at + region.nbytes]
            case "file":
                found = self._files[int(region.name)][region.at : region.at + region.nbytes]
            case "sync":
                return None, self.threads.counters
            case other:
                raise BadFile(f"it has memory of an unknown kind, {other!r}")
        return found, int(found.ctypes.data)

    def _view(self, result: Result) -> npt.NDArray[Any]:
        memory, _ = self._memory[result.region]
        assert memory is not None
        return np.ndarray(result.shape, result.dtype, memory.data, result.offset, result.strides)


def _check_tiles(tiles: TilesPart, address: int) -> None:
    """Raises BadFile where this processor's tiles do not give the documented bits."""
    if why := compare_tiles(address, tiles.given, tiles.documented):
        raise BadFile(f"it runs on AMX, which is not used: {why}")


def list_buffers(*passes: StaticBatch, before: npt.NDArray[np.float32]) -> dict[str, npt.NDArray[Any]]:
    """The buffers of a head's passes, and of those over blocks, by the names that an image has for them."""
    named = zip((HEAD, BLOCKS), passes, strict=False)
    found = {f"{prefix}{name}": array for prefix, static in named for name, array in static.arrays.items()}
    return {**found, f"{HEAD}before": before}


def _make_static(part: ProgramPart, states: Mapping[str, State], block_size: int) -> StaticBatch:
    return StaticBatch(Capacity(*part.capacity), block_groups(states), block_size)


def as_bytes(array: npt.NDArray[Any]) -> Bytes:
    """The memory of a dense array."""
    return array.reshape(-1).view(np.uint8)
