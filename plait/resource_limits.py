"""What this process may use of its machine: cores, CPU time, memory; exceptions that memory was short.

A container's limits are not those of the machine. They are in files of cgroup v1 or v2. The limit of
every group above the process's own holds too, so the tightest one counts.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
_NO_MEMORY = ("failed to map segment", "annot allocate memory", "annot create shared object descriptor")
NO_LIMIT = 1 << 60  # bytes; cgroup v1 writes "none" as the largest number of pages


def physical_cores(root: Path = ROOT) -> int:
    """Physical cores this process may run on: two threads of one core share its units and count once."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(usable_cpus())
    topology = root / "sys/devices/system/cpu"
    siblings = {read_text(topology / f"cpu{n}/topology/thread_siblings_list") or str(n) for n in allowed}
    return max(len(siblings), 1)


def usable_cpus() -> int:
    """Logical CPUs this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_quota(root: Path = ROOT) -> float | None:
    """CPU time that control groups allow, as a number of CPUs; None without a limit."""
    quotas = []
    for folder in _groups("cpu", root):
        v2, v1 = read_text(folder / "cpu.max"), (folder / "cpu.cfs_quota_us", folder / "cpu.cfs_period_us")
        found = re.fullmatch(r"(\d+) (\d+)", v2 or " ".join(map(read_text, v1)))
        if found and int(found[1]) and int(found[2]):
            quotas.append(int(found[1]) / int(found[2]))
    return min(quotas, default=None)


def default_threads(root: Path = ROOT) -> tuple[int, str]:
    """(how many threads compute unless a number is given, why): the physical cores, at most the quota's CPUs.

    A quota is rounded down: threads that share it in bursts wait for each other at every barrier.
    """
    cores, quota = physical_cores(root), cpu_quota(root)
    why = f"{cores} physical cores" if cores > 1 else "1 physical core"
    if quota is None:
        return cores, why
    return max(min(cores, int(quota)), 1), f"{why}, a CPU quota of {quota:.3g}"


def describe_crowding(threads: int, root: Path = ROOT) -> str | None:
    """Why so many threads are too many for this process's CPUs, or None: they are not."""
    count = f"{threads} thread{'s'[: threads != 1]}"
    if (cpus := usable_cpus()) < threads:
        return f"{count} on {cpus} CPU{'s'[: cpus != 1]}: they wait for each other"
    if (quota := cpu_quota(root)) is not None and quota < threads:
        return f"{count} share a CPU quota of {quota:.3g}: they are stopped in turns, and wait"
    return None


def memory_limit(root: Path = ROOT) -> int | None:
    """Bytes of memory that control groups allow; None without a limit."""
    return min((limit for limit, _ in _memory(root)), default=None)


def free_memory(root: Path = ROOT) -> int | None:
    """Bytes of memory that this process can still get; None where the system does not say.

    Page cache counts as free: the system drops it where memory is needed.
    """
    free = [max(limit - used, 0) for limit, used in _memory(root)]
    if (available := _meminfo("MemAvailable", root)) is not None:
        free.append(available)
    return min(free, default=None)


def total_memory(root: Path = ROOT) -> int | None:
    """Bytes of memory that this process could ever have; None where the system does not say."""
    known = (memory_limit(root), _meminfo("MemTotal", root))
    return min((nbytes for nbytes in known if nbytes is not None), default=None)


def process_memory(pid: int, root: Path = ROOT) -> int | None:
    """Bytes of memory that a process and its children hold, with files that are mapped and were read.

    None where the system does not say, as for a process that has ended.
    """
    resident = re.match(r"\d+ (\d+) ", read_text(root / f"proc/{pid}/statm"))
    if resident is None:
        return None
    threads = (root / f"proc/{pid}/task").glob("*/children")  # each lists what it started
    children = {int(child) for thread in threads for child in read_text(thread).split() if child.isdigit()}
    rest = (process_memory(child, root) for child in children)
    return int(resident[1]) * mmap.PAGESIZE + sum(nbytes or 0 for nbytes in rest)


def num_oom_kills(root: Path = ROOT) -> int | None:
    """Processes that were killed for memory, of this control group or the machine; None: not reported."""
    names = ("memory.events", "memory.oom_control")  # of versions 2 and 1
    files = (group / name for group in _groups("memory", root) for name in names)
    for file in (*files, root / "proc/vmstat"):
        if found := re.search(r"^oom_kill (\d+)$", read_text(file), re.MULTILINE):
            return int(found[1])
    return None


