"""What `plait doctor` finds: GPUs and a compiler for them; on disks free space for caches, and the Hub's."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

from plait.bench.machine import find_version
from plait.cache_folder import nearest_folder
from plait.resource_limits import read_text

NVIDIA = Path("/proc/driver/nvidia/version")
DEVICES = Path("/dev")
ASK_S = 60.0  # for a process that imports torch and opens GPUs
ASK_TORCH = """
import json, torch
cuda = torch._C._cuda_getDriverVersion()
found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps([{
    "name": p.name, "driver": f"of CUDA {cuda // 1000}.{cuda % 1000 // 10}",
    "memory_mib": str(p.total_memory >> 20), "capability": f"{p.major}.{p.minor}",
} for p in found]))
"""
GPU_FIELDS = "name,driver_version,memory.total"
Gpu = dict[str, str]  # name and driver; where they are known, memory_mib and capability


def gpu_facts() -> list[Gpu]:
    """NVIDIA devices, as the driver's command reports them; where that is not installed, as torch does."""
    if (command := shutil.which("nvidia-smi")) is None:
        drivers = read_text(NVIDIA).splitlines()[:1]
        if not drivers and not [*DEVICES.glob("nvidia[0-9]*"), *DEVICES.glob("dxg")]:
            return []
        unknown = {"name": "an NVIDIA device", "driver": (drivers or ["unknown"])[0]}
        return _ask_torch() or [unknown]
    for query in (f"{GPU_FIELDS},compute_cap", GPU_FIELDS):  # drivers before 510 do not know the last field
        asked = [command, f"--query-gpu={query}", "--format=csv,noheader,nounits"]
        try:
            out = subprocess.run(asked, capture_output=True, text=True, timeout=10, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        names = ("name", "driver", "memory_mib", "capability")[: query.count(",") + 1]
        rows = [[part.strip() for part in line.split(",")] for line in out.splitlines()]
        return [dict(zip(names, row, strict=True)) for row in rows if len(row) == len(names)]
    return []


def _ask_torch() -> list[Gpu]:
    """What a process of its own finds: a driver that hangs holds nothing here."""
    try:
        asked = [sys.executable, "-c", ASK_TORCH]
        out = subprocess.run(asked, capture_output=True, text=True, timeout=ASK_S, check=True).stdout
        found: list[Gpu] = json.loads(out)
    except (OSError, subprocess.SubprocessError, ValueError):
        return []
    return found


def compiler_facts(gpus: Sequence[Gpu]) -> dict[str, str | None]:
    """What Triton compiles its launcher with, where there is a GPU: a C compiler, and Python's headers."""
    if not gpus:
        return {}
    scheme = sysconfig.get_default_scheme()
    scheme = "posix_prefix" if scheme == "posix_local" else scheme  # Debian's, without headers
    headers = Path(sysconfig.get_paths(scheme)["include"]) / "Python.h"
    command = os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")
    return {"command": command, "headers": str(headers) if headers.is_file() else None}


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
