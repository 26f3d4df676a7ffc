"""The names of models: those of the operator, and those of a folder, into which anything may be put."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from plait.config import EngineConfig
from plait.errors import BadFile, ConfigError, ModelNotFound
from plait.server.models.catalog import LOOK_EVERY_S, ModelCatalog, ModelEntry, scan_folder

ENGINE = EngineConfig()
TEMPLATE = ModelEntry(name="", source="", engine=ENGINE)


def put(path: Path, text: str = "x") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    models = tmp_path / "models"
    put(models / "tiny" / "model.safetensors")
    put(models / "tiny" / "config.json", "{}")
    put(models / "org" / "name" / "model.safetensors")
    put(models / "q4.gguf")
    put(models / "big-00001-of-00002.gguf")
    put(models / "big-00002-of-00002.gguf")
    put(models / ".hidden" / "model.safetensors")
    put(models / "no-model" / "notes.txt")
    put(models / "a b" / "model.safetensors")  # no name that a client could send
    return models


def catalog(folder: Path, *named: ModelEntry) -> ModelCatalog:
    return ModelCatalog(named, str(folder), TEMPLATE, clock=iter(range(0, 10**6, 10)).__next__)


def names(folder: Path) -> list[str]:
    return [entry.name for entry in catalog(folder).entries]


def test_folders_files_and_folders_of_folders_are_models(folder: Path) -> None:
    assert dict(scan_folder(folder)) == {
        "big": folder / "big-00001-of-00002.gguf",
        "org/name": folder / "org" / "name",
        "q4": folder / "q4.gguf",
        "tiny": folder / "tiny",
    }
    found = catalog(folder)
    assert found.find(None).name == "big"
    assert found.find("org/name").source == str(folder / "org" / "name")


@pytest.mark.parametrize("where", ["folder", "weights", "text", "inner", "part", "file"])
def test_a_link_that_leads_out_of_the_folder_leaves_its_model_out(folder: Path, where: str) -> None:
    outside = put(folder.parent / "secret" / "model.safetensors")
    if where == "folder":
        (folder / "bad").symlink_to(outside.parent)
    elif where == "weights":
        put(folder / "bad" / "config.json")
        (folder / "bad" / "model.safetensors").symlink_to(outside)
    elif where == "text":
        put(folder / "bad" / "model.safetensors")
        (folder / "bad" / "tokenizer.json").symlink_to("/etc/passwd")
    elif where == "inner":
        put(folder / "bad" / "model.safetensors")
        (folder / "bad" / "templates").symlink_to("/etc")
    elif where == "part":
        put(folder / "bad-00001-of-00002.gguf")
        (folder / "bad-00002-of-00002.gguf").symlink_to(outside)
    else:
        (folder / "bad.gguf").symlink_to(outside)
    assert names(folder) == ["big", "org/name", "q4", "tiny"]


def test_a_link_inside_of_the_folder_is_followed_until_it_leads_elsewhere(folder: Path) -> None:
    (folder / "also").symlink_to(folder / "tiny")
    entry = catalog(folder).find("also")
    entry.check_contained()
    (folder / "also").unlink()
    (folder / "also").symlink_to("/etc")
    with pytest.raises(BadFile, match="leads out"):
        entry.check_contained()
    (folder / "also").unlink()
    with pytest.raises(BadFile, match="no longer"):
        entry.check_contained()


def test_a_pipe_is_no_model(folder: Path) -> None:
    os.mkfifo(folder / "pipe.gguf")
    assert "pipe" not in names(folder)


def test_models_that_no_client_can_name_are_left_out_with_one_line(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkdir(os.fsencode(folder) + b"/caf\xe9")
    (folder / os.fsdecode(b"caf\xe9") / "model.safetensors").write_text("x")
    (folder / os.fsdecode(b"\xff\n.gguf")).write_text("x")
    put(folder / "q4" / "model.safetensors")  # the folder comes before the file of that name
    put(folder / "big" / "notes.txt")  # no model, so no line
    mine = ModelEntry(name="tiny", source="elsewhere", engine=ENGINE)
    found = catalog(folder, mine)
    assert [entry.name for entry in found.entries] == ["tiny", "big", "org/name", "q4"]
    assert found.find("q4").source == str(folder / "q4")
    rule = "no client can send this name; a name has up to 200 letters"
    lines = sorted(record.getMessage() for record in caplog.records)
    assert [line.partition(" is left out: ")[0] for line in lines] == [
        r"models_dir: '\udcff\n'",
        "models_dir: 'a b'",
        r"models_dir: 'caf\udce9'",
        "models_dir: q4.gguf",
        "models_dir: tiny",
    ]
    assert sum(rule in line for line in lines) == 3
    assert lines[3].endswith("'q4' is the model 'q4' already")
    found.refresh()
    assert len(caplog.records) == len(lines)  # once each
    (folder / "a b" / "model.safetensors").unlink()
    found.refresh()
    put(folder / "a b" / "model.safetensors")
    found.refresh()
    assert len(caplog.records) == len(lines) + 1  # it came anew


def test_files_that_are_replaced_or_grow_have_another_stamp(folder: Path) -> None:
    found = catalog(folder)
    first = found.find("q4").stamp
    found.refresh()
    assert found.find("q4").stamp == first
    with (folder / "q4.gguf").open("a") as file:
        file.write("more")
    found.refresh()
    grown = found.find("q4").stamp
    old = (folder / "q4.gguf").stat()
    put(folder / "new", "xmore")
    os.utime(folder / "new", ns=(old.st_mtime_ns, old.st_mtime_ns))
    os.rename(folder / "new", folder / "q4.gguf")
    found.refresh()
    assert len({first, grown, found.find("q4").stamp}) == 3


def test_models_come_and_go_and_the_folder_is_not_read_for_every_request(folder: Path) -> None:
    now = [0.0]
    found = ModelCatalog([], str(folder), TEMPLATE, clock=lambda: now[0])
    put(folder / "new" / "model.safetensors")
    assert not found.refresh()
    with pytest.raises(ModelNotFound):
        found.find("new")
    now[0] += LOOK_EVERY_S
    assert found.refresh()
    assert found.find("new:latest").name == "new"
    (folder / "new" / "model.safetensors").unlink()
    now[0] += LOOK_EVERY_S
    found.refresh()
    with pytest.raises(ModelNotFound):
        found.find("new")


def test_an_operators_name_goes_before_one_of_the_folder_and_no_two_are_the_same(folder: Path) -> None:
    mine = ModelEntry(name="tiny", source="elsewhere", engine=ENGINE, aliases=("q4",))
    found = catalog(folder, mine)
    assert found.find("tiny").source == found.find("q4").source == "elsewhere"
    assert [entry.name for entry in found.entries] == ["tiny", "big", "org/name"]
    with pytest.raises(ConfigError, match="'tiny'"):
        catalog(folder, mine, mine)
    with pytest.raises(ConfigError, match="not a folder"):
        catalog(folder / "q4.gguf")
