"""Which instructions kernels are compiled for, and where compiled kernels are kept.

`aim` must run before any kernel module is imported: a process compiles for one target only.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import sys
from functools import cache
from pathlib import Path
from typing import Any

import llvmlite
import numba
from llvmlite import binding

from plait.cache_folder import cache_base
from plait.errors import ConfigError
from plait.kernels.cpu.codegen import amx_permission
from plait.kernels.cpu.codegen.kernel_folder import KernelFiles, Spare, sweep_daily
from plait.kernels.cpu.codegen.levels import LEVELS, Level

config: Any = numba.config  # its names are made when it is imported

ROOT = Path(__file__).resolve().parents[1]  # plait/kernels/cpu
SHARED = (
    "codegen/vec.py",
    "codegen/plain_x86.py",
    "codegen/byte_dot.py",
    "runtime/frame.py",
    "runtime/frame_words.py",
    "codegen/kernel.py",
    "codegen/kernel_cache.py",
    "codegen/target.py",
    "codegen/maths.py",
    "attention/codes.py",
    "attention/indexer.py",
    "attention/paged_rows.py",
    "moe/experts.py",
    "pointwise/activation.py",
    "pointwise/copy_rows.py",
    "pointwise/norm.py",
    "ssm/gated_norm.py",
    "ssm/rounding.py",
)  # all that kernels of other files may call
# What LLVM may use under each name; "native": all that this machine has.
TARGETS = {
    "native": "",
    "amx": "sapphirerapids",
    "avx512": "skylake-avx512",
    "avx-vnni": "alderlake",
    "avx2": "haswell",
    "generic": "x86-64",
}
NEEDED = {
    "amx": amx_permission.NEEDED,
    "avx512": {"avx512f", "avx512bw", "avx512vl"},
    "avx-vnni": {"avx2", "fma", "avxvnni"},
    "avx2": {"avx2", "fma"},
}

X86_64 = platform.machine().lower() in ("x86_64", "amd64")
AARCH64 = platform.machine().lower() in ("aarch64", "arm64")
# Where aarch64 says whether it multiplies bytes by fours: Linux (word of the auxiliary vector, bit), macOS
# (sysctl), Windows (number for IsProcessorFeaturePresent; it has none for i8mm that older versions know).
ARM_BITS = {"dotprod": (16, 1 << 20), "i8mm": (26, 1 << 13)}
ARM_NAMES = {"dotprod": b"hw.optional.arm.FEAT_DotProd", "i8mm": b"hw.optional.arm.FEAT_I8MM"}
ARM_NUMBERS = {"dotprod": 43}

_kept: list[KernelFiles] = []  # of `keep_in`: one at most
_level: list[Level] = []  # that kernels are compiled for: one at most


def kernel_features() -> frozenset[str]:
    """What kernels may use where no processor is named: what their level has, or all that this one has."""
    return _level[0].features if _level else host_features()


@cache
def host_features() -> frozenset[str]:
    """What LLVM finds in this processor; on some systems of ARM it finds nothing, or cannot look."""
    try:
        found = binding.get_host_cpu_features()
    except RuntimeError:
        return arm_features()
    return frozenset(name for name, has in found.items() if has) | arm_features()


@cache
def arm_features() -> frozenset[str]:
    """Of "dotprod" and "i8mm", what the system says an aarch64 processor has: LLVM does not always ask."""
    if not AARCH64:
        return frozenset()
    match platform.system():
        case "Linux":
            ask = ctypes.CDLL(None).getauxval
            ask.restype, ask.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
            return frozenset(name for name, (word, bit) in ARM_BITS.items() if ask(word) & bit)
        case "Darwin":
            return frozenset(name for name, asked in ARM_NAMES.items() if _sysctl(asked))
        case "Windows":
            present = ctypes.CDLL("kernel32").IsProcessorFeaturePresent
            return frozenset(name for name, number in ARM_NUMBERS.items() if present(number))
    return frozenset()


def _sysctl(name: bytes) -> bool:
    """Whether macOS says 1 to that name; what it does not know is 0."""
    value, size = ctypes.c_int(0), ctypes.c_size_t(4)
    found = ctypes.CDLL(None).sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0)
    return bool(found == 0 and value.value == 1)


def _native_features() -> str | None:
    """The processor features that Numba is given: none, or on aarch64 also what LLVM may not have found."""
    if not arm_features():
        return None
    return ",".join(f"+{name}" for name in sorted(host_features()))


def _arm_dot() -> str:
    """ "neon-i8mm", "neon-dotprod" or "neon", by the features that Numba is given."""
    told = (config.CPU_FEATURES or "").split(",")
    return next((f"neon-{name}" for name in ("i8mm", "dotprod") if f"+{name}" in told), "neon")


def _dot() -> str:
    """How four products of bytes are added: "vnni" or "avx-vnni" (in registers of 512 or 256 bits), "avx2",
    as `_arm_dot` says, or "generic".
    """
    if AARCH64:
        return _arm_dot()
    name = read_cpu_name()
    if not name:
        features = kernel_features()
        if {"avx512vnni", "avx512bw", "avx512vl"} <= features:
            return "vnni"
        narrow = "avxvnni" in features and "avx512f" not in features
        return "avx-vnni" if narrow else "avx2" if "avx2" in features else "generic"
    if name == TARGETS["amx"]:
        return "vnni"
    if name == TARGETS["avx-vnni"]:
        return "avx-vnni"
    return "avx2" if name in (TARGETS["avx512"], TARGETS["avx2"]) else "generic"


def read_cpu_name() -> str:
    """The processor that kernels are compiled for by name; "": this one, or its level."""
    return "" if _level else config.CPU_NAME or ""


def wide_registers() -> bool:
    """Whether a vector of sixteen floats is one register, of which there are 32; else it is two, or four."""
    name = read_cpu_name()
    return name in (TARGETS["amx"], TARGETS["avx512"]) or (not name and "avx512f" in kernel_features())


def adds_bf16() -> bool:
    """Whether kernels use AVX512_BF16: where it is, and is faster than what stands for it.

    AMD's cores add 64 products a cycle with it. Intel's add 16 (measured on Emerald Rapids, where AMX is
    there for this), and 32 with float32 multiply-adds. A process that compiles for a named target is Intel's.
    """
    if read_cpu_name() or not {"avx512bf16", "avx512bw"} <= kernel_features():
        return False
    return bool(_level) or str(binding.get_host_cpu_name()).startswith("znver")


def one_stream() -> bool:
    """Whether one row reads weights from the first byte to the last, and names none but the next lines early.

    AMD's cores from Zen 4 on, which `adds_bf16` finds in levels, too, fetch such a stream by themselves, at
    the rate of plain reads. Three streams with prefetches had half to two thirds of it (two cores of an
    EPYC). On Intel's, one stream left a core waiting, and two or three, fetched ahead, did not. No bit
    depends on it.
    """
    return adds_bf16()


def host_level() -> Level | None:
    """The level of the kernels that this processor may load: the best that it has all of."""
    if platform.system() != "Linux":
        return None
    is_amd = str(binding.get_host_cpu_name()).startswith("znver")
    return next((one for one in LEVELS if one.fits(host_features(), is_amd)), None)


def level_to_load() -> Level | None:
    """The level of the shipped kernels that this process may load: its own, if it compiles for one."""
    return _level[0] if _level else host_level()


def _aim_at_host() -> None:
    """Compile for the level of this processor: kernels are the same, and as fast, on all that have it.

    Where there is AMX, or no level, kernels are compiled for this very processor.
    """
    level = host_level()
    _level[:] = [level] if level and "amx-tile" not in host_features() else []
    config.CPU_NAME = _level[0].cpu if _level else None
    config.CPU_FEATURES = _level[0].llvm_features if _level else _native_features()


NAMED = config.CPU_NAME or ""  # the processor that Numba is set to compile for: native, then
if not NAMED and config.CPU_FEATURES is None:
    _aim_at_host()
DOT = _dot()


def name() -> str:
    """The target of this process, for `plait info --ops` and the cache's folder."""
    if _level:
        return _level[0].name
    return f"{config.CPU_NAME or binding.get_host_cpu_name()}-{DOT}"


