"""Chooses the device and dtype of a model once, with the reason; opens it; measures free memory.

The driver reports a GPU's compute mode, how many processes may have it open, without opening it. In
exclusive-process mode the first process keeps all others out until it ends: what child processes do there has
to come before the engine opens it.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from plait import resource_limits
from plait.config import DType
from plait.errors import ConfigError, OutOfMemory
from plait.ops.chip import BFLOAT16, EXAMPLES, OLDEST, Chip, example_chip, read_chip
from plait.runner.device.loss import check_lost

ATTRIBUTE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE of CUDA's driver
PROHIBITED, EXCLUSIVE = 2, 3  # CUcomputemode; 0: any number of processes
BUSY = "busy or unavailable"  # of cudaErrorDevicesUnavailable, which has no class of its own
ANY_NUMBER = "`nvidia-smi -c 0`, as root, lets any number of processes open it"


def choose_device(requested: str, index: int = 0, size: int = 1) -> tuple[torch.device, str]:
    """(device, why). `requested`: auto, cpu, cuda (the first one), cuda:N or cuda:N,M; see `config.DEVICE`.

    index, size: which of how many ranks it is for; each has a GPU of its own. Raises ConfigError if a GPU was
    requested and torch finds none, has no such number, or it is too old.
    """
    if requested == "cpu":
        return torch.device("cpu"), "requested"
    if requested.startswith("cuda:sm_"):
        raise ConfigError(_why_no_example(requested))
    refusal = _why_no_cuda()
    if refusal is None:
        named = requested.partition(":")[2]
        numbers = [int(number) for number in named.split(",")] if named else list(range(size))
        device = torch.device("cuda", numbers[index])
        if (count := torch.cuda.device_count()) <= max(numbers):
            raise ConfigError(_why_too_few(requested if named else "", size, count))
        chip = read_chip(device)
        assert chip is not None
        if chip.capability >= OLDEST:
            return device, f"CUDA device {device.index}, {chip.name}"
        refusal = (
            f"{chip.name} has compute capability {chip.capability / 10}, the least that kernels are made for "
            f"is {OLDEST / 10}"
        )
    if requested != "auto":
        raise ConfigError(f"device: {requested} was requested, but {refusal}; use --cpu")
    return torch.device("cpu"), refusal


def _why_too_few(requested: str, size: int, count: int) -> str:
    """`requested`: the numbers that were named, empty: none was. `count`: of the devices that there are."""
    there = "there is 1 CUDA device" if count == 1 else f"there are {count} CUDA devices"
    if requested:
        return f"device: {requested} was requested, but {there}, from 0 on"
    return (
        f"tensor_parallel_size: {size} ranks need a GPU each, but {there}; ask for {count}, or set device to "
        "cpu"
    )


def _why_no_example(requested: str) -> str:
    if example_chip(requested):
        return f"device: {requested} is an example of a GPU: `plait info MODEL --ops` alone takes it"
    known = ", ".join(f"cuda:sm_{capability}" for capability in EXAMPLES)
    return f"device: {requested} is no example of a GPU; there are {known}, for `plait info MODEL --ops`"


def _why_no_cuda() -> str | None:
    """Why torch can use no GPU, in its own words where it has any (an old driver); None: it can.

    A build for ROCm calls AMD's devices CUDA, too, with capabilities that mean something else.
    """
    if torch.version.hip is not None:
        return "this torch was built for ROCm, and kernels for GPUs are NVIDIA's alone"
    if torch.cuda.is_available():
        return None
    if not torch.backends.cuda.is_built():
        return "this torch was built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f"torch finds no CUDA device: {' '.join(str(error).split())}"
    return "torch finds no CUDA device"


def choose_dtype(requested: DType, chip: Chip | None, stored: Sequence[str]) -> torch.dtype:
    """The dtype to compute in. `chip`: the GPU, None for a CPU; `stored`: formats of the linear weights.

    auto: float32 on a CPU, and where most linear weights are stored as float32; else bfloat16 on a GPU that
    has it, and float16 on an older one. Raises ConfigError for a dtype that the GPU cannot do.
    """
    has_bfloat16 = chip is None or chip.capability >= BFLOAT16
    if requested != "auto":
        if chip and requested == "bfloat16" and not has_bfloat16:
            raise ConfigError(f"dtype: {chip.name} has no bfloat16; use float16 or float32")
        dtype: torch.dtype = getattr(torch, requested)
        return dtype
    if chip is None or 2 * sum(name == "float32" for name in stored) > len(stored):
        return torch.float32
    return torch.bfloat16 if has_bfloat16 else torch.float16


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device; on a CPU, within the control groups' limits."""
    if device.type == "cuda":
        torch.cuda.empty_cache()  # torch keeps what was freed, and the driver counts that as taken
        return int(torch.cuda.mem_get_info(device)[0])
    free = resource_limits.free_memory()
    return 4 << 30 if free is None else free  # the system does not report it: assume a laptop's memory


