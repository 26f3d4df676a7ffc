"""A kernel: a Python function that LLVM compiles the first time it is needed, called by its address.

Every kernel has one signature: (frame, args, thread, threads), all int64. `args` is the address of the
words that `Executor.launch` wrote: the numbers and addresses of one use. `frame` is the address of what
changes from step to step (`frame.py`). All threads run a kernel together, each doing its share; it may meet
the others at `barrier(frame, threads)`.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
import time
from collections.abc import Callable
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

from numba import cfunc, config, njit

log = logging.getLogger("plait")

OPTIONS = {"nogil": True, "error_model": "numpy", "boundscheck": False, "cache": True}
SIGNATURE = "void(int64,int64,int64,int64)"
SLOW_S = 0.15  # what takes longer was compiled, not loaded

inline = njit(
    error_model="numpy", boundscheck=False, no_cpython_wrapper=True, no_cfunc_wrapper=True, cache=False
)
"""Decorator of a function that only kernels call: compiled into each of them, and kept as a part of them.

Python itself cannot call it: the code that unboxes arguments would take as long to make as the function.
"""


class Kernel:
    """What `launch` runs. Its machine code is made, or loaded, when its address is first asked for."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function, self.name = function, function.__name__
        self.compile_s = 0.0  # seconds it took to make; 0: it came from the cache
        self.__doc__ = function.__doc__

    @cached_property
    def address(self) -> int:
        return int(self._compiled.address)

    @cached_property
    def _compiled(self) -> Any:
        started = time.perf_counter()
        made = cfunc(
            SIGNATURE, cache=True, nopython=True, nogil=True, error_model="numpy", boundscheck=False
        )(self.function)
        took = time.perf_counter() - started
        if took > SLOW_S:
            self.compile_s = took
            log.debug("compiled the CPU kernel %s: %.1f s", self.name, took)
        return made


def kernel(function: Callable[..., None]) -> Kernel:
    """Decorator: (frame, args, thread, threads) -> Kernel."""
    return Kernel(function)


def generated(name: str, source: str) -> ModuleType:
    """A module of kernels whose text was made: register tiles have no loops over registers in Python.

    The text goes to a file beside the compiled kernels, named after its content, because Numba keeps
    compiled code for functions with a file only.
    """
    digest = sha256(source.encode()).hexdigest()[:12]
    title = f"plait_generated_{name}_{digest}"
    if title in sys.modules:
        return sys.modules[title]
    path = Path(config.CACHE_DIR) / f"{title}.py"
    if not path.exists():
        partial = path.with_suffix(f".{time.monotonic_ns()}.tmp")
        partial.write_text(source)
        partial.replace(path)
    spec = importlib.util.spec_from_file_location(title, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be imported")
    module = importlib.util.module_from_spec(spec)
    sys.modules[title] = module
    spec.loader.exec_module(module)
    return module