def aim(isa: str) -> None:
    """Compile for `isa` (a key of TARGETS) from now on.

    Raises ConfigError for an unknown name, for one this machine cannot run, or if kernels were already made
    for another one.
    """
    if isa not in TARGETS:
        raise ConfigError(f"isa: {isa!r} is not one of {', '.join(TARGETS)}")
    cpu = TARGETS[isa] or NAMED
    if TARGETS[isa] and not X86_64:
        raise ConfigError(f"isa: {isa} is for x86-64; this machine is {platform.machine()}: use native")
    if missing := NEEDED.get(isa, set()) - host_features():
        raise ConfigError(f"isa: this machine has no {', '.join(sorted(missing))}, which {isa} needs")
    if cpu == read_cpu_name():
        return
    if "plait.kernels.cpu.codegen.vec" in sys.modules:
        raise ConfigError(f"isa: kernels of this process are made for {name()}; start another one for {isa}")
    if cpu:
        _level.clear()
        config.CPU_NAME, config.CPU_FEATURES = cpu, ""
    else:
        _aim_at_host()
    globals()["DOT"] = _dot()


def aim_at_level(level: Level) -> None:
    """Compile for any processor of a level from now on: to make kernels that are shipped.

    Raises ConfigError if this machine cannot run them, or if kernels were already made for another target.
    """
    if missing := level.features - host_features():
        raise ConfigError(f"level {level.name}: this machine has no {', '.join(sorted(missing))}")
    if "plait.kernels.cpu.codegen.vec" in sys.modules:
        raise ConfigError(f"level {level.name}: kernels of this process are made for {name()}")
    _level[:] = [level]
    config.CPU_NAME, config.CPU_FEATURES = level.cpu, level.llvm_features
    globals()["DOT"] = _dot()


