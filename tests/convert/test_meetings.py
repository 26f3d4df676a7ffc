"""Conversions that meet others at the same place: nothing goes that was not there when they began."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from plait.convert.convert import Order, convert_model
from plait.errors import ConfigError

Put = Callable[[Path], None]


def convert(model: Path, out: Path, meanwhile: Put, **given: Any) -> None:
    """Convert a model; `meanwhile` is called once, while tensors are written."""
    calls = [meanwhile]

    def progress(*_: object) -> None:
        if calls:
            calls.pop()(out)

    convert_model(Order(str(model), out, threads=1, **given), progress)
    assert not calls


def put_folder(out: Path) -> None:
    out.mkdir()
    (out / "config.json").write_text("{}")


def put_file(out: Path) -> None:
    out.write_bytes(b"of another process")


@pytest.mark.parametrize(("name", "put"), [("made", put_folder), ("made.gguf", put_file)])
def test_what_another_process_made_meanwhile_is_not_replaced_without_force(
    nano_hybrid: Path, tmp_path: Path, name: str, put: Put
) -> None:
    out = tmp_path / name
    with pytest.raises(ConfigError, match="--force"):
        convert(nano_hybrid, out, put)
    assert (out.read_bytes() if out.is_file() else (out / "config.json").read_bytes()) in (
        b"of another process",
        b"{}",
    )
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_force_replaces_no_folder_that_has_become_more_than_a_model(
    nano_hybrid: Path, tmp_path: Path
) -> None:
    def put(out: Path) -> None:
        put_folder(out)
        (out / "notes.docx").write_text("a week of work")

    with pytest.raises(ConfigError, match=r"notes\.docx"):
        convert(nano_hybrid, tmp_path / "made", put, force=True)
    assert (tmp_path / "made" / "notes.docx").read_text() == "a week of work"


def test_force_replaces_what_another_conversion_made_meanwhile(nano_hybrid: Path, tmp_path: Path) -> None:
    convert(nano_hybrid, tmp_path / "made", put_folder, force=True)
    assert json.loads((tmp_path / "made" / "config.json").read_text())
    assert [path.name for path in tmp_path.iterdir()] == ["made"]
