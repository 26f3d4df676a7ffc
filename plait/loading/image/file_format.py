"""The file of a startup image: everything a startup on a CPU needs that the model's own files do not have.

    magic (8 bytes), length of the header (8), of the code (8), BLAKE2b of both (32)
    | header (msgpack) | object code of each kernel, one after the other | zeros | constants

Constants begin at a page, and are mapped; their checksum is in the header. The file is code: it is read only
if no other user may have written it, and if its hash is right. Nothing here imports torch or Numba.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import stat
import struct
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Struct

from plait.checkpoint.packed_cache.file_format import whole, write_whole
from plait.engine.fingerprint import Fingerprint
from plait.errors import BadFile
from plait.kernels.load import is_foreign_file
from plait.memory import PagedState, SlotState, State
from plait.runner.host.block_passes import BlockForm, MaskForm
from plait.typed_values import decode_msgpack

MAGIC = b"plaitim5"
_START = struct.Struct("<8sQQ32s")
_PAGE = 4096
HEAD, BLOCKS = "mtp.", "mtp.blocks."  # the names of a head's buffers begin with one of these
Bytes = npt.NDArray[np.uint8]


class KernelPart(Struct, frozen=True, array_like=True):
    """A kernel: its name, the symbol at which it begins, and where its object code is."""

    name: str
    symbol: str
    at: int
    nbytes: int


class Region(Struct, frozen=True, array_like=True):
    """Memory that launches point into.

    kind: "block" of the arena, "static" buffer of a batch, "store" of state, "sync" of threads, "constant" of
    this file, "file" of `ImageHeader.files`. name: of a buffer (a head's: `HEAD` + its name) or a state's
    tensor, or a file's number; at: where it begins in its file; nbytes: its length.
    """

    kind: str
    name: str
    at: int
    nbytes: int


class LaunchPart(Struct, frozen=True, array_like=True):
    """The kernel's number, its words, and of those that are addresses (word, region, offset).

    A region below 0 is a kernel's code: that of kernel -1 - region.
    """

    kernel: int
    words: tuple[int, ...]
    moved: tuple[tuple[int, int, int], ...]


class Result(Struct, frozen=True, array_like=True):
    """An array that a step leaves: its place, shape, strides in bytes and dtype."""

    region: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


class TilesPart(Struct, frozen=True, array_like=True):
    """The check of AMX: its kernel's number, its inputs, and its products as they are documented."""

    kernel: int
    given: tuple[bytes, ...]
    documented: tuple[bytes, bytes, bytes]


class ProgramPart(Struct, frozen=True):
    """A recorded program: its launches, where its results are, and for which largest step it is."""

    launches: tuple[LaunchPart, ...]
    scratch: int
    shared: int
    hidden: Result
    logits: Result
    largest: tuple[Result, Result] | None
    capacity: tuple[int, int, int, int]  # tokens, logits, sequences, blocks of one sequence
    keeps_rows: bool  # whether it keeps recurrent state behind single rows
    observed: Result | None  # what a head reads instead of `hidden`


class HeadPart(Struct, frozen=True):
    """A head that drafts: its passes, the hidden states that they read, and its state.

    blocks: the passes of one that drafts a block at once, and what blocks are; masks: what stands for tokens
    of a draft that one pass makes. None: it does not draft so.
    """

    program: ProgramPart
    blocks: tuple[ProgramPart, BlockForm] | None
    masks: MaskForm | None
    before: Result
    states: Mapping[str, PagedState]  # in order


class StepPart(Struct, frozen=True):
    """The recorded step of the model, and a head's passes; the memory and the code of both.

    `tables`: constants that are addresses, as (region, offset, region, offset).
    """

    program: ProgramPart
    head: HeadPart | None
    regions: tuple[Region, ...]
    tables: tuple[tuple[int, int, int, int], ...]
    kernels: tuple[KernelPart, ...]
    loops: Mapping[str, int]  # number of the kernel, by field of `NativeLoops`
    chosen: Mapping[str, int]  # those that sample: "largest" and "draw"; those of turns, if there is a head
    description: str
    tiles: TilesPart | None  # of programs that run on AMX


class FilePart(Struct, frozen=True, array_like=True):
    """A file of weights that launches point into, as it was: path, bytes, nanoseconds since 1970."""

    path: str
    nbytes: int
    changed_ns: int


class ModelPart(Struct, frozen=True):
    """What an engine must know about the model."""

    name: str
    spec: object  # as `plait.spec.values` encodes it
    paged: Mapping[str, PagedState]
    slots: Mapping[str, SlotState]
    order: tuple[str, ...]  # of both
    dtype: str
    block_size: int
    banned: tuple[int, ...]
    text: bytes  # its `TextSource`, as JSON
    weights_nbytes: int
    mapped_nbytes: int
    fingerprint: Fingerprint
    bound: Mapping[str, str]  # what each op runs as: its variants, joined by "+"

    @property
    def states(self) -> Mapping[str, State]:
        """The state of every mixer, by name."""
        found: dict[str, State] = {**self.paged, **self.slots}
        return {name: found[name] for name in self.order}


class ImageHeader(Struct, frozen=True):
    """Everything but code and constants. `key`: of what it was made, as plain values."""

    key: object
    model: ModelPart
    step: StepPart
    files: tuple[FilePart, ...]
    constants_nbytes: int
    constants_crc: int


class Image(Struct, frozen=True):
    """A file that was read: its header, its code, and its constants, which are mapped."""

    header: ImageHeader
    code: bytes
    constants: Bytes


def write_image(path: Path, header: ImageHeader, code: Sequence[bytes], constants: Sequence[Bytes]) -> int:
    """Write all of it or nothing; the bytes of the file. Raises OSError."""
    first, machine = msgspec.msgpack.encode(header), b"".join(code)
    digest = hashlib.blake2b(first + machine, digest_size=32).digest()
    raw = _START.pack(MAGIC, len(first), len(machine), digest) + first + machine
    raw += bytes(-len(raw) % _PAGE)
    return write_whole(path, raw, [one.data for one in constants], header.constants_nbytes)


def read_image(path: Path) -> Image | None:
    """An image; None if there is none. Raises BadFile for one that cannot be used, naming why."""
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NONBLOCK", 0))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise BadFile(f"it cannot be read ({error.strerror})") from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise BadFile("it is no regular file")
        if is_foreign_file(status):
            raise BadFile("another user may have written it")
        if status.st_size < _START.size:
            raise BadFile("it is cut off")
        mapped = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError) as error:
        raise BadFile(f"it cannot be mapped ({error})") from error
    finally:
        os.close(descriptor)
    return _parse(mapped)


