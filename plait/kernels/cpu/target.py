"""Which instructions kernels are compiled for, and where compiled kernels are kept.

`aim` must run before any kernel module is imported: a process compiles for one target only.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
import tempfile
from functools import cache
from pathlib import Path

import llvmlite
import numba
from llvmlite import binding
from numba import config

from plait.errors import ConfigError

SHARED = (
    "vec.py",
    "plain_x86.py",
    "frame.py",
    "kernel.py",
    "target.py",
    "maths.py",
)  # all that kernels of other files may call
# What LLVM may use under each name; "native": all that this machine has.
TARGETS = {
    "native": "",
    "amx": "sapphirerapids",
    "avx512": "skylake-avx512",
    "avx2": "haswell",
    "generic": "x86-64",
}
NEEDED = {
    "amx": {"amx-tile", "amx-bf16", "amx-int8", "avx512f", "avx512bw", "avx512vl", "avx512vnni"},
    "avx512": {"avx512f", "avx512bw", "avx512vl"},
    "avx2": {"avx2", "fma"},
}

PERMISSION = (158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), Linux on x86-64


@cache
def host_features() -> frozenset[str]:
    return frozenset(name for name, has in binding.get_host_cpu_features().items() if has)


def _dot() -> str:
    """How four products of bytes are added: "vnni", "avx2" or "generic"."""
    name = config.CPU_NAME or ""
    if not name:
        features = host_features()
        if {"avx512vnni", "avx512bw", "avx512vl"} <= features:
            return "vnni"
        return "avx2" if "avx2" in features else "generic"
    if name == TARGETS["amx"]:
        return "vnni"
    return "avx2" if name in (TARGETS["avx512"], TARGETS["avx2"]) else "generic"


DOT = _dot()


def name() -> str:
    """The target of this process, for `plait info --ops` and the cache's folder."""
    return f"{config.CPU_NAME or binding.get_host_cpu_name()}-{DOT}"


def aim(isa: str) -> None:
    """Compile for `isa` (a key of TARGETS) from now on.

    Raises ConfigError for an unknown name, for one this machine cannot run, or if kernels were already made
    for another one.
    """
    if isa not in TARGETS:
        raise ConfigError(f"isa: {isa!r} is not one of {', '.join(TARGETS)}")
    cpu = TARGETS[isa]
    if cpu and platform.machine().lower() not in ("x86_64", "amd64"):
        raise ConfigError(f"isa: {isa} is for x86-64; this machine is {platform.machine()}: use native")
    if missing := NEEDED.get(isa, set()) - host_features():
        raise ConfigError(f"isa: this machine has no {', '.join(sorted(missing))}, which {isa} needs")
    if cpu == (config.CPU_NAME or ""):
        return
    if "plait.kernels.cpu.vec" in sys.modules:
        raise ConfigError(f"isa: kernels of this process are made for {name()}; start another one for {isa}")
    config.CPU_NAME, config.CPU_FEATURES = cpu or None, "" if cpu else None
    globals()["DOT"] = _dot()


def no_amx() -> str | None:
    """Why kernels here are made without AMX, or None: the processor, `aim`, and whether the system allows it.

    The system is asked for all threads of this process.
    """
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "AMX is used on Linux and x86-64 only"
    if missing := NEEDED["amx"] - host_features():
        return f"this processor has no {', '.join(sorted(missing))}"
    cpu = config.CPU_NAME or TARGETS["amx"]
    if cpu != TARGETS["amx"]:
        return f"kernels are compiled for {cpu}"
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*PERMISSION) == 0:
        return None
    return f"the system does not allow it (arch_prctl: error {ctypes.get_errno()}); Linux does from 5.16 on"


def keep_in(folder: Path | None) -> Path:
    """Keep compiled kernels under `folder` (default: the user's cache), in a room of this exact version.

    A change of what all kernels share, of Numba, of LLVM or of the target gets a new room, and Numba itself
    watches the file a kernel is written in: nothing stale is ever loaded. A folder that cannot
    be written is replaced by a temporary one, and kernels are compiled again.
    """
    room = room_in(folder)
    try:
        room.mkdir(parents=True, exist_ok=True)
        probe = room / ".writable"
        probe.touch()
    except OSError:
        room = Path(tempfile.mkdtemp(prefix="plait-kernels-"))
    config.CACHE_DIR = str(room)
    return room


def room_in(folder: Path | None) -> Path:
    """Where kernels of this exact version and target are kept under `folder`; nothing is made."""
    base = folder or Path.home() / ".cache" / "plait"
    return base / "kernels" / f"{name()}-{_fingerprint()}"


@cache
def _fingerprint() -> str:
    digest = hashlib.sha256(f"{numba.__version__} {llvmlite.__version__} {sys.version}".encode())
    for source in SHARED:
        digest.update((Path(__file__).parent / source).read_bytes())
    return digest.hexdigest()[:16]
