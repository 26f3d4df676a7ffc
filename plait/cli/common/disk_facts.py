"""What `plait doctor` finds on disks: free space for caches, and the Hub's."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from plait.bench.machine import find_version
from plait.cache_folder import nearest_folder


def hub_facts() -> dict[str, object]:
    """The Hub's library and cache; a token is never shown, only whether there is one."""
    if find_spec("huggingface_hub") is None:
        return {"library": None, "folder": None, "repositories": 0, "free": None}
    from huggingface_hub import constants, get_token

    folder = Path(constants.HF_HUB_CACHE).expanduser()
    return {
        "library": find_version("huggingface-hub"),
        "folder": str(folder),
        "repositories": sum(1 for _ in folder.glob("models--*")) if os.path.isdir(folder) else 0,
        "free": free_bytes(folder),
        "offline": bool(constants.HF_HUB_OFFLINE),
        "logged_in": _has_token(get_token),
    }


def _has_token(get_token: Callable[[], str | None]) -> bool:
    """Whether there is a token that this user may read."""
    try:
        return get_token() is not None
    except OSError:
        return False


def is_writable(folder: Path) -> bool:
    return os.access(nearest_folder(folder), os.W_OK | os.X_OK)


def free_bytes(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(nearest_folder(folder)).free
    except OSError:
        return None
