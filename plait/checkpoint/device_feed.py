"""Feeds weights from files to a GPU: reader threads, a ring of pinned buffers, a copy stream of its own.

A tensor is cut into pieces. A reader copies a piece from the mapped file into a free buffer, which is where
the file is read, and starts the copy from there to the device. A buffer is free again once the event of that
copy has passed. The builder meanwhile packs the tensors that have arrived:

    file map  --reader threads-->  ring of pinned buffers  --copy stream-->  tensors on the device  -->  take

Invariants: pieces are begun in the order of `order`, which the builder is expected to follow. A buffer is
written by the one reader that took it from the queue, after the event of its last copy. No more than `ahead`
bytes are begun before they are taken, unless `take` waits for a tensor that is not begun. So a builder in
another order waits longer, and never for ever.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.checkpoint.divided import StoredPart
from plait.errors import BadFile
from plait.quant.weight import Weight

PIECE = 16 << 20  # bytes
BUFFERS = 8
READERS = 3
AHEAD = 1 << 30  # bytes on the device that the builder has not taken yet


class CopyEvent(Protocol):
    """Passes when a copy is done."""

    def synchronize(self) -> None: ...


class CopyDevice(Protocol):
    """A device that copies from host memory on a stream of its own. Called by several threads."""

    def buffer(self, nbytes: int) -> Tensor:
        """Host memory, uint8, that it copies from without a copy in between."""
        ...

    def empty(self, like: Tensor) -> Tensor:
        """A tensor on the device, of that shape and dtype."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        """Start a copy from a buffer to the device."""
        ...

    def join(self, events: Sequence[CopyEvent], tensors: Sequence[Tensor]) -> None:
        """Make what the caller computes next with `tensors` wait for these copies."""
        ...


class CudaCopies:
    """Copies to a CUDA device on a side stream."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._side = device, torch.cuda.Stream(device)

    def buffer(self, nbytes: int) -> Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def empty(self, like: Tensor) -> Tensor:
        with torch.cuda.stream(self._side):  # so that no memory is given that another stream still reads
            return torch.empty(like.shape, dtype=like.dtype, device=self._device)

    def copy(self, target: Tensor, source: Tensor) -> CopyEvent:
        with torch.cuda.stream(self._side):
            target.copy_(source, non_blocking=True)
            event: CopyEvent = self._side.record_event()
        return event

    def join(self, events: Sequence[CopyEvent], tensors: Sequence[Tensor]) -> None:
        current: Any = torch.cuda.current_stream(self._device)
        for event in events:
            current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)


class FedCheckpoint(Protocol):
    """What is read of a checkpoint."""

    def read(self, name: str) -> Weight | Tensor: ...


@dataclass(slots=True, eq=False)
class _Item:
    """One tensor or weight of the checkpoint, on its way. `parts`: (of the file, on the device)."""

    name: str
    part: StoredPart
    begun: bool = False
    value: Weight | Tensor | None = None  # the part, as the checkpoint gives it
    parts: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    pieces: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (of the file, on the device)
    num_open: int = 0  # pieces that are not under way yet
    events: list[CopyEvent] = field(default_factory=list)
    error: BaseException | None = None
    is_taken: bool = False

    @property
    def nbytes(self) -> int:
        return sum(target.nbytes for _, target in self.parts)

    @property
    def is_ready(self) -> bool:
        return self.error is not None or (self.begun and not self.num_open)


