"""The folder in which ranks meet, also after a process that was killed."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from plait.runner.ranks.meeting import YOUNG_S, MeetingFolder


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
