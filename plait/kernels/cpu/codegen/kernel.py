"""A kernel: a Python function that LLVM compiles the first time it is needed, called by its address.

Every kernel has one signature: (frame, args, thread, threads), all int64. `args` is the address of the
words that `Executor.launch` wrote: the numbers and addresses of one use. `frame` is the address of what
changes from step to step (`frame.py`). All threads run a kernel together, each doing its share; it may meet
the others at `barrier(frame, threads)`.

Of Numba's steps those are left out that no kernel needs. Its optimisation of each function that kernels call
stays, though they are optimised whole as well: without it a decode of the nano hybrid took a third longer.
"""

from __future__ import annotations

import gc
import linecache
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from hashlib import sha256
from types import CodeType, ModuleType
from typing import Any, TypeVar

from numba import njit, types
from numba.core.ccallback import CFunc
from numba.core.compiler import Compiler, DefaultPassBuilder
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target
from numba.core.sigutils import normalize_signature
from numba.core.typing.context import Context

from plait.kernels.cpu.codegen.kernel_cache import lock_compile

log = logging.getLogger("plait")

OPTIONS: dict[str, Any] = {"nogil": True, "error_model": "numpy", "boundscheck": False}
BARE: dict[str, Any] = {"no_cpython_wrapper": True, "no_cfunc_wrapper": True}
SIGNATURE = "void(int64,int64,int64,int64)"
ENTRY_SIGNATURE = "void(int64,int64)"
Body = Callable[[int, int, int, int], None]
F = TypeVar("F", bound=Callable[..., Any])
_made: dict[int, Kernel] = {}  # by address
UNUSED = frozenset({"NopythonRewrites", "InlineOverloads"})  # steps for arrays, which kernels have none of
FOR_CLOSURES = "InlineClosureLikes"
LOOK_UP = "get_call_type"
_generating: dict[str, threading.RLock] = {}  # by module: one in `sys.modules` may not be complete yet
_signatures: dict[tuple[int, tuple[types.Type, ...]], tuple[types.BaseFunction, object]] = {}


class KernelCompiler(Compiler):
    """Numba's steps from a kernel's function to its machine code, without those that no kernel needs."""

    def define_pipelines(self) -> list[object]:
        """What Numba takes these steps from."""
        state = self.state
        steps = DefaultPassBuilder.define_nopython_pipeline(state)
        unused = UNUSED if _has_closures(state.func_id.code) else UNUSED | {FOR_CLOSURES}
        steps.passes = [step for step in steps.passes if step[0].__name__ not in unused]
        return [steps]


def _has_closures(code: CodeType) -> bool:
    """Whether a function has functions inside, or comprehensions."""
    return any(isinstance(constant, CodeType) for constant in code.co_consts)


@contextmanager
def remember_signatures() -> Iterator[None]:
    """Look the signature of an operator or intrinsic up once per process for arguments of the same types.

    Numba tries up to twenty templates for each `+` in a function, and again where it writes its instructions.
    """
    plain = types.BaseFunction.get_call_type

    def look_up(
        self: types.BaseFunction,
        context: Context,
        args: tuple[types.Type, ...],
        kws: Mapping[str, types.Type],
    ) -> object:
        if kws or context is not cpu_target.typing_context:
            return plain(self, context, args, kws)
        key = id(self), tuple(args)
        if key not in _signatures:  # which keeps `self`, so that no other one gets its id
            _signatures[key] = self, plain(self, context, args, kws)
        return _signatures[key][1]

    with global_compiler_lock:  # so no other thread compiles meanwhile
        setattr(types.BaseFunction, LOOK_UP, look_up)
        try:
            yield
        finally:
            setattr(types.BaseFunction, LOOK_UP, plain)


def inline(function: F) -> F:
    """Decorator of a function that only kernels call: compiled into each of them, and kept as a part of them.

    Python itself cannot call it: the code that unboxes arguments would take as long to make as the function.
    """
    options = {"error_model": "numpy", "boundscheck": False, "cache": False, **BARE}
    made: F = njit(pipeline_class=KernelCompiler, **options)(function)
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
            signature = normalize_signature(self.signature)
            made: Any = CFunc(self.function, signature, {}, options, pipeline_class=KernelCompiler)
            made._cache = found
            # A compiler's trees are large, and none of them is garbage yet.
            with no_collections(), remember_signatures():
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
    """A module of kernels from generated source: register tiles have no loops over registers in Python.

    Of two threads that need the same one at once, the second waits until it is complete.
    """
    title = f"plait_generated_{name}_{sha256(source.encode()).hexdigest()[:12]}"
    with _generating.setdefault(title, threading.RLock()):  # of its own: sources import other modules
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
