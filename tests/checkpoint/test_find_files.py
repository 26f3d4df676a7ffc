"""Finding a model: the order in a directory, files by content, and errors that say what to do."""

from __future__ import annotations

import json
import os
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from plait.checkpoint.find_files import ModelFiles, find_model, read_json
from plait.checkpoint.readers.mmap_json import read_stamp
from plait.checkpoint.readers.safetensors import SafetensorsFiles
from plait.errors import BadFile, ConfigError, UnsupportedFormat

GGUF = b"GGUF" + struct.pack("<IQQ", 3, 0, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "some-model"
    path.mkdir()
    return path


def put(folder: Path, *names: str) -> None:
    for name in names:
        if name.endswith(".safetensors"):
            save_file({name: torch.ones(1)}, folder / name)
        else:
            (folder / name).write_bytes(GGUF if name.endswith(".gguf") else b"{}")


def found(folder: Path) -> list[str]:
    return [path.name for path in find_model(folder).weights]


SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
PARTS = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]


@pytest.mark.parametrize(
    ("names", "chosen"),
    [
        (["model.safetensors", "x_final.safetensors", "m.gguf"], ["model.safetensors"]),
        (["model.safetensors", *SHARDS], ["model.safetensors"]),
        ([*SHARDS, "consolidated.safetensors", "x_final.safetensors"], SHARDS),
        (["x_final.safetensors", "x_step_9.safetensors"], ["x_final.safetensors"]),
        (
            ["x_step_9.safetensors", "x_step_10.safetensors", "y_step_2.safetensors"],
            ["x_step_10.safetensors"],
        ),
        (["consolidated.safetensors", "extra.safetensors"], ["consolidated.safetensors"]),
        (["weights.safetensors", "m.gguf"], ["weights.safetensors"]),
        (["weights.safetensors", "adapter_model.safetensors"], ["weights.safetensors"]),
        (["pytorch_model.bin", "m.gguf", "mmproj-m.gguf"], ["m.gguf"]),
        (PARTS, PARTS),
    ],
)
def test_a_directory_is_searched_in_order(folder: Path, names: list[str], chosen: list[str]) -> None:
    put(folder, *names)
    assert found(folder) == chosen


@pytest.mark.parametrize(
    "names",
    [
        ["a.safetensors", "b.safetensors"],
        ["a_final.safetensors", "b_final.safetensors"],
        ["a_step_5.safetensors", "b_step_5.safetensors"],
        ["a.gguf", "b.gguf"],
        ["a.gguf", *PARTS],
        [*SHARDS, "other-00001-of-00001.safetensors"],
    ],
)
def test_several_models_are_listed_and_none_is_chosen(folder: Path, names: list[str]) -> None:
    put(folder, *names)
    with pytest.raises(ConfigError, match="several models; name one") as caught:
        find_model(folder)
    assert sum(name.split("-0")[0] in str(caught.value) for name in names) == len(names)


def test_an_index_names_the_shards(folder: Path) -> None:
    put(folder, "one.safetensors", "two.safetensors", "left-over.safetensors", "config.json")
    weight_map = {"one.safetensors": "one.safetensors", "two.safetensors": "two.safetensors"}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    files = find_model(folder)
    assert [p.name for p in files.weights] == ["one.safetensors", "two.safetensors"]
    assert files.index == weight_map
    assert sorted(SafetensorsFiles(*files.weights, index=files.index).names()) == sorted(weight_map)


@pytest.mark.parametrize(
    "content",
    [
        "[]", "{", "", "{}", '{"weight_map": {}}', '{"weight_map": []}', '{"weight_map": {"a": 1}}',
        '{"weight_map": {"a": "../x.safetensors"}}', '{"weight_map": {"a": "/etc/x.safetensors"}}',
        '{"weight_map": {"a": "x.bin"}}', '{"weight_map": {"a": "gone.safetensors"}}',
        '{"weight_map": {"a": "..\\\\x.safetensors"}}', '{"weight_map": {}, "weight_map": {}}',
    ],
)  # fmt: skip
def test_a_bad_index_is_refused(folder: Path, content: str) -> None:
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BadFile, match="some-model"):
        find_model(folder)


