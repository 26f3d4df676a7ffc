"""Startups from an image that fail, and models that change under one: no thread stays, no wrong image."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from plait import LLM
from plait.config import EngineConfig
from plait.errors import ConfigError, OutOfMemory
from plait.loading.image import key as key_module
from plait.loading.image import start
from plait.loading.image.file_format import Image, read_image, write_image
from plait.loading.image.lookup import has_image
from plait.loading.image.start import find_image, load_image
from plait.loading.kernel_trials.verdicts import list_verdicts
from plait.loading.text_side import TextSource

SIZES = {"max_num_batched_tokens": 32, "max_num_seqs": 2, "max_model_len": 64, "threads": 2, "device": "cpu"}
LIMIT = 1 << 40


@pytest.fixture
def model(nano_hybrid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nano_hybrid, tmp_path / "model"))


@pytest.fixture
def config(tmp_path: Path, kernel_folder: Path) -> EngineConfig:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "kernels").symlink_to(kernel_folder)
    return EngineConfig(**SIZES, cache_dir=str(cache))


@pytest.fixture
def kept(model: Path, config: EngineConfig) -> Path:
    """The file of the model's image."""
    with LLM(str(model), **SIZES, cache_dir=config.cache_dir) as llm:
        assert "written to" in llm.keep_image(LIMIT)
    found = find_image(str(model), config)
    assert found is not None
    return found[0]


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    """Behind a startup that failed no thread of its kernels runs."""
    before = count_threads()
    yield
    assert count_threads() == before


def count_threads() -> int:
    return sum(thread.name.startswith("plait-cpu-") for thread in threading.enumerate())


def opened(path: Path) -> Image:
    image = read_image(path)
    assert image is not None
    return image


def fail(*_: object, **__: object) -> None:
    raise ConfigError("made up")


def no_memory(*_: object) -> None:
    raise MemoryError


@pytest.mark.usefixtures("kept")
def test_memory_that_is_not_there_is_named_with_its_limit(
    model: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(start, "HostStore", no_memory)
    monkeypatch.setattr(start, "address_space_limit", lambda: 5 << 20)
    with pytest.raises(OutOfMemory, match=r"they need \d+ MiB, and this process may have 5 MiB"):
        load_image(str(model), config)


def test_memory_of_an_unknown_kind_is_one_line(
    kept: Path, model: Path, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    image = opened(kept)
    regions = (replace(image.header.step.regions[0], kind="another"), *image.header.step.regions[1:])
    step = replace(image.header.step, regions=regions)
    write_image(kept, replace(image.header, step=step), [image.code], [image.constants])
    assert load_image(str(model), config) is None
    (line,) = caplog.messages
    assert "it has memory of an unknown kind, 'another'" in line


@pytest.mark.parametrize(("where", "what"), [(start, "make_engine"), (TextSource, "language")])
def test_what_fails_behind_the_step_is_raised(
    where: Any, what: str, kept: Path, model: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, what, fail)
    before = count_threads()
    with pytest.raises(ConfigError, match="made up") as caught:
        load_image(str(model), config)
    assert caught.value.__traceback__ is not None, "which would keep threads that are only dropped"
    assert count_threads() == before


def change(model: Path) -> None:
    os.utime(model / "model.safetensors", (1, 1))


def remove(model: Path) -> None:
    (model / "model.safetensors").unlink()


@pytest.mark.parametrize(
    ("harm", "why"),
    [(change, "the model's files changed since it was loaded"), (remove, "cannot be read: No such file")],
)
def test_a_model_that_changed_since_it_was_loaded_has_no_image(
    harm: Any, why: str, kept: Path, model: Path, config: EngineConfig
) -> None:
    """Its packed weights are of the old files, and the key would be of the new ones."""
    with LLM(str(model), **SIZES, cache_dir=config.cache_dir) as llm:
        harm(model)
        said = llm.keep_image(LIMIT)
    assert said.startswith("startup image: none is kept: ")
    assert why in said
    assert list(kept.parent.iterdir()) == [kept]


def test_packed_weights_that_are_kept_are_not_written_again(model: Path, config: EngineConfig) -> None:
    with LLM(str(model), **SIZES, cache_dir=config.cache_dir) as llm:
        assert "written to" in llm.keep_packed(LIMIT)
        (packed,) = (Path(str(config.cache_dir)) / "packed").iterdir()
        first = packed.stat()
        assert "written to" in llm.keep_image(LIMIT)
    assert (packed.stat().st_ino, packed.stat().st_mtime_ns) == (first.st_ino, first.st_mtime_ns)
    image = load_image(str(model), config)
    assert image is not None
    image.front.close()


def test_another_version_that_is_installed_meanwhile_is_not_that_of_this_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the process imported goes on: an image of the new modules is not its own."""
    (tmp_path / "one.py").write_text("first")
    monkeypatch.setattr(key_module, "PACKAGE", tmp_path)
    key_module._digest_code.cache_clear()
    try:
        first = key_module._digest_code()
        (tmp_path / "one.py").write_text("another version")
        assert key_module._digest_code() == first
    finally:
        key_module._digest_code.cache_clear()


def test_an_image_of_a_relative_path_has_its_texts_from_any_working_directory(
    model: Path, config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(model.parent)
    with LLM(model.name, **SIZES, cache_dir=config.cache_dir) as llm:
        assert "written to" in llm.keep_image(LIMIT)
    monkeypatch.chdir("/")
    image = load_image(str(model), config)
    assert image is not None
    assert image.front.tokenizer is not None
    assert image.front.chat_template is not None
    image.front.close()


def test_an_image_of_which_the_folder_of_texts_is_gone_is_not_used(
    model: Path, config: EngineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """Two folders may link to the same files, as revisions in the Hub's cache do: one image is for both."""
    first, second = model.parent / "first" / model.name, model.parent / "second" / model.name
    for folder in (first, second):
        folder.mkdir(parents=True)
        for file in model.iterdir():
            (folder / file.name).symlink_to(file)
    with LLM(str(first), **SIZES, cache_dir=config.cache_dir) as llm:
        assert "written to" in llm.keep_image(LIMIT)
    shutil.rmtree(first)
    assert load_image(str(second), config) is None
    assert "its texts were in" in caplog.messages[-1]


def test_a_folder_that_cannot_be_looked_at_has_no_image(model: Path, tmp_path: Path) -> None:
    """As one in a home that another user owns; here its name is too long, which the system says likewise."""
    folder = tmp_path / ("x" * 300)
    config = EngineConfig(**SIZES, cache_dir=str(folder))
    assert find_image(str(model), config) is None
    assert not has_image(str(model), config)
    assert load_image(str(model), config) is None
    assert [*list_verdicts(folder)] == []
