"""Loads kernels: registers the faster variants with the ops they belong to."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import pkgutil
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from plait.kernels.cpu.codegen.kernel_folder import KernelRoom, Spare, is_foreign, refusal, rooms, sweep

if TYPE_CHECKING:
    from os import stat_result

    from plait.kernels.cpu.codegen.kernel import Kernel
    from plait.kernels.cpu.runtime.executor import Executor
    from plait.kernels.cpu.runtime.machine_code import LoadedKernel
    from plait.kernels.cpu.runtime.row_launches import DrawFromRows, FindLargest
    from plait.kernels.cpu.runtime.threads import Launchable, LaunchTable, Threads
    from plait.kernels.cpu.runtime.turn_tables import TurnTables

log = logging.getLogger("plait")
_lent: list[Spare] = []  # by the server that this process is an engine of: one at most


def load_kernels(*, cache_dir: Path | None = None, isa: str = "native") -> None:
    """Register every variant that this installation can run. To be called before a model is built.

    Without it, models run on the references. A variant that this machine or model cannot use is registered
    all the same: its `when` says why not, which is what `plait info --ops` shows. `cache_dir`: where compiled
    kernels are kept; `isa`: what they are compiled for. Raises ConfigError for an `isa` that cannot be.
    """
    _register_torch()
    if not has_numba():
        log.warning("Numba is not installed here: models run on torch, many times slower than they could")
        return
    from plait.kernels.cpu.codegen import target

    target.aim(isa)
    target.keep_in(cache_dir, _lent[-1] if _lent else None)
    for name in cpu_kernels():
        importlib.import_module(name)


def _register_torch() -> None:
    """Register what torch's own operators compute in other ways than the references."""
    from plait.kernels.torch import attention, block_sparse, compressed, front, indexer

    for module in (attention, block_sparse, compressed, front, indexer):
        module.register()


def cpu_kernels() -> list[str]:
    """Every module in the packages of `plait.kernels.cpu`, sorted: importing them registers their variants.

    A variant that is to be tried before another one is in a module that imports the other's module.
    """
    from plait.kernels import cpu

    found = [
        module.name
        for package in pkgutil.iter_modules(cpu.__path__, f"{cpu.__name__}.")
        if package.ispkg
        for module in pkgutil.iter_modules(importlib.import_module(package.name).__path__, f"{package.name}.")
    ]
    return sorted(found)


def lend(descriptor: int) -> None:
    """Let `load_kernels` keep in that memory what no folder takes: the server hands it to its next engine."""
    with suppress(OSError):
        _lent[:] = [Spare(descriptor)]


def why_not_cached() -> str | None:
    """Why the next run compiles again what this process has compiled; None: it loads it."""
    if not has_numba():
        return None
    from plait.kernels.cpu.codegen.target import cached_files

    files = cached_files()
    return files.unkept if files else None


def forget_lock() -> None:
    """Open the lock of the kernel folder anew in a fork that has closed its descriptors."""
    if not has_numba():
        return
    from plait.kernels.cpu.codegen.target import cached_files

    if files := cached_files():
        files.forget_lock()


def cached_kernels(base: Path) -> list[KernelRoom]:
    """Compiled kernels under a cache folder, by target and version."""
    return rooms(base / "kernels")


def why_refused(room: Path) -> str | None:
    """Why compiled kernels are neither read from that folder nor kept there, if they are not."""
    return refusal(room)


def is_foreign_file(status: stat_result) -> bool:
    """Whether another user than this one and root may have written a file."""
    return is_foreign(status)


def link_code(code: bytes, parts: Sequence[tuple[str, int, int]]) -> list[LoadedKernel]:
    """Load machine code of an earlier process, without Numba: `machine_code.link`. Raises RuntimeError."""
    from plait.kernels.cpu.runtime.machine_code import link

    return link(code, parts)


