"""Packed weights in pages of 2 MiB: where the system can, and as before where it refuses."""

from __future__ import annotations

import ctypes
import errno
import io
import mmap
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from plait.checkpoint.packed_cache import file_format
from plait.checkpoint.packed_cache.file_format import write_whole
from plait.checkpoint.readers.mmap_json import LARGE_PAGE, list_mapped, map_in_large_pages

SIZES = (1, 64, 1_000_000, 3_000_001, 2_500_000)  # bytes of blocks, which are not whole pages
FOLDERS = ("", "/dev/shm")  # a file system's own choice of addresses, and one that makes none
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has large pages for files")


def make_blocks() -> list[memoryview]:
    numbers = np.random.default_rng(1)
    return [memoryview(numbers.bytes(size)) for size in SIZES]


def fill_up(blocks: Iterable[memoryview]) -> bytes:
    return b"".join(bytes(block) + bytes(-block.nbytes % 64) for block in blocks)


def write(folder: Path, name: str = "large.packed") -> tuple[Path, bytes]:
    """A file of packed weights, and what must be in it."""
    blocks, first = make_blocks(), bytes(range(256)) * 16
    body = fill_up(blocks)
    write_whole(folder / name, first, blocks, len(body))
    return folder / name, first + body


def address_of(mapped: mmap.mmap | memoryview) -> int:
    return int(np.frombuffer(mapped, np.uint8).ctypes.data)


def large_bytes(mapped: mmap.mmap | memoryview) -> int:
    """Bytes of a mapping that are in large pages, after all of it was read."""
    found, at = np.frombuffer(mapped, np.uint8), address_of(mapped)
    assert int(found[::4096].astype(np.int64).sum()) >= 0
    entry = re.compile(rf"^{at:x}-.*\n(?:(?![0-9a-f]+-).*\n)*?FilePmdMapped: +(\d+) kB", re.MULTILINE)
    match = entry.search(Path("/proc/self/smaps").read_text())
    return int(match[1]) << 10 if match else 0


def test_no_write_crosses_a_large_page_and_all_but_the_last_are_whole_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A system takes the size of a file's pages from writes."""
    sizes: list[int] = []

    class Recorder:
        def __init__(self, descriptor: int, mode: str, buffering: int) -> None:
            self._file = io.FileIO(descriptor, mode)
            self._held, self._size = bytearray(), buffering

        def __enter__(self) -> Recorder:
            return self

        def __exit__(self, *_: object) -> None:
            self._file.close()

        def fileno(self) -> int:
            return self._file.fileno()

        def write(self, piece: memoryview) -> None:
            if len(self._held) + piece.nbytes > self._size:
                self.flush()
            self._held += piece

        def flush(self) -> None:
            if self._held:
                sizes.append(len(self._held))
                self._file.write(self._held)
                self._held.clear()

    monkeypatch.setattr(os, "fdopen", Recorder)
    path, content = write(tmp_path)
    assert path.read_bytes() == content
    assert sizes == [LARGE_PAGE] * (len(content) // LARGE_PAGE) + [len(content) % LARGE_PAGE]


@linux
@pytest.mark.parametrize("folder", FOLDERS)
def test_large_files_begin_where_a_large_page_may(tmp_path: Path, folder: str) -> None:
    if folder and not os.access(folder, os.W_OK):
        pytest.skip(f"there is no {folder}")
    where = Path(folder) if folder else tmp_path
    path, content = write(where, f"plait-test-{os.getpid()}.packed")
    try:
        mapped = map_in_large_pages(path)
        assert address_of(mapped) % LARGE_PAGE == 0
        assert mapped == content
        assert (path.resolve(), address_of(mapped), len(content)) in list_mapped()
        mapped[0] ^= 1  # a copy of ours
        assert path.read_bytes() == content
    finally:
        path.unlink()


@linux
def test_packed_weights_are_in_large_pages_where_the_system_has_them_for_files(tmp_path: Path) -> None:
    """The system says so of a file that is written and mapped by hand, as simply as can be."""
    plain = tmp_path / "plain"
    plain.write_bytes(bytes(2 * LARGE_PAGE))
    with plain.open("rb") as file:
        by_hand = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    if address_of(by_hand) % LARGE_PAGE or not large_bytes(by_hand):
        pytest.skip("this system keeps files in small pages")
    path, content = write(tmp_path)
    assert large_bytes(map_in_large_pages(path)) == len(content) // LARGE_PAGE * LARGE_PAGE


def refusing(*names: str) -> type[mmap.mmap]:
    """`mmap` of a system that gives neither large pages nor any memory that is no file's."""

    class Refusing(mmap.mmap):
        def __new__(cls, descriptor: int, *given: Any, **options: Any) -> Refusing:
            if descriptor < 0 and "anonymous" in names:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return super().__new__(cls, descriptor, *given, **options)

        def madvise(self, *_: int) -> None:
            if "advice" in names:
                raise OSError(errno.EINVAL, "Invalid argument")

    return Refusing


class Refused:
    """The system's `mmap`, when it refuses the place that it is given."""

    def __call__(self, *_: object) -> int:
        ctypes.set_errno(errno.ENOMEM)
        return (1 << 64) - 1


@linux
def test_a_file_without_a_place_is_mapped_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, content = write(tmp_path)
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **options: SimpleNamespace(mmap=Refused()))
    assert map_in_large_pages(path) == content


@linux
@pytest.mark.parametrize("refused", [("advice",), ("anonymous",), ("advice", "anonymous")])
@pytest.mark.parametrize("folder", FOLDERS)
def test_a_refusal_changes_nothing_but_the_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refused: tuple[str, ...], folder: str
) -> None:
    if folder and not os.access(folder, os.W_OK):
        pytest.skip(f"there is no {folder}")
    path, content = write(Path(folder) if folder else tmp_path, f"plait-test-{os.getpid()}.packed")
    monkeypatch.setattr(mmap, "mmap", refusing(*refused))
    try:
        assert map_in_large_pages(path)[:] == content
    finally:
        path.unlink()


def test_systems_without_large_pages_and_small_files_map_as_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "small"
    small.write_bytes(b"12345")
    assert map_in_large_pages(small)[:] == b"12345"
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    path, content = write(tmp_path)
    assert map_in_large_pages(path)[:] == content
    assert file_format.whole(len(content)) == len(content)
