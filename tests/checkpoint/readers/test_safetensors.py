"""Safetensors files: views of what is there, and a typed refusal of what is not right."""

from __future__ import annotations

import contextlib
import json
import os
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from plait.checkpoint.readers.safetensors import SafetensorsFiles
from plait.errors import BadFile, CheckpointError, MissingTensor, UnsupportedFormat

FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def tensor(start: int, stop: int, shape: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


def raw_file(header: Any, data: int = 8, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + bytes(data)


DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool),
]


def test_mixed_dtypes_are_read_as_they_are(path: Path) -> None:
    tensors = {str(d): torch.arange(6).reshape(2, 3).to(d) for d in DTYPES} | {
        "empty": torch.zeros(0, 4), "scalar": torch.tensor(2.0)
    }  # fmt: skip
    save_file(tensors, path, metadata={"format": "pt"})
    files = SafetensorsFiles(path)
    assert set(files.names()) == set(tensors)
    for name, values in tensors.items():
        found = files.read(name)
        assert found.dtype is values.dtype
        assert files.shape(name) == tuple(found.shape) == tuple(values.shape)
        assert torch.equal(found.to(torch.float64), values.to(torch.float64))
        assert files.nbytes(name) == values.numel() * values.element_size()
        assert files.format_of(name) == str(values.dtype).removeprefix("torch.")


def test_reading_maps_and_does_not_copy(path: Path) -> None:
    save_file({"a": torch.ones(1024, 1024)}, path)
    files = SafetensorsFiles(path)
    values = files.read("a")
    values[0] = 5
    mapped = Path("/proc/self/maps").read_text() if Path("/proc/self/maps").exists() else str(path)
    assert str(path) in mapped
    files.close()
    assert values[1].sum() == 1024
    assert torch.equal(SafetensorsFiles(path).read("a"), torch.ones(1024, 1024))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    paths = [tmp_path / "1.safetensors", tmp_path / "2.safetensors"]
    files = SafetensorsFiles(*paths, index={"a": "1.safetensors", "b": "2.safetensors"})
    assert sorted(files.names()) == ["a", "b"]
    assert files.read("b").tolist() == [0, 0, 0]
    assert "c" not in files
    with pytest.raises(MissingTensor, match="'c'"):
        files.read("c")
    for index in ({"a": "2.safetensors"}, {"c": "1.safetensors"}, {"a": "3.safetensors"}):
        with pytest.raises(BadFile, match="the index says"):
            SafetensorsFiles(*paths, index=index)


def test_a_name_in_two_shards_is_refused(tmp_path: Path) -> None:
    for n in (1, 2):
        save_file({"a": torch.ones(2)}, tmp_path / f"{n}.safetensors")
    with pytest.raises(BadFile, match=r"'a' is in .*1\.safetensors and in .*2\.safetensors"):
        SafetensorsFiles(tmp_path / "1.safetensors", tmp_path / "2.safetensors")


def test_a_dtype_that_is_not_known_is_refused_by_name(path: Path) -> None:
    path.write_bytes(raw_file({"a": tensor(0, 8, [16], "F4")}))
    with pytest.raises(UnsupportedFormat, match="'F4'; supported: F64, F32"):
        SafetensorsFiles(path)


