"""What a number was measured on, and how much else was running meanwhile."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from plait.bench.engines.child import descendants
from plait.resource_limits import read_text
from plait.version import __version__

INTERESTING = (
    *("avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16"),
    *("asimddp", "i8mm", "sve", "sve2"),
)
PROC = Path("/proc")
CPUINFO, MEMINFO, STAT = PROC / "cpuinfo", PROC / "meminfo", PROC / "stat"


def cores() -> int:
    """Logical CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def describe() -> dict[str, object]:
    """CPU, memory and versions: enough to know which other numbers these can be compared with."""
    flags = set(_field(CPUINFO, r"^(?:flags|Features)\s*:\s*(.*)$").split())
    kib = _field(MEMINFO, r"^MemTotal:\s*(\d+) kB$")
    return {
        "cpu": _field(CPUINFO, r"^model name\s*:\s*(.*)$") or platform.processor() or platform.machine(),
        "cores": cores(),
        "flags": [flag for flag in INTERESTING if flag in flags],
        "memory_gib": round(int(kib) / 2**20, 1) if kib else None,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": find_version("torch"),
        "numba": find_version("numba"),
        "plait": __version__,
        "commit": _commit(),
    }


def slug(machine: dict[str, Any]) -> str:
    """A name for result files: 'amd-epyc-2-cores'."""
    cpu = re.sub(r"\(.*?\)|@.*| CPU| Processor", "", machine["cpu"])
    return re.sub(r"[^a-z0-9]+", "-", f"{cpu} {machine['cores']} cores".lower()).strip("-")


class Foreign:
    """CPU time of other processes than these and their children, from here until `share` is called."""

    def __init__(self, own_pids: list[int]) -> None:
        self._pids = own_pids
        self._busy, self._total = _machine_ticks()
        self._own = _count_ticks(own_pids)

    def share(self) -> float | None:
        """Of all CPU time since, the part that was neither idle nor ours; None where it is not known."""
        busy, total = _machine_ticks()
        if total <= self._total:
            return None
        own = _count_ticks(self._pids) - self._own
        return round(max(busy - self._busy - own, 0) / (total - self._total), 2)


def _machine_ticks() -> tuple[int, int]:
    """(busy, all) clock ticks of all CPUs since boot."""
    numbers = [int(n) for n in read_text(STAT).partition("\n")[0].split()[1:9]]
    if len(numbers) < 5:
        return 0, 0
    return sum(numbers) - numbers[3] - numbers[4], sum(numbers)


def _count_ticks(pids: list[int]) -> int:
    """Clock ticks that processes and all below them have used; those that ended count with who waited."""
    every = {*pids, *(below for pid in pids for below in descendants(pid))}
    return sum(int(ticks) for pid in every for ticks in process_fields(pid)[11:15])


def process_fields(pid: int) -> list[str]:
    """The fields of /proc/PID/stat after the name, from the state on; none where it cannot be read."""
    return read_text(PROC / str(pid) / "stat").rpartition(")")[2].split()


def _field(path: Path, pattern: str) -> str:
    match = re.search(pattern, read_text(path), re.MULTILINE)
    return match[1].strip() if match else ""


def find_version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
