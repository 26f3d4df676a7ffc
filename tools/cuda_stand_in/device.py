"""The device as Python sees it: work for its streams, and its memory as tensors of a CPU."""

from __future__ import annotations

import atexit
import ctypes
import itertools
import traceback
import warnings
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

CALLBACK = ctypes.CFUNCTYPE(None, ctypes.c_long)

library = ctypes.CDLL(None)  # of the process, which has the two libraries preloaded
library.stand_in_enqueue.argtypes = [ctypes.c_void_p, ctypes.c_long]
library.stand_in_is_captured.argtypes = [ctypes.c_void_p]
library.stand_in_wait.argtypes = [ctypes.c_void_p, ctypes.c_char_p]
library.stand_in_fail.argtypes = [ctypes.c_char_p]
library.stand_in_set_callbacks.argtypes = [CALLBACK, CALLBACK]
library.cudaGetErrorString.restype = ctypes.c_char_p

calls: dict[int, Callable[[], object]] = {}  # what queues and graphs know by number
numbers = itertools.count(1)


@CALLBACK
def run_call(number: int) -> None:
    """Run what was enqueued. An error makes every later call of CUDA fail, as one on a GPU does."""
    try:
        with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.inference_mode():
            calls[number]()
    except BaseException:  # there is no caller that it could reach
        text = f"work on the device failed:\n{traceback.format_exc()}"
        library.stand_in_fail(text.encode(errors="replace"))


@CALLBACK
def release_call(number: int) -> None:
    """Forget what no queue and no graph has any more."""
    calls.pop(number, None)


def install_callbacks() -> None:
    """Let the libraries call Python, until the interpreter ends."""
    library.stand_in_set_callbacks(run_call, release_call)
    atexit.register(library.stand_in_set_callbacks, CALLBACK(), CALLBACK())


def _raise_for(code: int) -> None:
    if code:
        raise torch.AcceleratorError(f"CUDA error: {library.cudaGetErrorString(code).decode()}")


def current_stream() -> int:
    """The handle of this thread's current stream."""
    stream: int = torch._C._cuda_getCurrentRawStream(torch.cuda.current_device())
    return stream


def enqueue(run: Callable[[], object]) -> None:
    """Run it on the current stream, in its capture if it has one. Raises the error of CUDA."""
    number = next(numbers)
    calls[number] = run
    _raise_for(library.stand_in_enqueue(current_stream(), number))


def wait(operation: str) -> None:
    """Finish the current stream, for an operation that reads values on the host. Raises in a capture."""
    _raise_for(library.stand_in_wait(current_stream(), operation.encode()))


def is_captured() -> bool:
    """Whether the current stream is captured."""
    return bool(library.stand_in_is_captured(current_stream()))


def host_view(tensor: Tensor) -> Tensor:
    """A CPU's tensor over the memory of one on the device, with its sizes and strides. It owns nothing."""
    size, stride = tuple(tensor.size()), tuple(tensor.stride())
    if tensor.numel() == 0:
        return torch.empty_strided(size, stride, dtype=tensor.dtype)
    length = 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    memory = (ctypes.c_char * (length * tensor.dtype.itemsize)).from_address(tensor.data_ptr())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the buffer looks read-only
        flat = torch.frombuffer(memory, dtype=tensor.dtype, count=length)
    return flat.as_strided(size, stride)
