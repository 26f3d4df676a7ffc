"""A disk of a few MiB, to be filled to its last block."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    (tmp_path / "disk").mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(tmp_path / "disk")]
    mount = shutil.which("mount")
    if mount is None or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("this user may not mount a small disk")
    yield tmp_path / "disk"
    subprocess.run(["umount", "--lazy", str(tmp_path / "disk")], check=True)


def fill_disk(disk: Path) -> Path:
    """Another program's file, which takes every free block."""
    path = disk / "ballast"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return path