class DeviceFeed:
    """Tensors of a checkpoint, read ahead and on the device. Close it when the model is built.

    `order`: names and parts as the builder will take them, each once; nothing else is read. `files`: looked
    at before each piece, because a mapped file that became shorter would end the process.
    """

    def __init__(
        self,
        checkpoint: FedCheckpoint,
        order: Iterable[tuple[str, StoredPart]],
        device: CopyDevice,
        files: Sequence[Path] = (),
        *,
        piece: int = PIECE,
        ahead: int = AHEAD,
    ) -> None:
        self._checkpoint, self._device, self._piece, self._ahead = checkpoint, device, piece, ahead
        self._sizes = [(path, path.stat().st_size) for path in files]
        self._items = {(name, part): _Item(name, part) for name, part in order}
        self._queue = [*self._items.values()]
        self._at, self._held = 0, 0  # the item that is cut next; bytes that are begun and not taken
        self._wanted: _Item | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._free: SimpleQueue[tuple[Tensor, CopyEvent | None] | None] = SimpleQueue()
        for _ in range(BUFFERS):
            self._free.put((device.buffer(piece), None))
        self._threads = [
            threading.Thread(target=self._read, name=f"plait-read-{i}", daemon=True) for i in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def has(self, name: str, part: StoredPart) -> bool:
        """Whether `take` gives it: each part once, as what was taken belongs to the builder."""
        item = self._items.get((name, part))
        return item is not None and not item.is_taken

    def take(self, name: str, part: StoredPart) -> Weight | Tensor:
        """A part of what the checkpoint has under that name, on the device. Raises what reading it raised."""
        item = self._items[name, part]
        with self._changed:
            self._wanted = item
            self._changed.notify_all()
            self._changed.wait_for(lambda: item.is_ready)
            self._wanted, item.is_taken = None, True
            self._held -= item.nbytes
            self._changed.notify_all()
        if item.error is not None:
            raise item.error
        self._device.join(item.events, [target for _, target in item.parts])
        value, item.value = item.value, None
        assert value is not None
        moved = {id(source): target for source, target in item.parts}
        item.parts, item.events = [], []
        found: Weight | Tensor = _with_tensors(value, lambda tensor: moved[id(tensor)])
        return found

    def close(self) -> None:
        """End the readers, and wait for the copies from the buffers."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        for _ in range(BUFFERS):
            if (kept := self._free.get()) is not None and kept[1] is not None:
                kept[1].synchronize()

    def _read(self) -> None:
        while (work := self._next_piece()) is not None:
            item, source, target = work
            kept = self._free.get()
            assert kept is not None
            buffer, event = kept
            try:
                if event is not None:
                    event.synchronize()  # the last copy from this buffer
                    event = None
                if item.error is None:
                    self._check_sizes()
                    part = buffer[: source.nbytes].view(source.dtype).view(source.shape)
                    part.copy_(source)
                    event = self._device.copy(target, part)
                    item.events.append(event)
            except BaseException as error:
                item.error = error
            finally:
                self._free.put((buffer, event))
            with self._changed:
                item.num_open -= 1
                self._changed.notify_all()

    def _next_piece(self) -> tuple[_Item, Tensor, Tensor] | None:
        """The next piece in order, once it may be begun; None: there is none, or the feed is closed."""
        with self._changed:
            while not self._closed and self._at < len(self._queue):
                item = self._queue[self._at]
                if not item.begun:
                    if not self._may_begin():
                        self._changed.wait()
                        continue
                    self._begin(item)
                if item.pieces:
                    source, target = item.pieces.pop(0)
                    return item, source, target
                self._at += 1
                self._changed.notify_all()
            return None

    def _may_begin(self) -> bool:
        return self._held < self._ahead or (self._wanted is not None and not self._wanted.begun)

    def _begin(self, item: _Item) -> None:
        """Find an item's bytes and its place on the device. Nothing of it is read from the file yet."""
        item.begun = True
        try:
            item.value = item.part.keep(self._checkpoint.read(item.name))
            for tensor in _tensors_of(item.value):
                place = self._device.empty(tensor)
                item.parts.append((tensor, place))
                item.pieces += _cut_pieces(tensor, place, self._piece)
        except BaseException as error:
            item.error, item.pieces = error, []
        item.num_open = len(item.pieces)
        self._held += item.nbytes

    def _check_sizes(self) -> None:
        for path, size in self._sizes:
            if (now := path.stat().st_size) < size:
                raise BadFile(f"{path}: has {now} bytes; it had {size} when it was opened")


def _cut_pieces(source: Tensor, target: Tensor, nbytes: int) -> Iterator[tuple[Tensor, Tensor]]:
    """(of the file, on the device): bytes, or of columns some rows, which are gathered in the buffer."""
    row = source[0].nbytes if source.dim() > 1 and len(source) else 0
    if source.is_contiguous() or not 0 < row <= nbytes:
        source, target, step = _as_bytes(source.contiguous()), _as_bytes(target), nbytes
    else:
        step = nbytes // row
    for at in range(0, len(source), step):
        yield source[at : at + step], target[at : at + step]


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def _tensors_of(value: Weight | Tensor) -> list[Tensor]:
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    _with_tensors(value, note)
    return found


def _with_tensors(value: Any, moved: Callable[[Tensor], Tensor]) -> Any:
    """The same tensor or weight, with other tensors in place of its own; weights may be nested."""
    if isinstance(value, Tensor):
        return moved(value)
    given = ((one.name, getattr(value, one.name)) for one in fields(value))
    changed = {
        name: _with_tensors(part, moved)
        for name, part in given
        if isinstance(part, Tensor) or _is_weight(part)
    }
    return replace(value, **changed)


def _is_weight(value: object) -> bool:
    """Whether a field of a weight holds tensors itself."""
    return hasattr(value, "__dataclass_fields__") and any(
        isinstance(getattr(value, name), Tensor) for name in type(value).__dataclass_fields__
    )
