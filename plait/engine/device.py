"""Chooses the device and dtype of a model once, with the reason; measures free memory."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch

from plait import resource_limits
from plait.config import Device, DType
from plait.errors import ConfigError, OutOfMemory


def choose_device(requested: Device) -> tuple[torch.device, str]:
    """(device, why). Raises ConfigError if CUDA was requested and there is none."""
    if requested == "cpu":
        return torch.device("cpu"), "requested"
    if torch.cuda.is_available():
        return torch.device("cuda", 0), f"the first CUDA device, {torch.cuda.get_device_name(0)}"
    if requested == "cuda":
        raise ConfigError("device: cuda was requested, but torch finds no CUDA device; use --cpu")
    return torch.device("cpu"), "torch finds no CUDA device"


def choose_dtype(requested: DType, device: torch.device, stored: Sequence[str]) -> torch.dtype:
    """The dtype to compute in. auto: float32 on CPU; on a GPU the float that most tensors are stored in.

    Raises ConfigError for a dtype the device cannot do.
    """
    if requested != "auto":
        dtype: torch.dtype = getattr(torch, requested)
        if device.type == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported():
            name = torch.cuda.get_device_name(0)
            raise ConfigError(f"dtype: {name} has no bfloat16; use float16 or float32")
        return dtype
    if device.type == "cpu":
        return torch.float32
    common = Counter(name for name in stored if name in {"float32", "bfloat16", "float16"}).most_common(1)
    found: torch.dtype = getattr(torch, common[0][0]) if common else torch.bfloat16
    return found


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on the device; on a CPU, within the control groups' limits."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    free = resource_limits.free_memory()
    return 4 << 30 if free is None else free  # the system does not report it: assume a laptop's memory


def total_memory(device: torch.device) -> int | None:
    """Bytes that the device has, within the control groups' limits; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    return resource_limits.total_memory()


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