def test_missing_shards_are_named(folder: Path) -> None:
    put(folder, SHARDS[0])
    with pytest.raises(BadFile, match=SHARDS[1]):
        find_model(folder)
    put(folder, SHARDS[1])
    assert found(folder) == SHARDS
    assert [p.name for p in find_model(folder / SHARDS[1]).weights] == SHARDS


def test_missing_parts_are_named(folder: Path) -> None:
    put(folder, PARTS[1])
    with pytest.raises(BadFile, match=PARTS[0]):
        find_model(folder)


def test_what_lies_beside_the_weights_is_found(folder: Path) -> None:
    put(
        folder,
        "model.safetensors",
        "config.json",
        "tokenizer.json",
        "tokenizer.jsonl",
        "qwen.tiktoken",
        "chat_template.jinja",
        "x.txt",
    )
    files = find_model(folder)
    beside = ("chat_template.jinja", "qwen.tiktoken", "tokenizer.json", "tokenizer.jsonl")
    assert files == ModelFiles(
        "safetensors",
        (folder / "model.safetensors",),
        folder,
        folder / "config.json",
        {name: folder / name for name in beside},
        "some-model",
        stamps=(read_stamp(folder / "model.safetensors"),),
    )
    assert find_model(str(folder / "model.safetensors")) == files


def test_a_gguf_file_is_alone_even_in_a_full_directory(folder: Path) -> None:
    put(folder, "Tiny-Q4_K.gguf", "other.gguf", "config.json", "tokenizer.json")
    files = find_model(folder / "Tiny-Q4_K.gguf")
    assert (files.kind, files.config, dict(files.side_files), files.name) == ("gguf", None, {}, "Tiny-Q4_K")


def test_the_content_decides_and_not_the_name(folder: Path) -> None:
    put(folder, "m.gguf", "model.safetensors")
    (folder / "m.gguf").rename(folder / "blob")
    (folder / "model.safetensors").rename(folder / "sha256-1234")
    assert find_model(folder / "blob").kind == "gguf"
    assert find_model(folder / "sha256-1234").kind == "safetensors"


def test_a_directory_named_by_a_dot_has_a_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(folder, "model.safetensors")
    monkeypatch.chdir(folder)
    assert find_model(".").name == find_model("model.safetensors").name == "some-model"


@pytest.mark.parametrize("name", ["pytorch_model.bin", "x.pt", "x.pth", "x.pkl", "x.ckpt"])
def test_pickles_are_refused_with_the_way_out(folder: Path, name: str) -> None:
    torch.save({"a": torch.ones(1)}, folder / name)
    for target in (folder, folder / name):
        with pytest.raises(UnsupportedFormat, match=r"(?s)runs whatever code.*safetensors\.torch\.save_file"):
            find_model(target)
    (folder / name).rename(folder / "model.safetensors")
    with pytest.raises(UnsupportedFormat, match="pickle"):
        find_model(folder / "model.safetensors")


def test_an_adapter_is_no_model(folder: Path) -> None:
    put(folder, "adapter_model.safetensors", "adapter_config.json")
    with pytest.raises(UnsupportedFormat, match="merge it"):
        find_model(folder)


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:12\n"
SHARD = "model-00001-of-00001.safetensors"


