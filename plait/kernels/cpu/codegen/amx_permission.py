"""Whether this processor has AMX, and the system lets this process use it. Numba is not imported.

Linux gives a process the tiles only when it requests them. Without that the first instruction on a tile ends
the process. What is granted holds for all threads, those that exist already included, until the process ends.
"""

from __future__ import annotations

import ctypes
import platform

from llvmlite import binding

NEEDED = frozenset(
    {"amx-tile", "amx-bf16", "amx-int8", "avx512f", "avx512bw", "avx512vl", "avx512vnni"}
)  # what LLVM must find in a processor with kernels on tiles
ISAS = frozenset({"native", "amx"})  # values of --isa that leave AMX in
PERMISSION = (158, 0x1023, 18)  # arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), Linux on x86-64


def name_missing(features: frozenset[str]) -> str | None:
    """Why a machine with these features has no AMX, or None."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return "AMX is used on Linux and x86-64 only"
    if missing := NEEDED - features:
        return f"this processor has no {', '.join(sorted(missing))}"
    return None


def request() -> str | None:
    """Request the tiles for all threads of this process. Why the system refuses, or None."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(*PERMISSION) == 0:
        return None
    return f"the system does not allow it (arch_prctl: error {ctypes.get_errno()}); Linux does from 5.16 on"


def why_no_tiles(isa: str = "native") -> str | None:
    """Why a process with that --isa has no tiles, or None: then it has requested them, and may use them."""
    if isa not in ISAS:
        return f"kernels are compiled for {isa}"
    try:
        found = binding.get_host_cpu_features()
    except RuntimeError:  # on some systems of ARM
        return "the processor is not known"
    return name_missing(frozenset(name for name, has in found.items() if has)) or request()