def no_amx() -> str | None:
    """Why kernels here are made without AMX, or None: the processor, `aim`, and whether the system allows it.

    The request to the system is for all threads of this process.
    """
    if missing := amx_permission.name_missing(host_features()):
        return missing
    cpu = _level[0].name if _level else read_cpu_name() or TARGETS["amx"]
    if cpu != TARGETS["amx"]:
        return f"kernels are compiled for {cpu}"
    return amx_permission.request()


def keep_in(folder: Path | None, spare: Spare | None = None) -> None:
    """Keep compiled kernels under `folder` (default: the user's cache), in a folder of this exact version.

    A change of what all kernels share, of Numba, of LLVM or of the target gets a new folder. The rest that
    decides a kernel is in the name that `compiled` gives it, so nothing stale is ever loaded. What the folder
    does not take goes to `spare`. Folders and kernels that were unused for 30 days are removed.
    """
    room = room_in(folder)
    if _kept and (_kept[-1].folder, _kept[-1].spare) == (room, spare):
        return
    files = KernelFiles(room, spare)
    _kept[:] = [files]
    if room is not None and files.unkept is None:
        sweep_daily(room.parent, room)


def cached_files() -> KernelFiles | None:
    """Where this process keeps compiled kernels; None: nowhere, `keep_in` has not named a folder."""
    return _kept[-1] if _kept else None


def room_in(folder: Path | None) -> Path | None:
    """Where kernels of this exact version and target are kept under `folder`; nothing is made.

    None: no folder is named and the user has no home.
    """
    base = cache_base(folder)
    return base / "kernels" / room_name() if base is not None else None


def room_name() -> str:
    """The target, and a hash of all versions and sources that every kernel depends on."""
    return f"{name()}-{_fingerprint()}"


def level_room(level: Level) -> str:
    """`room_name` of a process that compiles for a level."""
    return f"{level.name}-{_fingerprint()}"


@cache
def _fingerprint() -> str:
    """A hash of what every kernel depends on except its target: sources, and what reads the code again."""
    versions = f"{numba.__version__} {llvmlite.__version__} {sys.implementation.cache_tag}"
    digest = hashlib.sha256(versions.encode())
    for source in SHARED:
        digest.update((ROOT / source).read_bytes())
    return digest.hexdigest()[:16]
