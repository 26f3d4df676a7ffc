"""Machine code from an earlier process: object files of LLVM, linked again in this one, without Numba.

Numba's wrappers of kernels refer to functions of Python and of Numba that report an exception. Kernels raise
none, so those of Numba are replaced by one that ends the process.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache

from llvmlite import binding
from msgspec import Struct

from plait.kernels.cpu.runtime.threads import NativeLoops, Threads

# Of Numba's own library, which is not loaded here.
ABSENT = (
    *("NRT_Free", "NRT_Allocate", "NRT_decref", "NRT_incref", "NRT_MemInfo_call_dtor"),
    *("numba_do_raise", "numba_gil_ensure", "numba_gil_release", "numba_runtime_build_excinfo_struct"),
    *("numba_unpickle", "numba_recreate_record", "numba_fatal_error"),
)
_linkers: list[object] = []  # they own the code, for as long as this process lives


class LoadedKernel(Struct, frozen=True):
    """A kernel with machine code."""

    name: str
    address: int


def link(code: bytes, parts: Sequence[tuple[str, int, int]]) -> list[LoadedKernel]:
    """Load object files. parts: symbol, place in `code` and bytes of each. Raises RuntimeError.

    Each gets a linker of its own: files that different processes made may have functions of the same name.
    """
    _prepare()
    kernels = []
    for symbol, at, nbytes in parts:
        machine = binding.Target.from_default_triple().create_target_machine(jit=True)
        linker = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
        linker.add_object_file(binding.ObjectFileRef.from_data(code[at : at + nbytes]))
        linker.finalize_object()
        kernels.append(LoadedKernel(symbol, linker.get_function_address(symbol)))
        if not kernels[-1].address:
            raise RuntimeError(f"there is no code for {symbol}")
        _linkers.append(linker)
    return kernels


def start_threads(threads: int, kernels: Sequence[LoadedKernel], loops: Mapping[str, int]) -> Threads:
    """Threads that run such code. `loops`: the kernel's number, by field of `NativeLoops`."""
    return Threads(threads, NativeLoops(**{name: kernels[number].address for name, number in loops.items()}))


def host_target() -> str:
    """The processor and all that LLVM finds in it: code for another one is never loaded."""
    try:
        features = binding.get_host_cpu_features().flatten()
    except RuntimeError:
        features = ""
    return f"{binding.get_host_cpu_name()} {features}"


@cache
def _prepare() -> None:
    """Let LLVM link for this processor, and give the functions that are absent an address."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    stop = ctypes.cast(ctypes.CDLL(None).abort, ctypes.c_void_p).value
    for name in ABSENT:
        if binding.address_of_symbol(name) is None:
            binding.add_symbol(name, stop)