def allocate_packed(nbytes: int) -> Any:
    """Memory for what kernels read in every step, a tensor of zeros, uint8: `tile_memory.Rooms.take`."""
    from plait.kernels.cpu.runtime.tile_memory import room

    return room(nbytes)


def why_no_tiles(isa: str) -> str | None:
    """Why this process may not use AMX with that --isa; None: it may, and has requested it from the system.

    Neither torch nor Numba is imported.
    """
    from plait.kernels.cpu.codegen import amx_permission

    return amx_permission.why_no_tiles(isa)


def record_tile_check() -> tuple[Kernel, tuple[bytes, ...], tuple[bytes, bytes, bytes]]:
    """The kernel that checks tiles of AMX, what it is given, and what is documented: for `compare_tiles`."""
    from plait.kernels.cpu.amx import check

    given = check.inputs()
    return check.products("amx"), given, check.multiply_in_memory(given)


def compare_tiles(address: int, given: Sequence[bytes], documented: tuple[bytes, bytes, bytes]) -> str | None:
    """How this processor's tiles differ from what is documented, or None; after `why_no_tiles` alone.

    address: of the code of `record_tile_check`. Neither torch nor Numba is imported.
    """
    from plait.kernels.cpu.runtime.tile_check import name_difference, run_products

    return name_difference(run_products(address, given), documented)


def start_threads(threads: int, kernels: Sequence[LoadedKernel], loops: Mapping[str, int]) -> Threads:
    """Threads that run such code; see `machine_code.start_threads`."""
    from plait.kernels.cpu.runtime import machine_code

    return machine_code.start_threads(threads, kernels, loops)


def list_loops() -> dict[str, Kernel]:
    """What threads run besides kernels, by field of `NativeLoops`."""
    from plait.kernels.cpu.runtime import loops

    return loops.list_loops()


def sampling_kernels() -> dict[str, Kernel]:
    """The kernels that sample from rows of logits: "largest" and "draw"."""
    from plait.kernels.cpu.pointwise.sample import draw_rows, largest_rows

    return {"largest": largest_rows, "draw": draw_rows}


def turn_kernels() -> dict[str, Kernel]:
    """The kernels between the passes of speculative turns, by name: `turns.GLUE`."""
    from plait.kernels.cpu.runtime.turns import GLUE

    return dict(GLUE)


def turn_tables(threads: Threads, kernels: Mapping[str, Launchable]) -> TurnTables:
    """What makes the tables of such turns, of `turn_kernels` and `sampling_kernels`."""
    from plait.kernels.cpu.runtime.turn_tables import TurnTables

    return TurnTables(threads, kernels)


def find_kernel(address: int) -> Kernel | None:
    """The kernel with machine code that begins there."""
    from plait.kernels.cpu.codegen import kernel

    return kernel.find_kernel(address)


def find_targets(table: Any) -> Sequence[Any]:
    """The tensors that the numbers of a tensor may point into; none if it holds no addresses."""
    from plait.kernels.cpu.runtime import address_table

    return address_table.find_targets(table)


def find_places(address: int) -> frozenset[int]:
    """Which numbers of the tensor at an address, counted over all of them, are addresses themselves."""
    from plait.kernels.cpu.runtime import address_table

    return address_table.find_places(address)


def row_functions(threads: Threads, kernels: Mapping[str, Launchable]) -> tuple[FindLargest, DrawFromRows]:
    """What `sampling_kernels` compute of an array of logits; see `row_launches.find_largest` and `draw`."""
    from plait.kernels.cpu.runtime.row_launches import draw, find_largest

    return partial(find_largest, threads, kernels["largest"]), partial(draw, threads, kernels["draw"])


def allocate_block(nbytes: int) -> Any:
    """Memory for results of kernels, as a recording has it: bytes, not initialised."""
    from plait.kernels.cpu.runtime.threads import allocate_aligned

    return allocate_aligned(nbytes)


