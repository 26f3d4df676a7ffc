"""A kernel: a Python function that LLVM compiles the first time it is needed, called by its address.

Every kernel has one signature: (frame, args, thread, threads), all int64. `args` is the address of the
words that `Executor.launch` wrote: the numbers and addresses of one use. `frame` is the address of what
changes from step to step (`frame.py`). All threads run a kernel together, each doing its share; it may meet
the others at `barrier(frame, threads)`.
"""

from __future__ import annotations

import gc
import linecache
import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from types import ModuleType
from typing import Any, TypeVar

from numba import njit
from numba.core.ccallback import CFunc
from numba.core.sigutils import normalize_signature

from plait.kernels.cpu.codegen.kernel_cache import lock_compile

log = logging.getLogger("plait")

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
BARE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
SIGNATURE = "void(int64,int64,int64,int64)"
ENTRY_SIGNATURE = "void(int64,int64)"
Body = Callable[[int, int, int, int], None]
F = TypeVar("F", bound=Callable[..., Any])
_made: dict[int, Kernel] = {}  # by address


def inline(function: F) -> F:
    """Decorator of a function that only kernels call: compiled into each of them, and kept as a part of them.

    Python itself cannot call it: the code that unboxes arguments would take as long to make as the function.
    """
    made: F = njit(error_model="numpy", boundscheck=False, cache=False, **BARE)(function)
    return made


@contextmanager
def no_collections() -> Iterator[None]:
    """No search for garbage inside."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Kernel:
    """What `launch` runs. Its machine code is made, or loaded, when its address is first requested.

    `loop`: makes the kernel's function around another one, which gives it its name; None: it is that one.
    """

    signature = SIGNATURE

    def __init__(self, part: Callable[..., None], loop: Callable[[Any], Body] | None = None) -> None:
        self._part, self._loop, self.name = part, loop, part.__name__
        self.compile_s = 0.0  # seconds it took to make; 0: it came from the cache
        self.__doc__ = part.__doc__

    @cached_property
    def function(self) -> Any:
        function: Any = self._part
        if self._loop is not None:
            function = self._loop(inline(self._part))
            function.__name__ = function.__qualname__ = self.name
        return function

    @cached_property
    def address(self) -> int:
        found = int(self._compiled.address)
        _made[found] = self
        return found

    @property
    def symbol(self) -> str:
        """The name of `address` in the object code."""
        return str(self._compiled._wrapper_name)

    def object_code(self) -> bytes | None:
        """What LLVM made, as it is kept on the disk, whole; None where nothing is kept."""
        found: bytes | None = self._compiled._cache.read_object_code()
        return found

    @cached_property
    def _compiled(self) -> Any:
        started = time.perf_counter()
        with lock_compile(self.function, self.signature) as found:
            options = {**OPTIONS, "nopython": True}
            made: Any = CFunc(self.function, normalize_signature(self.signature), {}, options)
            made._cache = found
            with no_collections():  # a compiler's trees are large, and none of them is garbage yet
                made.compile()
        if not found.was_found:
            self.compile_s = time.perf_counter() - started
            log.debug("compiled the CPU kernel %s: %.1f s", self.name, self.compile_s)
        return made


def kernel(function: Body) -> Kernel:
    """Decorator: (frame, args, thread, threads) -> Kernel."""
    return Kernel(function)


class NativeEntry(Kernel):
    """Native code that Python calls with two addresses or numbers, as `threads.call_entry` does."""

    signature = ENTRY_SIGNATURE


def entry(function: Callable[[int, int], None]) -> NativeEntry:
    """Decorator: (number, number) -> NativeEntry."""
    return NativeEntry(function)


def find_kernel(address: int) -> Kernel | None:
    """The kernel with machine code that begins there."""
    return _made.get(address)


def load_generated(name: str, source: str) -> ModuleType:
    """A module of kernels from generated source: register tiles have no loops over registers in Python."""
    title = f"plait_generated_{name}_{sha256(source.encode()).hexdigest()[:12]}"
    if title in sys.modules:
        return sys.modules[title]
    module, path = ModuleType(title), f"<{title}>"
    linecache.cache[path] = len(source), None, source.splitlines(keepends=True), path  # for tracebacks
    sys.modules[title] = module  # machine code that was kept names it
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except BaseException:
        del sys.modules[title]
        raise
    return module
