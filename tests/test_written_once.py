"""What tests of all workers share."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import written_once
from tests.written_once import copy_written, share_in


def test_a_folder_is_written_once_and_leaves_the_same_random_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(written_once, "_shared", [])
    share_in(tmp_path / "shared")
    written: list[Path] = []

    def write(folder: Path) -> None:
        written.append(folder)
        (folder / "numbers").write_text(str(torch.randn(3).tolist()))

    drawn = []
    for seed, place in ((1, "one"), (2, "other")):
        torch.manual_seed(seed)
        copy_written("key", tmp_path / place, write)
        drawn.append((torch.rand(()).item(), (tmp_path / place / "numbers").read_text()))
    assert drawn[0] == drawn[1]
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["numbers"]
    copy_written("another key", tmp_path / "third", write)
    assert len(written) == 2