LIES = (1, 0xFFFF, 1 << 31, 1 << 32, 1 << 63, (1 << 64) - 1)
GOOD = {"a": tensor(0, 4, [1]), "b": tensor(4, 8, [1])}
BAD = {
    "empty": b"",
    "seven bytes": bytes(7),
    "no header": bytes(8),
    "not an object": raw_file([1]),
    "not JSON": raw_file(b"{"),
    "not UTF-8": raw_file(b'{"\xff": 1}'),
    "spaces first": raw_file(b" {}"),
    "nested without end": raw_file(b'{"a":' * 100_000),
    "an integer without end": raw_file(b'{"a":' + b"9" * 100_000 + b"}"),
    "a key twice": raw_file(b'{"a":%s,"a":%s}' % ((json.dumps(tensor(0, 8, [2])).encode(),) * 2)),
    "metadata of numbers": raw_file({"__metadata__": {"a": 1}, "a": tensor(0, 8, [2])}),
    "metadata that is a list": raw_file({"__metadata__": [], "a": tensor(0, 8, [2])}),
    "a tensor that is a number": raw_file({"a": 1}),
    "a field too many": raw_file({"a": tensor(0, 8, [2]) | {"x": 1}}),
    "a field too few": raw_file({"a": {"dtype": "F32", "shape": [2]}}),
    "a shape of text": raw_file({"a": tensor(0, 8, "2")}),  # type: ignore[arg-type]
    "a shape of truths": raw_file({"a": tensor(0, 4, [True])}, 4),
    "a shape of fractions": raw_file({"a": tensor(0, 8, [2.0])}),  # type: ignore[list-item]
    "a negative shape": raw_file({"a": tensor(0, 8, [-1, -2])}),
    "a shape of 65 dimensions": raw_file({"a": tensor(0, 8, [1] * 64 + [2])}),
    "a shape that overflows": raw_file({"a": tensor(0, 0, [1 << 32, 1 << 32])}, 0),
    "one offset": raw_file({"a": tensor(0, 8, [2]) | {"data_offsets": [0]}}),
    "offsets backwards": raw_file({"a": tensor(8, 0, [2])}),
    "another size than the shape": raw_file({"a": tensor(0, 8, [3])}),
    "a tensor past the end": raw_file({"a": tensor(0, 16, [4])}),
    "bytes left over": raw_file({"a": tensor(0, 4, [1])}),
    "a gap": raw_file({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, 12),
    "a late start": raw_file({"a": tensor(4, 8, [1])}),
    "overlap": raw_file({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, 12),
    "the same bytes twice": raw_file({"a": tensor(0, 8, [2]), "b": tensor(0, 8, [2])}),
    **{f"a header of {n}": raw_file(GOOD, length=n) for n in LIES},
    **{f"an offset of {n}": raw_file({"a": tensor(n, n + 8, [2])}) for n in LIES},
    **{f"a dimension of {n}": raw_file({"a": tensor(0, 8, [n])}) for n in LIES},
}


@pytest.mark.parametrize("raw", BAD.values(), ids=BAD.keys())
def test_a_bad_file_is_refused_at_once_and_without_memory(path: Path, raw: bytes) -> None:
    path.write_bytes(raw)
    tracemalloc.start()
    try:
        with pytest.raises(BadFile) as caught:
            SafetensorsFiles(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert str(path) in str(caught.value)
    assert len(str(caught.value)) < 2000


def test_a_file_cut_anywhere_is_refused(path: Path) -> None:
    raw = raw_file(GOOD)
    for stop in range(len(raw)):
        path.write_bytes(raw[:stop])
        with pytest.raises(BadFile):
            SafetensorsFiles(path)


@FUZZ
@given(data=st.data())
def test_flipped_bytes_never_surprise(path: Path, data: st.DataObject) -> None:
    raw = bytearray(raw_file(GOOD))
    for _ in range(data.draw(st.integers(1, 4))):
        raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(raw))
    try:
        files = SafetensorsFiles(path)
        for name in files.names():
            assert tuple(files.read(name).shape) == files.shape(name)
    except CheckpointError as error:
        refused = str(error)
        assert_message(refused)


def assert_message(text: str) -> None:
    assert 0 < len(text) < 2000


@FUZZ
@given(header=st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["a", "b", "dtype", "shape", "data_offsets", "__metadata__"]), inner, max_size=4
    ),
    max_leaves=12,
))  # fmt: skip
def test_any_json_is_a_checkpoint_or_refused(path: Path, header: Any) -> None:
    path.write_bytes(raw_file(header, 0))
    try:
        assert not list(SafetensorsFiles(path).names()) or isinstance(header, dict)
    except CheckpointError as error:
        refused = str(error)
        assert_message(refused)


def test_what_is_no_regular_file_is_refused_without_waiting(tmp_path: Path) -> None:
    pipe, loop, gone = tmp_path / "pipe", tmp_path / "loop", tmp_path / "gone"
    os.mkfifo(pipe)
    loop.symlink_to(loop)
    gone.symlink_to(tmp_path / "nowhere")
    for path in (pipe, loop, gone, tmp_path, tmp_path / "absent", Path("/dev/zero"), Path("/dev/null")):
        with pytest.raises(BadFile, match=str(path)):
            SafetensorsFiles(path)


@contextlib.contextmanager
def as_somebody_else() -> Iterator[None]:
    """Root may read everything, so it becomes another user for a moment."""
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


def test_a_file_that_may_not_be_read_is_refused(path: Path) -> None:
    save_file({"a": torch.ones(2)}, path)
    path.chmod(0)
    with as_somebody_else(), pytest.raises(BadFile, match="Permission denied"):
        SafetensorsFiles(path)


def replace_file(path: Path) -> None:
    """As a download or another conversion does: a new file gets the old one's name."""
    other = path.with_name("other")
    save_file({name: torch.full((4,), 2.0) for name in "ab"}, other)
    os.utime(other, ns=(0, 0))  # the system's own times are no finer than some milliseconds
    other.replace(path)


def rewrite_file(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-4:] = bytes(4)
    path.write_bytes(raw)
    os.utime(path, ns=(0, 0))


@pytest.mark.parametrize("change", [replace_file, rewrite_file])
@pytest.mark.parametrize("has_read", [False, True])
def test_a_model_is_never_read_from_two_files_of_one_name(
    path: Path, change: Callable[[Path], None], has_read: bool
) -> None:
    """Its file is opened again after `release`: a conversion does so every few tensors."""
    save_file({name: torch.ones(4) for name in "ab"}, path)
    files = SafetensorsFiles(path)
    if has_read:
        assert torch.equal(files.read("a"), torch.ones(4))
    change(path)
    files.release()
    with pytest.raises(BadFile, match="has been replaced or written to"):
        files.read("b")
