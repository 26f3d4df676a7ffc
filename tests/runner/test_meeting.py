"""The folder in which ranks meet, also after a process that was killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from plait.runner.ranks.meeting import LOCK, YOUNG_S, MeetingFolder, remove_abandoned


def test_a_group_removes_the_folders_that_killed_processes_have_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    live, killed, young = MeetingFolder(), MeetingFolder(), MeetingFolder()
    for folder in (killed, young):
        os.close(folder._lock)  # as the end of a process does
        folder._lock = -1
    for folder in (live, killed):
        before = folder.path.stat().st_mtime - YOUNG_S - 1
        os.utime(folder.path, (before, before))
    new = MeetingFolder()
    assert {*tmp_path.iterdir()} == {live.path, young.path, new.path}
    for folder in (live, new, young):
        folder.remove()
    assert not [*tmp_path.iterdir()]


def test_what_is_no_folder_of_this_user_stays_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where temporary files are, others may write: a link or a folder of theirs is not even opened."""
    kept, parent = tmp_path / "kept", tmp_path / "parent"
    theirs = parent / "plait-ranks-theirs"
    for folder in (kept, theirs):
        folder.mkdir(parents=True)
        (folder / LOCK).touch()
    (parent / "plait-ranks-link").symlink_to(kept)
    monkeypatch.setattr("plait.runner.ranks.meeting.YOUNG_S", -1.0)
    monkeypatch.setattr(os, "getuid", lambda: theirs.stat().st_uid + 1)
    remove_abandoned(parent)
    assert theirs.exists()
    monkeypatch.undo()
    monkeypatch.setattr("plait.runner.ranks.meeting.YOUNG_S", -1.0)
    remove_abandoned(parent)
    assert not theirs.exists()
    assert (parent / "plait-ranks-link").is_symlink()
    assert (kept / LOCK).exists()
