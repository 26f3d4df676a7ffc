"""Packed weights on disk: the same bits as packed anew, never those of anything else."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from plait import LLM, SamplingParams
from plait.checkpoint.packed_cache.cache import Shelf
from plait.checkpoint.packed_cache.file_format import list_packed
from plait.errors import BadFile, ConfigError
from plait.loading import packed_cache

GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
PROMPT = "And it came to pass"
LIMIT = 1 << 40


@pytest.fixture(autouse=True)
def same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code's key is fixed, because a developer may edit the code while a test runs."""
    monkeypatch.setattr(packed_cache, "hash_code", lambda parts: "this code")


@pytest.fixture
def model(nano_hybrid: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(nano_hybrid, tmp_path / "model"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "packed"
    made.mkdir()
    return made


@contextmanager
def loaded(model: Path, folder: Path | str, **options: Any) -> Iterator[LLM]:
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 4, "threads": 1, "startup_image": "off"}
    with LLM(str(model), device="cpu", packed_cache=str(folder), **(sizes | options)) as llm:
        yield llm


def mapped_maps(llm: LLM) -> int:
    shelf = llm._loaded.target.shelf
    return shelf.num_found if shelf else 0


def keep(model: Path, folder: Path, **options: Any) -> str:
    with loaded(model, folder, **options) as llm:
        return llm.keep_packed(LIMIT)


def is_used(model: Path, folder: Path, **options: Any) -> bool:
    with loaded(model, folder, **options) as llm:
        return mapped_maps(llm) > 0


@pytest.mark.parametrize("quantize", [None, "q8_0", "q4_k"])
def test_mapped_weights_give_the_same_bits_as_packed_ones(
    model: Path, folder: Path, quantize: str | None
) -> None:
    with loaded(model, folder, quantize=quantize) as llm:
        want, text = llm.logits(PROMPT), llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids
        kinds = sorted(llm._loaded.target.encoded.items())
        tiles = {name: _tiles(linear) for name, (linear, *_) in noted(llm).items()}
        assert mapped_maps(llm) == 0
        assert " written to " in llm.keep_packed(LIMIT)
    with loaded(model, folder, quantize=quantize) as llm:
        assert mapped_maps(llm) == len(tiles) > 10
        assert sorted(llm._loaded.target.encoded.items()) == kinds
        assert torch.equal(llm.logits(PROMPT), want)
        assert llm.generate(PROMPT, GREEDY)[0].outputs[0].token_ids == text
        shelf = llm._loaded.target.shelf
        assert shelf is not None
        for name, parts in tiles.items():
            for (kept, _), (data, order) in zip(_found(shelf, name), parts, strict=True):
                assert kept.tiles.data_ptr() % 64 == 0
                assert torch.equal(kept.tiles, data)
                assert (kept.order is None) == (order is None)


def noted(llm: LLM) -> dict[str, Any]:
    shelf = llm._loaded.target.shelf
    assert shelf is not None
    return shelf._noted


def _tiles(linear: Any) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
    return [(packed.data.clone(), packed.order) for packed, *_ in linear.parts]


def _found(shelf: Shelf, name: str) -> list[Any]:
    entry = shelf._maps[name]
    return shelf.find(name, entry["in"], entry["out"]) or []


def test_what_is_mapped_is_not_read_from_the_model(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep(model, folder)
    read = list[str]()
    with loaded(model, folder) as llm:
        checkpoint = type(llm._loaded.opened.checkpoint)
    real = checkpoint.read
    monkeypatch.setattr(checkpoint, "read", lambda self, name: read.append(name) or real(self, name))
    with loaded(model, folder) as llm:
        assert mapped_maps(llm) > 10
    assert read
    assert not [name for name in read if "proj" in name and name.endswith("weight")]


def test_the_table_of_ops_says_whether_weights_were_mapped(model: Path, folder: Path) -> None:
    def row() -> Any:
        with loaded(model, folder) as llm:
            return next(b for b in llm._loaded.target.bound if b.op == "weights")

    assert row().variant == "packed while loading"
    keep(model, folder)
    assert (row().variant, row().user) == ("mapped", str(list_packed(folder)[0].path))


@pytest.mark.parametrize("change", [{"quantize": "q8_0"}, {"precise": True}, {"a_source": "saved"}])
def test_other_options_find_other_weights(model: Path, folder: Path, change: dict[str, Any]) -> None:
    keep(model, folder)
    assert not is_used(model, folder, **change)


def test_options_that_change_no_weight_find_the_same(model: Path, folder: Path) -> None:
    keep(model, folder)
    assert is_used(model, folder, threads=2, max_num_seqs=2, kv_dtype="float32", max_model_len=64)
    assert not is_used(model, "off")


def _touch(model: Path) -> None:
    path = next(model.glob("*.safetensors"))
    os.utime(path, ns=(1, path.stat().st_mtime_ns + 1))


def _rewrite(model: Path) -> None:
    """A byte in the middle of the last piece, without a trace in size and time."""
    path = next(model.glob("*.safetensors"))
    status, raw = path.stat(), bytearray(path.read_bytes())
    raw[-100] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _config(model: Path) -> None:
    path = model / "config.json"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize("change", [_touch, _rewrite, _config])
def test_weights_of_files_that_changed_are_not_used(model: Path, folder: Path, change: Any) -> None:
    keep(model, folder)
    change(model)
    assert not is_used(model, folder)
    keep(model, folder)
    assert is_used(model, folder)
    assert len(list_packed(folder)) == (2 if change is _config else 1)  # what no run can use any more is gone


def test_a_copy_of_the_model_that_keeps_its_times_is_the_same_model(
    model: Path, folder: Path, tmp_path: Path
) -> None:
    keep(model, folder)
    assert is_used(Path(shutil.copytree(model, tmp_path / "elsewhere" / "model")), folder)


def test_damaged_ones_that_cannot_be_removed_are_an_error(folder: Path) -> None:
    shelf = SimpleNamespace(is_full=True, is_sound=lambda: False, path=folder)
    llm: Any = SimpleNamespace(_loaded=SimpleNamespace(target=SimpleNamespace(shelf=shelf, drafts=None)))
    with pytest.raises(BadFile, match="damaged and cannot be removed"):
        LLM.drop_damaged(llm)


@pytest.mark.parametrize("part", ["code", "torch", "target"])
def test_weights_that_other_code_packed_are_not_used(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    keep(model, folder)
    if part == "code":
        monkeypatch.setattr(packed_cache, "hash_code", lambda parts: "another")
    elif part == "torch":
        monkeypatch.setattr(packed_cache, "torch", SimpleNamespace(__version__="99"))
    else:
        room = SimpleNamespace(room_name="another-room")
        monkeypatch.setattr(packed_cache, "describe_target", lambda **_: room)
    assert not is_used(model, folder)
    keep(model, folder)
    assert len(list_packed(folder)) == 1


def test_machines_of_two_kinds_can_share_a_folder(
    model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for processor in ("one", "two", "one"):
        room = SimpleNamespace(room_name=f"{processor}-0123")
        monkeypatch.setattr(packed_cache, "describe_target", lambda room=room, **_: room)
        keep(model, folder)
        assert is_used(model, folder)
    assert len(list_packed(folder)) == 2


def test_a_folder_that_was_named_and_is_not_there_is_reported(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "plait"):
        assert not is_used(model, tmp_path / "none")
    assert [r for r in caplog.records if f"{tmp_path / 'none'} is no folder" in r.getMessage()]
    with pytest.raises(ConfigError, match="packed_cache"):
        LLM(str(model), packed_cache="")


def test_packed_weights_are_no_more_public_than_the_model(model: Path, folder: Path) -> None:
    for mode in (0o600, 0o644):
        for path in model.glob("*.safetensors"):
            path.chmod(mode)
            _touch(model)
        before = os.umask(0o022)
        try:
            keep(model, folder)
        finally:
            os.umask(before)
        assert list_packed(folder)[0].path.stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("at", [10, 100, None])
def test_a_damaged_file_is_left_aside_with_one_line(
    model: Path, folder: Path, at: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    keep(model, folder)
    path = list_packed(folder)[0].path
    raw = bytearray(path.read_bytes())
    if at is None:
        del raw[-1:]
    else:
        raw[at] ^= 1
    path.write_bytes(raw)
    with caplog.at_level(logging.WARNING, "plait"), loaded(model, folder) as llm:
        assert mapped_maps(llm) == 0
        assert llm.generate(PROMPT, GREEDY)[0].finished
        lines = [r.getMessage() for r in caplog.records if "packed weights" in r.getMessage()]
        assert len(lines) == 1
        assert str(path) in lines[0]
        llm.keep_packed(LIMIT)
    assert is_used(model, folder)


def test_damaged_tiles_are_found_when_they_are_checked(model: Path, folder: Path) -> None:
    keep(model, folder)
    path = list_packed(folder)[0].path
    with loaded(model, folder) as llm:
        assert not llm.drop_damaged()
        assert llm.keep_packed(LIMIT).endswith(f"are kept in {path}")
    raw = bytearray(path.read_bytes())
    raw[-64 * 20] ^= 1
    path.write_bytes(raw)
    with loaded(model, folder) as llm:
        assert llm.drop_damaged()
    assert not list_packed(folder)


def test_startup_writes_nothing(model: Path, folder: Path, tmp_path: Path) -> None:
    assert not is_used(model, folder)
    assert not list(folder.iterdir())
    assert not is_used(model, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    keep(model, folder)
    before = [(p, p.stat().st_mtime_ns) for p in folder.iterdir()]
    assert is_used(model, folder)
    assert [(p, p.stat().st_mtime_ns) for p in folder.iterdir()] == before


def test_what_does_not_fit_is_not_written(model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with loaded(model, folder) as llm:
        assert "--packed-limit" in llm.keep_packed(1000)
        assert not list(folder.iterdir())
        with monkeypatch.context() as full:
            full.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
            assert "must stay free" in llm.keep_packed(LIMIT)
        assert not list(folder.iterdir())
        folder.rmdir()
        assert "cannot be written" in llm.keep_packed(LIMIT)


def test_files_that_change_while_they_are_read_are_not_kept(model: Path, folder: Path) -> None:
    with loaded(model, folder) as llm:
        _touch(model)
        assert "changed" in llm.keep_packed(LIMIT)
    assert not list(folder.iterdir())


def test_where_nothing_is_packed_nothing_is_kept(model: Path, folder: Path) -> None:
    assert "none are kept" in keep(model, folder, ops="reference")
    assert not list(folder.iterdir())


def test_every_option_is_known_to_matter_or_not() -> None:
    """A new option is in the key until `APART` lists it as one that changes nothing."""
    from plait.config import EngineConfig, option_names

    assert set(option_names(EngineConfig)) >= packed_cache.APART
    matter = set(option_names(EngineConfig)) - packed_cache.APART
    assert matter >= {"device", "dtype", "ops", "quantize", "precise", "isa", "set", "ssm_mode", "a_source"}
    with pytest.raises(ConfigError):
        LLM("x", packed_weights="on")
