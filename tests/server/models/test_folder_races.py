"""Changes of the models' folder that meet. No test depends on time."""

from __future__ import annotations

import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from plait.checkpoint.find_files import Fetch, fetch_model
from plait.config import EngineConfig
from plait.errors import ModelNotFound
from plait.server.models import folder_changes
from plait.server.models.catalog import ModelEntry
from plait.server.models.folder_changes import FolderChanges
from tests.checkpoint.hub.fake_hub import FakeHub
from tests.patience import PATIENCE_S
from tests.server.models.test_folder_changes import folder, hub, hub_server

__all__ = ["folder", "hub", "hub_server"]  # fixtures


def test_a_fetch_that_ends_takes_nothing_from_another_of_the_same_repository(
    hub: FakeHub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_fetched, is_tidy = threading.Event(), threading.Event()

    def fetch(plan: Fetch) -> None:
        fetch_model(plan)
        if threading.current_thread() is second._thread:
            is_fetched.set()
            assert is_tidy.wait(PATIENCE_S)  # the other one has ended, and this one places its files
        else:
            assert is_fetched.wait(PATIENCE_S)

    monkeypatch.setattr(folder_changes, "fetch_model", fetch)
    changes = FolderChanges(folder, lambda name: False)
    second = changes.pull("org/m@main")
    first = changes.pull("org/m")
    assert first._done.wait(PATIENCE_S)
    is_tidy.set()
    assert second._done.wait(PATIENCE_S)
    assert (first.error, second.error) == (None, None)
    assert (folder / "org" / "m@main" / "model.safetensors").is_file()


def test_a_model_that_two_delete_is_gone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = folder / "two"
    made.mkdir()
    for number in range(2):
        (made / f"{number}.safetensors").write_bytes(b"weights")
    meet = threading.Barrier(2)
    plain = shutil.rmtree

    def rmtree(path: Path, *more: Any, **options: Any) -> None:
        """As the system's, but each of two that are in it at once removes a file that the other one knows."""
        names = sorted(one.name for one in path.iterdir())
        try:
            mine = meet.wait(0.5)
        except threading.BrokenBarrierError:  # the other one is not let in
            plain(path, *more, **options)
            return
        (path / names[mine]).unlink()
        meet.wait(PATIENCE_S)
        (path / names[1 - mine]).unlink()

    monkeypatch.setattr(folder_changes.shutil, "rmtree", rmtree)
    changes = FolderChanges(folder, lambda name: True)
    entry = ModelEntry(name="two", source=str(made), engine=EngineConfig(), folder=folder)
    with ThreadPoolExecutor(2) as pool:
        errors = [done.exception() for done in [pool.submit(changes.delete, entry) for _ in range(2)]]
    assert [type(error) for error in errors if error] == [ModelNotFound]
    assert not made.exists()