def _parse(mapped: mmap.mmap) -> Image:
    magic, length, code_length, digest = _START.unpack(mapped[: _START.size])
    if magic != MAGIC:
        raise BadFile("it is not one of Plait's, or of another version")
    end = _START.size + length + code_length
    raw = mapped[_START.size : end]
    if len(raw) != length + code_length or hashlib.blake2b(raw, digest_size=32).digest() != digest:
        raise BadFile("it is damaged")
    try:
        header = decode_msgpack(raw[:length], ImageHeader)
    except msgspec.MsgspecError as error:
        raise BadFile(f"its header is of another version ({error})") from error
    start = end + -end % _PAGE
    if len(mapped) != start + header.constants_nbytes:
        raise BadFile("it is cut off")
    constants = np.frombuffer(mapped, np.uint8)[start:]
    if zlib.crc32(constants.data) != header.constants_crc:
        raise BadFile("it is damaged")
    return Image(header, raw[length:], constants)


def checksum(constants: Sequence[Bytes]) -> int:
    """Of constants as `write_image` writes them: each is filled up to whole lines."""
    found = 0
    for content in constants:
        found = zlib.crc32(content.data, found)
        found = zlib.crc32(bytes(whole(content.nbytes) - content.nbytes), found)
    return found


def lay_out(constants: Sequence[int]) -> tuple[list[int], int]:
    """Where constants of so many bytes begin, as `write_image` writes them; and the bytes of all."""
    starts, at = [], 0
    for nbytes in constants:
        starts.append(at)
        at += whole(nbytes)
    return starts, at
