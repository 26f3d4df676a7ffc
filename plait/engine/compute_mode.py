"""The compute mode of a GPU, which says how many processes may have it open at a time.

The driver reports the mode without opening the device. In exclusive-process mode the first process that opens
it keeps all others out until it ends: what child processes do there has to come before the engine opens it.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Any

import torch

from plait.errors import ConfigError

ATTRIBUTE = 20  # CU_DEVICE_ATTRIBUTE_COMPUTE_MODE of CUDA's driver
PROHIBITED, EXCLUSIVE = 2, 3  # CUcomputemode; 0: any number of processes
BUSY = "busy or unavailable"  # of cudaErrorDevicesUnavailable, which has no class of its own
ANY_NUMBER = "`nvidia-smi -c 0`, as root, lets any number of processes open it"


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


def _load_driver() -> Any:
    """CUDA's driver library; None where there is none."""
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return None
