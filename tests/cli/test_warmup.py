"""`plait warmup`: kernels are compiled and packed weights kept; both can be seen and removed."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest

from plait.checkpoint.packed_cache.file_format import list_packed
from plait.cli.main import run
from plait.loading import packed_cache

SIZES = ("--threads", "1", "--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--cpu")


@pytest.fixture(autouse=True)
def same_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """The code's key is fixed, because a developer may edit the code while a test runs."""
    monkeypatch.setattr(packed_cache, "hash_code", lambda parts: "this code")


def test_packed_weights_are_kept_used_shown_and_removed(
    nano_hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "packed"
    asked = ["warmup", str(nano_hybrid), *SIZES, "--packed-cache", str(folder)]
    assert run(asked) == 0
    assert "written to" in capsys.readouterr().out
    (kept,) = list_packed(folder)
    assert run(asked) == 0
    assert f"are kept in {kept.path}" in capsys.readouterr().out
    assert run(["info", str(nano_hybrid), "--ops", *SIZES, "--packed-cache", str(folder)]) == 0
    assert "mapped" in capsys.readouterr().out

    assert run(["list", "--cache-dir", str(tmp_path)]) == 0
    assert kept.model in capsys.readouterr().out
    assert run(["doctor", "--json", "--cache-dir", str(tmp_path)]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["packed"]["models"] == [kept.model]

    raw = bytearray(kept.path.read_bytes())
    raw[-64 * 20] ^= 1
    kept.path.write_bytes(raw)
    assert run(asked) == 0
    told = capsys.readouterr()
    assert ("were damaged" in told.err, "written to" in told.out) == (True, True)

    assert run(["warmup", "--clear", "--packed-cache", str(folder)]) == 0
    assert str(folder) in capsys.readouterr().out
    assert not list_packed(folder)


def test_packed_weights_can_be_left_out(
    nano_hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "packed"
    asked = ["warmup", str(nano_hybrid), *SIZES, "--packed-cache", str(folder)]
    assert run([*asked, "--no-packed"]) == 0
    assert "packed weights" not in capsys.readouterr().out
    assert not folder.exists()
    assert run([*asked, "--packed-limit", "1KiB"]) == 0
    assert "--packed-limit" in capsys.readouterr().out
    assert not list_packed(folder)


def test_a_folder_that_cannot_be_made_is_reported(
    nano_hybrid: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    folder = tmp_path / "file" / "packed"
    assert run(["warmup", str(nano_hybrid), *SIZES, "--packed-cache", str(folder)]) == 0
    told = capsys.readouterr()
    assert "cannot be made" in told.err
    assert "none are kept" in told.out


def test_it_promises_nothing_of_the_next_run_if_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warmup = import_module("plait.cli.warmup")
    why = "/cache cannot be written (Read-only file system)"
    llm = SimpleNamespace(unkept=why, close=lambda: None)
    monkeypatch.setattr(warmup, "load", lambda *_: llm)
    monkeypatch.setattr(warmup, "_run", lambda *_: None)
    assert run(["warmup", "m", "--no-packed"]) == 0
    assert capsys.readouterr().err == f"the next run compiles again: {why}\n"


def test_it_wants_a_model_or_something_to_clear(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["warmup"]) == 2
    assert "--clear" in capsys.readouterr().err