@pytest.mark.parametrize("name", ["model.safetensors", "m.gguf", SHARD])
def test_an_lfs_pointer_is_named(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    if name == SHARD:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": SHARD}}))
    for target in (folder, folder / name):
        with pytest.raises(BadFile, match=rf"{re.escape(name)}: is a Git LFS pointer, .*git lfs pull"):
            find_model(target)


def test_an_lfs_pointer_of_a_tokenizer_is_named(folder: Path) -> None:
    put(folder, "model.safetensors")
    (folder / "tokenizer.json").write_text(POINTER)
    with pytest.raises(BadFile, match=r"tokenizer\.json: is a Git LFS pointer"):
        find_model(folder)


def test_an_empty_directory_says_what_was_expected(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"no \*\.safetensors and no \*\.gguf file; it holds nothing"):
        find_model(folder)
    put(folder, "README.md")
    with pytest.raises(ConfigError, match=r"it holds README\.md"):
        find_model(folder)


def test_other_files_are_refused(folder: Path) -> None:
    put(folder, "config.json")
    with pytest.raises(UnsupportedFormat, match="neither safetensors nor GGUF"):
        find_model(folder / "config.json")
    (folder / "empty.gguf").write_bytes(b"")
    with pytest.raises(BadFile, match=r"empty\.gguf: is empty; was its download"):
        find_model(folder / "empty.gguf")


def test_a_missing_path_names_its_neighbours(folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"nearest: .*some-model"):
        find_model(folder.parent / "some-modle")
    with pytest.raises(ConfigError, match="does not exist either"):
        find_model(folder / "a" / "b" / "c")
    for empty in ("", "a\0b"):
        with pytest.raises(ConfigError, match="empty name"):
            find_model(empty)


def test_what_is_no_regular_file_is_refused_without_waiting(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    (folder / "loop").symlink_to(folder / "loop")
    (folder / "gone").symlink_to(folder / "nowhere")
    for path in (folder / "pipe", folder / "loop", folder / "gone", Path("/dev/zero")):
        with pytest.raises(BadFile, match=str(path)):
            find_model(path)
    (folder / "model.safetensors").symlink_to(folder / "pipe")
    with pytest.raises(BadFile, match="pipe, socket or device"):
        SafetensorsFiles(*find_model(folder).weights)


def test_a_json_object_is_read(folder: Path) -> None:
    path = folder / "config.json"
    path.write_text('{"a": [1, 2.5, null, {"b": "é"}], "time_step_limit": [0.0, Infinity]}')
    limit = [0.0, float("inf")]
    assert read_json(path, "the config") == {"a": [1, 2.5, None, {"b": "é"}], "time_step_limit": limit}


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "not valid JSON"),
        (b"[1]", "must be a JSON object, got list"),
        (b"null", "must be a JSON object, got NoneType"),
        (b'{"a": 1', "not valid JSON"),
        (b'{"a": 1} x', "not valid JSON"),
        (b"\xef\xbb\xbf{}", "byte order mark"),
        ('{"a": 1}'.encode("utf-16"), "byte order mark"),
        (b'{"a": "\xff"}', r"not UTF-8 \(byte 7\)"),
        (b'{"a": 1, "b": 2, "a": 3}', "'a' appears twice"),
        (b'{"a": ' + b"7" * 5000 + b"}", "5000 digits"),
        (b'{"a": ' * 70 + b"1" + b"}" * 70, "nested too deeply"),
        (b'{"a": ' + b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "nested too deeply"),
    ],
)
def test_malformed_json_is_refused(folder: Path, raw: bytes, said: str) -> None:
    path = folder / "config.json"
    path.write_bytes(raw)
    with pytest.raises(BadFile, match=said) as caught:
        read_json(path, "the config")
    assert "config.json: the config" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_json_larger_than_the_limit_is_refused(folder: Path) -> None:
    with (folder / "config.json").open("wb") as file:
        file.truncate((64 << 20) + 1)
    with pytest.raises(BadFile, match="larger than 64 MiB"):
        read_json(folder / "config.json", "the config")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    raw=st.binary(max_size=60)
    | st.text(alphabet='{}[]":,0123456789.eE+-truefalsn \\u', max_size=60).map(str.encode)
)
def test_any_bytes_are_an_object_or_refused(folder: Path, raw: bytes) -> None:
    (folder / "config.json").write_bytes(raw)
    try:
        value = read_json(folder / "config.json", "the config")
    except BadFile:
        return
    assert isinstance(value, dict)


@pytest.mark.skipif(os.name != "posix", reason="paths are bytes on POSIX alone")
def test_paths_that_are_not_utf8_are_refused_relative_ones_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / os.fsdecode(b"d\xff")
    try:
        inner.mkdir()
    except OSError:
        pytest.skip("this file system has names in UTF-8 alone")
    put(inner, "m.gguf")
    put(tmp_path, "größe 😀\n.gguf")
    assert find_model(tmp_path / "größe 😀\n.gguf").name
    with pytest.raises(ConfigError, match="not UTF-8"):
        find_model(inner / "m.gguf")
    monkeypatch.chdir(inner)
    for name in ("m.gguf", "."):
        with pytest.raises(ConfigError, match="not UTF-8 here; write it in UTF-8"):
            find_model(name)
    with pytest.raises(ConfigError, match="not UTF-8"):
        find_model(os.fsdecode(b"not-there\xff"))
