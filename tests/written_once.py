"""Folders that tests of all workers share: each is written once in a run, and copied where it is needed."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torch

_shared: list[Path] = []  # one at most
_RANDOM = (
    "random.state"  # of torch, as writing leaves it: numbers that a test draws next do not depend on turns
)


def share_in(folder: Path) -> None:
    """Keep what is written from now on there; workers of one run have one folder."""
    folder.mkdir(exist_ok=True)
    _shared[:] = [folder]


def copy_written(key: str, folder: Path, write: Callable[[Path], None]) -> None:
    """What `write` writes into a folder, for `key`, in `folder`; it may be written by another worker."""
    if not _shared:
        write(folder)
        return
    kept = _shared[-1] / sha256(key.encode()).hexdigest()[:32]
    if not kept.exists():
        own = Path(tempfile.mkdtemp(dir=_shared[-1]))
        own.chmod(0o755)
        write(own)
        (own / _RANDOM).write_bytes(torch.default_generator.get_state().numpy().tobytes())
        try:
            own.rename(kept)
        except OSError:  # another worker was first
            shutil.rmtree(own)
    shutil.copytree(
        kept,
        folder,
        dirs_exist_ok=True,
        copy_function=shutil.copyfile,
        ignore=shutil.ignore_patterns(_RANDOM),
    )
    state = torch.frombuffer(bytearray((kept / _RANDOM).read_bytes()), dtype=torch.uint8)
    torch.default_generator.set_state(state)