def new_table(scratch: int, shared: int) -> LaunchTable:
    """An empty table of launches that need so many bytes for each thread, and for all threads together."""
    from plait.kernels.cpu.runtime.threads import LaunchTable

    return LaunchTable(scratch=scratch, shared=shared)


def host_target() -> str:
    """The processor and all that LLVM finds in it; nothing of Numba is imported."""
    from plait.kernels.cpu.runtime import machine_code

    return machine_code.host_target()


def remove_cached(base: Path, unused_s: float) -> int:
    """Remove compiled kernels that no run has used for so long; the bytes freed."""
    return sweep(base / "kernels", unused_s=unused_s)


def load_for_gpu() -> None:
    """Register what runs on GPUs: torch's own operators, and Triton's kernels where that is installed."""
    _register_torch()
    if importlib.util.find_spec("triton") is not None:
        for name in triton_kernels():
            importlib.import_module(name)


def wide_tiles() -> AbstractContextManager[None]:
    """Kernels of GPUs with fewer, wider programs, for Triton's interpreter: `forms.wide_tiles`."""
    from plait.kernels.triton import forms

    return forms.wide_tiles()


def triton_kernels() -> list[str]:
    """Every module of `plait.kernels.triton`, sorted: importing them registers their variants."""
    from plait.kernels import triton

    found = pkgutil.walk_packages(triton.__path__, f"{triton.__name__}.")
    return sorted(module.name for module in found if not module.ispkg)


class KernelTarget(Struct, frozen=True):
    """What kernels are compiled for here.

    `dot`: how products of bytes are added, as `target.DOT`; `no_amx`: why tiles of AMX are not used, None if
    they are; `features`: what is found in this processor; `room`: where compiled kernels are, or would be,
    kept, None without a home; `room_name`: its name; `formats`: blocks of GGUF that are read; `tried`:
    whether a run tries kernels before it binds any.
    """

    name: str
    dot: str
    features: frozenset[str]
    room: Path | None
    room_name: str
    formats: tuple[str, ...]
    no_amx: str | None = None
    tried: bool = False


def describe_target(*, cache_dir: Path | None = None, isa: str = "native") -> KernelTarget | None:
    """What `load_kernels` would compile for; nothing is compiled, written or imported. None without Numba.

    Raises ConfigError for an `isa` that this machine cannot run.
    """
    if not has_numba():
        return None
    from plait.kernels.cpu.codegen import target
    from plait.kernels.cpu.linear import layout

    target.aim(isa)
    features, room = target.host_features(), target.room_in(cache_dir)
    formats = tuple(layout.LAYOUTS)
    tried = not target.X86_64
    named = target.name(), target.DOT, features, room, target.room_name()
    return KernelTarget(*named, formats, target.no_amx(), tried)


def has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


def executor(threads: int, prefill: str = "same") -> Executor | None:
    """Threads for native kernels on the CPU; None without them: `why_no_kernels`. `load_kernels` comes first.

    prefill: "bf16" lets linear layers compute many rows otherwise than few, where there is AMX.
    """
    if why_no_kernels():
        return None
    from plait.kernels.cpu.runtime.executor import Executor

    return Executor(threads, prefill)


def why_no_kernels() -> str | None:
    """Why models run on torch here, or None. `load_kernels` comes first.

    Where kernels were never tried on real processors, which is everywhere but on x86-64, some are tried once.
    """
    if not has_numba():
        return "Numba is not installed"
    from plait.kernels.cpu.codegen.target import X86_64

    if X86_64:
        return None
    from plait.kernels.cpu.self_check import refusal

    reason: str | None = refusal()
    return reason


def why_no_amx() -> str | None:
    """Why kernels use no AMX, or None: asks the system, and tries it once. `load_kernels` comes first."""
    if not has_numba():
        return "Numba is not installed"
    from plait.kernels.cpu.amx.check import refusal

    reason: str | None = refusal()
    return reason