def total_memory(device: torch.device) -> int | None:
    """Bytes that the device has, within the control groups' limits; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return resource_limits.total_memory()


def count_memory(device: torch.device) -> int:
    """Bytes of a GPU that this process has for tensors, used or not; 0 for a CPU."""
    return int(torch.cuda.memory_reserved(device)) if device.type == "cuda" else 0


class DeviceMemory(Protocol):
    """The memory of a device, as it is measured to divide it."""

    def free(self) -> int:
        """Bytes that can still be had."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """Bytes that `run` takes at most, beyond what is there before it. Raises DeviceLost."""
        ...


class CudaMemory:
    """The memory of a GPU, by torch's allocator and the driver."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def free(self) -> int:
        return free_memory(self.device)

    def peak_of(self, run: Callable[[], object]) -> int:
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        try:
            run()
            torch.cuda.synchronize(self.device)
        except RuntimeError as error:
            check_lost(error, self.device)
            raise
        return max(int(torch.cuda.max_memory_allocated(self.device)) - int(before), 0)


class HostMemory:
    """The memory of the host, of which no peak is known."""

    def free(self) -> int:
        return free_memory(torch.device("cpu"))

    def peak_of(self, run: Callable[[], object]) -> int:
        run()
        return 0


def memory_of(device: torch.device) -> DeviceMemory:
    """The memory of a device, to divide it."""
    return CudaMemory(device) if device.type == "cuda" else HostMemory()


@contextlib.contextmanager
def out_of_memory(what: str) -> Iterator[None]:
    """Turn the allocator's failure into OutOfMemory that names what was being done."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        is_short = isinstance(error, MemoryError | torch.OutOfMemoryError)
        if not is_short and "can't allocate memory" not in str(error):
            raise
        raise OutOfMemory(f"not enough memory for {what}; see `plait info` for what a model needs") from error


def read_compute_mode(device: torch.device) -> int | None:
    """The compute mode of a GPU as CUDA numbers it; None where no driver says so, and for a CPU."""
    if device.type != "cuda" or (driver := _load_driver()) is None:
        return None
    handle, mode = ctypes.c_int(), ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), device.index or 0):
        return None
    if driver.cuDeviceGetAttribute(ctypes.byref(mode), ATTRIBUTE, handle):
        return None
    return mode.value


def is_exclusive(device: torch.device) -> bool:
    """Whether one process alone may have the device open."""
    return read_compute_mode(device) == EXCLUSIVE


def why_unavailable(error: BaseException, device: torch.device) -> str | None:
    """Why a device that is there cannot be opened, with what to do; None for any other error."""
    if BUSY not in str(error):
        return None
    mode = read_compute_mode(device)
    if mode == EXCLUSIVE:
        return (
            f"{device} is in exclusive-process compute mode, and a process has it open already; end that "
            f"process, or {ANY_NUMBER}"
        )
    if mode == PROHIBITED:
        return f"{device} is in prohibited compute mode, so no process may compute on it; {ANY_NUMBER}"
    return f"{device} is busy or unavailable; `nvidia-smi` shows which processes have it open"


def open_device(device: torch.device) -> None:
    """Open a GPU in this process, which makes its context. Raises ConfigError if it may not be opened."""
    if device.type != "cuda":
        return
    try:
        torch.empty(1, device=device)
    except RuntimeError as error:
        if (why := why_unavailable(error, device)) is None:
            raise
        raise ConfigError(f"device: {why}") from error


def _load_driver() -> ctypes.CDLL | None:
    """CUDA's driver library; None where there is none."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
