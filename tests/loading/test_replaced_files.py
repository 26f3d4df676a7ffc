"""Models with files that are replaced while an engine is made, or while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from plait import LLM
from plait.config import EngineConfig
from plait.convert.convert import Order, convert_model
from plait.errors import BadFile
from plait.loading import packed_cache
from plait.loading.identity.fingerprint import digest_model
from plait.loading.image.start import start_image
from plait.loading.open_model import open_model

LIMIT = 1 << 40
SIZES = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "threads": 1, "device": "cpu"}


@pytest.fixture(autouse=True)
def same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_cache, "hash_code", lambda parts: "this code")


@pytest.fixture
def model(nano_hybrid: Path, tmp_path: Path) -> Path:
    """A GGUF file: its tensors are views of one mapping, whatever becomes of its name."""
    convert_model(Order(str(nano_hybrid), tmp_path / "model.gguf", threads=1), lambda *_: None)
    return tmp_path / "model.gguf"


def replace_model(path: Path) -> None:
    """Give its name to another file, of the same tensors with other numbers."""
    raw = bytearray(path.read_bytes())
    half = len(raw) // 2
    raw[half:] = bytes(len(raw) - half)
    other = path.with_name("other")
    other.write_bytes(raw)
    os.utime(other, ns=(0, 0))  # the system's own times are no finer than some milliseconds
    other.replace(path)


def before(change: Callable[[], None], function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with a change made before its first call."""
    changes = [change]

    def call(*given: Any, **named: Any) -> Any:
        if changes:
            changes.pop()()
        return function(*given, **named)

    return call


def test_packed_weights_are_not_kept_as_those_of_a_file_that_came_meanwhile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each later startup would map weights of a file that is not there any more."""
    folder = tmp_path / "packed"
    folder.mkdir()
    options: dict[str, Any] = {**SIZES, "packed_cache": str(folder), "startup_image": "off"}
    with monkeypatch.context() as patched:
        patched.setattr(
            "plait.loading.build.shelf_of", before(lambda: replace_model(model), packed_cache.shelf_of)
        )
        with pytest.raises(BadFile, match="has been replaced"), LLM(str(model), **options) as llm:
            llm.keep_packed(LIMIT)
    assert not list(folder.iterdir())
    with LLM(str(model), **options) as llm:
        assert " written to " in llm.keep_packed(LIMIT)


def test_an_engine_from_an_image_loads_no_file_that_came_since(
    model: Path, tmp_path: Path, kernel_folder: Path
) -> None:
    """It loads the whole model when a request needs that, perhaps after days: over state of the old one."""
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(kernel_folder)
    options: dict[str, Any] = {**SIZES, "cache_dir": str(cache)}
    with LLM(str(model), **options) as llm:
        assert " written to " in llm.keep_image(LIMIT)
    started = start_image(str(model), EngineConfig(**options))
    assert started is not None
    with closing(started):
        replace_model(model)
        with pytest.raises(BadFile, match="since this engine was started"):
            started.runner.logits([1, 2, 3], 32)


def test_no_fingerprint_is_that_of_a_file_that_came_while_the_model_was_loaded(model: Path) -> None:
    """State on the disk is named by it: an engine of the new file would go on from state of the old one."""
    opened = open_model(str(model), EngineConfig(device="cpu"))
    assert digest_model(opened)
    replace_model(model)
    with pytest.raises(BadFile, match="has been replaced"):
        digest_model(opened)
