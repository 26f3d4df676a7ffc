"""Levels of x86-64 and aarch64: what many processors share, so that kernels for them can be shipped.

A kernel that is shipped has the name that a process of that level would give it (`kernel_cache.name_of`). So
it is used only where its sources, Python, Numba and LLVM are those that made it. Nothing here imports Numba.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from plait.kernels.cpu.codegen.kernel_folder import MAX_NBYTES, unseal

SHIPPED = Path(__file__).resolve().parents[1] / "shipped"
BASE = frozenset({"sse4.2", "popcnt", "cx16", "avx", "avx2", "fma", "bmi", "bmi2", "f16c", "lzcnt", "movbe"})
WIDE = BASE | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "avx512vnni", "avx512vbmi"}
ICE = WIDE | {"avx512vbmi2", "avx512bitalg", "avx512ifma", "avx512vpopcntdq"}
DOTPROD = frozenset({"dotprod"})


@dataclass(frozen=True, slots=True)
class Level:
    """`cpu`: LLVM's name; `features`: what a processor must have, and all that kernels use."""

    name: str
    cpu: str
    features: frozenset[str]

    @property
    def llvm_features(self) -> str:
        """The features in the form that LLVM reads; vectors of 512 bits stay whole, as kernels expect."""
        whole = ["-prefer-256-bit"] if self.cpu.startswith("x86-64") else []
        return ",".join([*(f"+{name}" for name in sorted(self.features)), *whole])

    def fits(self, features: frozenset[str], is_amd: bool) -> bool:
        """Whether a processor has all of it, and kernels for it would not be chosen in another way.

        They would where registers are wider, and where there is AVX512_BF16 that is not AMD's.
        """
        wide, bf16 = "avx512f", "avx512bf16"
        is_alike = (wide in self.features, bf16 in self.features) == (
            wide in features,
            bf16 in features and is_amd,
        )
        return self.features <= features and is_alike


LEVELS = (
    Level("x86-64-v4-bf16", "x86-64-v4", ICE | {"avx512bf16"}),  # AMD from Zen 4 on
    Level("x86-64-v4-vnni", "x86-64-v4", ICE),  # Intel from Ice Lake on
    Level("x86-64-v3-vnni", "x86-64-v3", BASE | {"avxvnni"}),  # Intel without AVX-512 from Alder Lake on
    Level("x86-64-v3", "x86-64-v3", BASE),
    Level("armv8-i8mm", "generic", DOTPROD | {"i8mm"}),  # Neoverse V1 and N2, Cortex-A510 and later
    Level("armv8-dotprod", "generic", DOTPROD),  # Neoverse N1, Cortex-A76 and later
)


def read_shipped(room: str, name: str) -> bytes | None:
    """The payload of a shipped kernel; None: there is none, or it is damaged.

    A user that may write there may write Plait itself, so the owner of the folder is not compared.
    """
    try:
        with open(SHIPPED / room / name, "rb") as file:
            return unseal(name, file.read(MAX_NBYTES + 1))
    except OSError:
        return None
