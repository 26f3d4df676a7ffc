"""What a number was measured on."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import version
from pathlib import Path
from typing import Any

INTERESTING = (
    "avx2",
    "fma",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_int8",
    "amx_bf16",
    "asimddp",
    "sve",
)
CPUINFO, MEMINFO = Path("/proc/cpuinfo"), Path("/proc/meminfo")


def _field(path: Path, pattern: str) -> str:
    if not path.exists():
        return ""
    match = re.search(pattern, path.read_text(), re.MULTILINE)
    return match[1].strip() if match else ""


def _commit() -> str:
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def describe() -> dict[str, Any]:
    """CPU, memory and versions: enough to know which other numbers these can be held against."""
    flags = set(_field(CPUINFO, r"^(?:flags|Features)\s*:\s*(.*)$").split())
    kib = _field(MEMINFO, r"^MemTotal:\s*(\d+) kB$")
    return {
        "cpu": _field(CPUINFO, r"^model name\s*:\s*(.*)$") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "flags": [flag for flag in INTERESTING if flag in flags],
        "memory_gib": round(int(kib) / 2**20, 1) if kib else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "plait": version("plait"),
        "commit": _commit(),
    }


def slug(machine: dict[str, Any]) -> str:
    """A name for result files: 'amd-epyc-2-cores'."""
    cpu = re.sub(r"\(.*?\)|@.*| CPU| Processor", "", machine["cpu"])
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu} {machine['cores']} cores".lower()).strip("-")