def is_free(nbytes: int) -> bool:
    """Whether the process may have so much more memory, as far as a limit on it (`ulimit -v`) says.

    Callers check first, because libraries in Rust and C++ end the process where an allocation fails.
    """
    if address_space_limit() is None:
        return True
    try:
        mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close()
    except (OSError, MemoryError):
        return False
    return True


def is_memory_error(error: BaseException) -> bool:
    """Whether an exception, or what led to it, says that memory could not be had.

    A library that cannot be mapped is an ImportError, and says so in the words of the system.
    """
    seen: BaseException | None = error
    for _ in range(16):  # causes may be many, and go in a circle
        if seen is None:
            return False
        text = str(seen)
        if isinstance(seen, MemoryError) or getattr(seen, "errno", None) == errno.ENOMEM:
            return True
        if isinstance(seen, ImportError | OSError) and any(words in text for words in _NO_MEMORY):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def out_of_memory_text(error: BaseException) -> str:
    """One line about a memory error: what was missing, the limit if there is one, what to do."""
    text = " ".join(str(error).split())[:160]
    what = "" if isinstance(error, MemoryError) else f" ({text})"
    limit = address_space_limit()
    if limit is None:
        return f"out of memory{what}; choose a smaller --max-model-len, --max-num-seqs or model"
    return (
        f"out of memory: this process may have {limit >> 20} MiB (ulimit -v){what}; raise the limit (an "
        "engine needs 2 GiB beside the model), or choose a smaller model"
    )


def address_space_limit() -> int | None:
    """Bytes that the process may map in all; None: no limit is set."""
    if sys.platform == "win32":
        return None
    import resource

    limit: int = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def trim_heap() -> None:
    """Give back to the system what was freed, where the C library can (glibc). Takes milliseconds.

    It gives back large blocks by itself, and keeps what is below a block that is still in use.
    """
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(ctypes.c_size_t(0))


def _meminfo(name: str, root: Path) -> int | None:
    found = re.search(rf"^{name}:\s*(\d+) kB$", read_text(root / "proc/meminfo"), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _memory(root: Path) -> Iterator[tuple[int, int]]:
    """(limit, bytes in use without page cache) of each control group that limits memory."""
    for folder in _groups("memory", root):
        # memory.high does not kill, but a process above it is slowed down until it is useless.
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = [int(text) for name in names if (text := read_text(folder / name)).isdigit()]
        if limits and min(limits) < NO_LIMIT:
            used = read_text(folder / "memory.current") or read_text(folder / "memory.usage_in_bytes")
            stat: dict[str, str] = dict(
                re.findall(r"^(\w+) (\d+)$", read_text(folder / "memory.stat"), re.MULTILINE)
            )
            # The plain names of v1 leave out the groups below, those of v2 count them.
            kept = [stat.get(f"total_{key}", stat.get(key, "0")) for key in ("active_file", "inactive_file")]
            cache = sum(map(int, kept))
            yield min(limits), max((int(used) if used.isdigit() else 0) - cache, 0)


def _groups(controller: str, root: Path) -> Iterator[Path]:
    """The folders of this process's control groups for a controller, each with those above it."""
    paths = {}
    for line in read_text(root / "proc/self/cgroup").splitlines():
        number, names, path = [*line.split(":", 2), "", ""][:3]
        if controller in names.split(",") or (number == "0" and not names):
            paths["cgroup" if names else "cgroup2"] = path
    for line in read_text(root / "proc/self/mountinfo").splitlines():
        mount, _, system = line.partition(" - ")
        fields, kind = mount.split(), [*system.split(), "", "", ""]
        if len(fields) < 5 or kind[0] not in paths:
            continue
        if kind[0] == "cgroup" and controller not in kind[2].split(","):
            continue
        inside, point = (re.sub(r"\\([0-7]{3})", lambda m: chr(int(m[1], 8)), f) for f in fields[3:5])
        top = root / point.lstrip("/")
        # The path counts from the hierarchy's root. Of a container, the mount is often only a part of it.
        below = os.path.relpath(paths[kind[0]] or "/", inside)
        parts = () if below.startswith("..") else Path(below).parts
        yield from (top.joinpath(*parts[:length]) for length in range(len(parts), -1, -1))


def read_text(path: Path) -> str:
    """A small file of the system; empty if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
