"""Files of packed weights: whole or not there, and verified before use."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from plait.checkpoint.packed_cache import file_format
from plait.checkpoint.readers.mmap_json import map_file
from plait.errors import BadFile

HEADER = b'{"key": {"a": [1]}, "source": "/m.gguf", "nbytes": 128, "maps": {}}'
NAME = "m-0123456789abcdef.packed"


def written(folder: Path, fill: int = 1) -> Path:
    path = folder / NAME
    file_format.write_whole(path, file_format.encode_header(HEADER), [memoryview(bytes([fill]) * 100)], 128)
    return path


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = written(tmp_path)
    header = file_format.read_header(map_file(path), path)
    assert (header.key, header.source) == ({"a": [1]}, "/m.gguf")
    assert header.start % 4096 == 0
    assert path.read_bytes()[header.start :] == b"\x01" * 100 + bytes(28)
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    assert file_format.read_key(path) == ("/m.gguf", {"a": [1]})


@pytest.mark.parametrize("at", [0, 9, 20, 50, 48 + len(HEADER) - 1])
def test_a_changed_byte_of_the_header_is_found(tmp_path: Path, at: int) -> None:
    path = written(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)
    with pytest.raises(BadFile):
        file_format.read_header(map_file(path), path)
    assert file_format.read_key(path) is None


@pytest.mark.parametrize("nbytes", [1, 40, 60, 4096, -1])
def test_a_file_that_was_cut_is_found(tmp_path: Path, nbytes: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:nbytes])
    with pytest.raises(BadFile):
        file_format.read_header(map_file(path), path)


@pytest.mark.parametrize("header", [b"{}", HEADER.replace(b"128", b'"128"'), HEADER.replace(b"{}", b"[]")])
def test_a_header_of_another_client_is_found(tmp_path: Path, header: bytes) -> None:
    path = tmp_path / NAME
    path.write_bytes(file_format.encode_header(header) + bytes(128))
    with pytest.raises(BadFile, match="not one of Plait's"):
        file_format.read_header(map_file(path), path)
    assert file_format.read_key(path) is None


def test_a_file_is_as_private_as_requested(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for mode, found in ((0o644, 0o640), (0o600, 0o600)):
            file_format.write_whole(tmp_path / NAME, b"first", [], 0, mode)
            assert (tmp_path / NAME).stat().st_mode & 0o777 == found
    finally:
        os.umask(before)


def test_a_folder_that_is_not_ours_to_read_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under the home of another user, in a container that runs under a different user id."""

    def refuse(self: Path, *_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    written(tmp_path)
    for name in ("stat", "glob"):
        monkeypatch.setattr(Path, name, refuse)
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert not file_format.is_folder(tmp_path)
    assert file_format.list_packed(tmp_path) == []
    assert file_format.clear(tmp_path) == 0


def test_a_name_that_is_too_long_for_a_file_is_cut(tmp_path: Path) -> None:
    stem = file_format.as_stem("org/" + "ä" * 300)
    assert len(stem.encode()) <= 160
    assert not (tmp_path / f"{stem}-0123456789abcdef.packed.partial").exists()
    (tmp_path / f"{stem}-0123456789abcdef.packed").write_bytes(b"12345")
    assert file_format.clear(tmp_path, "org/" + "ä" * 300) == 5


def test_two_can_clear_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    items = file_format.list_packed(written(tmp_path).parent)
    monkeypatch.setattr(file_format, "list_packed", lambda _: items)
    file_format.clear(tmp_path)
    file_format.clear(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_full_disk_leaves_nothing_and_spoils_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = written(tmp_path).read_bytes()

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space"):
        written(tmp_path, 2)
    assert [p.name for p in tmp_path.iterdir()] == [NAME]
    assert (tmp_path / NAME).read_bytes() == before


def test_a_disk_that_reserves_nothing_is_written_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cannot(*_: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", cannot)
    assert file_format.read_key(written(tmp_path)) is not None


def test_processes_that_write_at_once_leave_one_whole_file(tmp_path: Path) -> None:
    script = (
        "import sys; from pathlib import Path; from plait.checkpoint.packed_cache.file_format import *\n"
        "fill, path = int(sys.argv[1]), Path(sys.argv[2])\n"
        'text = b\'{"key": {"fill": %d}, "source": "", "nbytes": 6400000, "maps": {}}\' % fill\n'
        "header = encode_header(text)\n"
        "for _ in range(4): write_whole(path, header, [memoryview(bytes([fill]) * 640)] * 10000, 6400000)\n"
    )
    path = tmp_path / NAME
    writers = [subprocess.Popen([sys.executable, "-c", script, str(fill), str(path)]) for fill in range(1, 4)]
    seen = set()
    while any(writer.poll() is None for writer in writers):
        if path.exists():
            mapped = map_file(path)
            header = file_format.read_header(mapped, path)
            assert {*mapped[header.start :]} == {header.key["fill"]}
            seen.add(header.key["fill"])
    assert [writer.returncode for writer in writers] == [0, 0, 0]
    assert seen
    assert [p.name for p in tmp_path.iterdir()] == [NAME]


def test_what_a_dead_process_left_goes_with_the_next_file(tmp_path: Path) -> None:
    old, new = tmp_path / "tmp1.partial", tmp_path / "tmp2.partial"
    old.touch()
    new.touch()
    os.utime(old, (0, 0))
    written(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {NAME, "tmp2.partial"}  # a process may be writing that one


def test_a_folder_is_listed_and_cleared_by_model(tmp_path: Path) -> None:
    written(tmp_path)
    other = tmp_path / "org--other-0123456789abcdef.packed"
    other.write_bytes(b"12345")
    (tmp_path / "mine.txt").touch()
    assert [(item.model, item.nbytes) for item in file_format.list_packed(tmp_path)] == [
        ("m", 4224),
        ("org--other", 5),
    ]
    assert file_format.clear(tmp_path, "org/other") == 5
    assert file_format.clear(tmp_path, "nobody") == 0
    assert file_format.clear(tmp_path, "/models/m.gguf") == 4224
    assert [p.name for p in tmp_path.iterdir()] == ["mine.txt"]
    assert file_format.list_packed(tmp_path / "none") == []
    assert file_format.clear(tmp_path / "none") == 0


def test_the_mapping_of_a_removed_file_goes_on(tmp_path: Path) -> None:
    path = written(tmp_path)
    mapped = map_file(path)
    file_format.clear(tmp_path)
    assert mapped[-128:-28] == b"\x01" * 100
