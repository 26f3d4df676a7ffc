"""Moves state between a GPU and host memory: one pinned pool, a stream of its own, few large copies.

Pinning memory takes milliseconds and may stop the device, so it is never done for one swap. The pool grows by
segments and keeps them; a saved state gets pieces of it, usually one. Rows are gathered into one staging
tensor on the device, which the side stream then copies, while the steps that follow may write the rows:

    current stream:   gather rows -> staging      next step …                 wait, scatter staging -> rows
    side stream:                     staging -> pieces (save)     pieces -> staging (load)

All access to the pool is on the side stream. So a piece that is given back can be taken at once: what still
reads or writes it is done before its next user begins.
"""

from __future__ import annotations

import contextlib
import logging
from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

SEGMENT = 256 << 20  # bytes; torch rounds pinned memory up to a power of two
ALIGN = 256  # bytes: of pieces, and of each tensor's part of the staging memory
WIDEST = ((8, torch.int64), (4, torch.int32), (2, torch.int16), (1, torch.uint8))
log = logging.getLogger("plait")


class HostPiece(NamedTuple):
    """Bytes start..stop of a segment of the pool."""

    segment: int
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


class HostPool:
    """Host memory that is allocated once and kept, in segments of `segment` bytes. `make` allocates one."""

    def __init__(self, make: Callable[[int], Tensor], segment: int = SEGMENT) -> None:
        self._make, self._size = make, segment
        self._segments: list[Tensor] = []
        self._free: list[HostPiece] = []  # sorted; no two of them touch

    @property
    def nbytes(self) -> int:
        """Bytes of all segments."""
        return len(self._segments) * self._size

    def take(self, nbytes: int) -> tuple[HostPiece, ...]:
        """Pieces of together at least `nbytes`: one where there is one, else the largest, else of new memory.

        So the pool is never larger than what was in use at most, and a segment.
        """
        needed = -(-nbytes // ALIGN) * ALIGN
        whole = next((piece for piece in self._free if piece.nbytes >= needed), None)
        if whole is not None and needed:
            return (self._cut(whole, needed),)
        taken = []
        for piece in sorted(self._free, key=lambda p: -p.nbytes):
            if not needed:
                break
            taken.append(self._cut(piece, min(piece.nbytes, needed)))
            needed -= taken[-1].nbytes
        while needed:
            self._segments.append(self._make(self._size))
            fresh = HostPiece(len(self._segments) - 1, 0, self._size)
            insort(self._free, fresh)
            taken.append(self._cut(fresh, min(self._size, needed)))
            needed -= taken[-1].nbytes
        return tuple(taken)

    def give(self, pieces: Sequence[HostPiece]) -> None:
        """Take pieces back; neighbours become one."""
        for piece in pieces:
            insort(self._free, piece)
        joined: list[HostPiece] = []
        for piece in self._free:
            if joined and joined[-1].segment == piece.segment and joined[-1].stop == piece.start:
                joined[-1] = joined[-1]._replace(stop=piece.stop)
            else:
                joined.append(piece)
        self._free = joined

    def bytes_of(self, piece: HostPiece) -> Tensor:
        return self._segments[piece.segment][piece.start : piece.stop]

    def _cut(self, piece: HostPiece, nbytes: int) -> HostPiece:
        """The first bytes of a free piece; the rest stays free."""
        at = self._free.index(piece)
        rest = piece._replace(start=piece.start + nbytes)
        self._free[at : at + 1] = [rest] if rest.nbytes else []
        return piece._replace(stop=piece.start + nbytes)


class DeviceSwap:
    """Saves and loads rows of `tensors`, [rows, bytes] uint8 on one device, through a pool of host memory."""

    def __init__(self, tensors: Sequence[Sequence[Tensor]], device: torch.device, pool: HostPool) -> None:
        self._groups = [[view_widest(tensor) for tensor in group] for group in tensors]
        self._device, self._pool = device, pool
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def save(self, index: Sequence[Sequence[int]]) -> tuple[HostPiece, ...]:
        """Copy rows, by group, to host memory. The copy is under way when this returns."""
        staging = torch.empty(self._nbytes(index), dtype=torch.uint8, device=self._device)
        for tensor, rows, part in self._parts(index, staging):
            torch.index_select(tensor, 0, rows, out=part)
        pieces = self._pool.take(staging.numel())
        with self._on_side(after_current=True):
            for host, own in self._pairs(pieces, staging):
                host.copy_(own, non_blocking=True)
        if self._side is not None:
            staging.record_stream(self._side)
        return pieces

    def load(self, index: Sequence[Sequence[int]], pieces: Sequence[HostPiece]) -> None:
        """Copy what `save` made of as many rows back. Steps that follow on this stream see the rows."""
        with self._on_side(after_current=False):
            staging = torch.empty(self._nbytes(index), dtype=torch.uint8, device=self._device)
            for host, own in self._pairs(pieces, staging):
                own.copy_(host, non_blocking=True)
        if self._side is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_stream(self._side)
            staging.record_stream(current)
        for tensor, rows, part in self._parts(index, staging):
            tensor.index_copy_(0, rows, part)

    def drop(self, pieces: Sequence[HostPiece]) -> None:
        self._pool.give(pieces)

    @contextlib.contextmanager
    def _on_side(self, *, after_current: bool) -> Iterator[None]:
        if self._side is None:
            yield
            return
        if after_current:
            self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            yield

    def _pairs(self, pieces: Sequence[HostPiece], staging: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        at = 0
        for piece in pieces:
            count = min(piece.nbytes, staging.numel() - at)
            yield self._pool.bytes_of(piece)[:count], staging[at : at + count]
            at += count

    def _parts(
        self, index: Sequence[Sequence[int]], staging: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """(tensor, its rows as an index, where they are in the staging memory) of all that has bytes."""
        at = 0
        for group, rows in zip(self._groups, index, strict=True):
            if not rows:
                continue
            chosen = copy_index(rows, self._device)
            for tensor in group:
                nbytes = len(rows) * tensor.shape[1] * tensor.element_size()
                if nbytes:
                    part = staging[at : at + nbytes].view(tensor.dtype)
                    yield tensor, chosen, part.view(len(rows), tensor.shape[1])
                at += _pad(nbytes)

    def _nbytes(self, index: Sequence[Sequence[int]]) -> int:
        return sum(
            _pad(len(rows) * tensor.shape[1] * tensor.element_size())
            for group, rows in zip(self._groups, index, strict=True)
            for tensor in group
        )


def pin_memory(nbytes: int) -> Tensor:
    """Bytes that a GPU reads and writes directly; plain ones, with a warning, where the system has none."""
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    except RuntimeError as error:
        text = " ".join(str(error).split())[:160]
        log.warning("swap: %d MiB cannot be pinned (%s): copies to the host are slower", nbytes >> 20, text)
        return torch.empty(nbytes, dtype=torch.uint8)


def copy_index(rows: Sequence[int], device: torch.device) -> Tensor:
    """Numbers of rows as an index on the device; a GPU is not waited for."""
    index = torch.tensor(rows, dtype=torch.int64)
    return index if device.type == "cpu" else index.pin_memory().to(device, non_blocking=True)


def view_widest(tensor: Tensor) -> Tensor:
    """The same rows, [rows, n], in the widest integers that divide a row: one element is one load."""
    nbytes = tensor.shape[1]
    return tensor.view(next(dtype for size, dtype in WIDEST if nbytes % size == 0)) if nbytes else tensor


def _pad(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN
