from __future__ import annotations

from pathlib import Path

import pytest

from plait.worker import oom


@pytest.mark.parametrize(
    ("groups", "file", "text"),
    [
        ("0::/a/b\n", "a/b/memory.events", "oom 9\noom_kill 3\noom_group_kill 0\n"),
        ("0::/of/the/host\n", "memory.events", "oom 9\noom_kill 3\n"),
        ("4:cpu,memory:/a\n0::/\n", "memory/a/memory.oom_control", "under_oom 0\noom_kill 3\n"),
    ],
)
def test_kills_for_memory_are_read_from_either_version_of_control_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: str, file: str, text: str
) -> None:
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "self" / "cgroup").write_text(groups)
    monkeypatch.setattr(oom, "PROC", tmp_path / "proc")
    monkeypatch.setattr(oom, "GROUPS", tmp_path)
    assert oom.num_killed() is None
    (tmp_path / "proc" / "vmstat").write_text("pgfault 12\noom_kill 7\n")
    assert oom.num_killed() == 7
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(text)
    assert oom.num_killed() == 3


def test_the_memory_of_children_is_a_number_of_bytes() -> None:
    assert 0 <= oom.peak_of_children() < 1 << 50
