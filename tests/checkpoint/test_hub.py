"""Models by their Hub name, against a module that stands for the library: no network."""

from __future__ import annotations

import fnmatch
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from plait.checkpoint.files import find_model
from plait.checkpoint.hub import is_hub_name
from plait.errors import CheckpointError, ConfigError, UnsupportedFormat


class Hub(ModuleType):
    """`huggingface_hub`, as far as it is used: one repository, and what was fetched of it."""

    def __init__(self, folder: Path, names: list[str], online: bool = True) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.names, self.online, self.fetched = folder, names, online, [""]

    def list_repo_files(self, repo: str) -> list[str]:
        if not self.online:
            raise ConnectionError(f"cannot reach the Hub\nfor {repo}")
        return self.names

    def snapshot_download(
        self, repo: str, allow_patterns: list[str] | None = None, local_files_only: bool = False
    ) -> str:
        if local_files_only:
            if not self.folder.exists():
                raise FileNotFoundError(repo)
            return str(self.folder)
        assert allow_patterns is not None
        self.fetched = [n for n in self.names if any(fnmatch.fnmatch(n, p) for p in allow_patterns)]
        self.folder.mkdir(exist_ok=True)
        for name in self.fetched:
            if name.endswith(".safetensors"):
                save_file({name: torch.ones(1)}, self.folder / name)
            else:
                (self.folder / name).write_bytes(b"GGUF" if name.endswith(".gguf") else b"{}")
        return str(self.folder)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    def with_names(*names: str, online: bool = True) -> Hub:
        hub = Hub(tmp_path / "0123abcd", list(names), online)
        monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
        return hub

    monkeypatch.chdir(tmp_path)
    return with_names


def test_only_what_is_needed_is_fetched(install: Any) -> None:
    small = ["config.json", "tokenizer.json", "tokenizer.model", "chat_template.jinja"]
    others = ["pytorch_model.bin", "m.gguf", "README.md", "original/params.json", "onnx/model.onnx"]
    hub = install(*small, *others, "model.safetensors", "consolidated.safetensors")
    files = find_model("org/some-model")
    assert {*small, "model.safetensors"} <= set(hub.fetched)
    assert not {n for n in hub.fetched if n.endswith((".bin", ".gguf", ".md", ".onnx"))}
    assert "consolidated.safetensors" not in hub.fetched
    assert files.name == "org/some-model"
    assert [p.name for p in files.weights] == ["model.safetensors"]


def test_one_of_many_quantizations_is_named(install: Any) -> None:
    hub = install("m-Q4_K.gguf", "m-Q8_0.gguf")
    with pytest.raises(
        ConfigError, match=r"org/m on the Hub holds several models.*m-Q4_K\.gguf, m-Q8_0\.gguf"
    ):
        find_model("org/m")
    files = find_model("org/m/m-Q8_0.gguf")
    assert hub.fetched == ["m-Q8_0.gguf"]
    assert (files.kind, files.name) == ("gguf", "org/m/m-Q8_0.gguf")
    with pytest.raises(ConfigError, match=r"no file 'm-Q2_K\.gguf'; it has: m-Q4_K\.gguf"):
        find_model("org/m/m-Q2_K.gguf")


def test_all_parts_of_a_named_file_are_fetched(install: Any) -> None:
    hub = install("m-00001-of-00002.gguf", "m-00002-of-00002.gguf", "other.gguf")
    assert len(find_model("org/m/m-00001-of-00002.gguf").weights) == 2
    assert "other.gguf" not in hub.fetched


def test_without_a_network_the_copy_on_disk_is_used(install: Any) -> None:
    install("model.safetensors")
    find_model("org/m")
    install("model.safetensors", online=False)
    assert [p.name for p in find_model("org/m").weights] == ["model.safetensors"]


def test_without_a_network_and_a_copy_the_error_says_both(install: Any) -> None:
    install(online=False)
    with pytest.raises(CheckpointError, match=r"cannot reach the Hub for org/m; and this disk has no copy"):
        find_model("org/m")


def test_a_fetch_that_fails_says_why(install: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any, **kwargs: Any) -> str:
        raise OSError("disk full")

    monkeypatch.setattr(install("model.safetensors"), "snapshot_download", fails)
    with pytest.raises(CheckpointError, match="cannot fetch org/m from the Hub: disk full"):
        find_model("org/m")


def test_a_repository_of_pickles_is_refused_before_fetching(install: Any) -> None:
    hub = install("pytorch_model.bin", "config.json")
    with pytest.raises(UnsupportedFormat, match="org/m on the Hub has only"):
        find_model("org/m")
    assert hub.fetched == [""]


def test_without_the_library_the_error_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"pip install 'plait\[hub\]'; or pass the directory"):
        find_model("org/some-model")


def test_a_mistyped_path_never_asks_the_hub(install: Any, tmp_path: Path) -> None:
    install(online=False)
    (tmp_path / "models").mkdir()
    with pytest.raises(ConfigError, match="no such file"):
        find_model("models/typo")


@pytest.mark.parametrize(
    ("text", "is_name"),
    [
        ("org/name", True), ("org/name-1.5_b", True), ("org/name/file.gguf", True), ("org/n/s/f.gguf", True),
        ("name", False), ("./org/name", False), ("/org/name", False), ("org/../name", False),
        ("org/name/file.bin", False), ("org/name/", False), ("~/name", False), ("o g/name", False),
        ("", False),
    ],
)  # fmt: skip
def test_what_looks_like_a_hub_name(text: str, is_name: bool) -> None:
    assert is_hub_name(text) is is_name
