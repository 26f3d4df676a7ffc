"""Launches of Triton kernels: enqueued on the stream, and run there in Triton's interpreter.

With CUDA_STAND_IN_COMPILE=1 each kernel is also compiled to machine code and goes through Triton's launcher,
so what the compiler or the launcher refuses shows. Triton is changed from inside (version 3.7).
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch.utils._pytree import tree_flatten, tree_map
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction

from cuda_stand_in.interpreter import make_changes

COMPILES = os.environ.get("CUDA_STAND_IN_COMPILE") == "1"

_thread = threading.local()
_launch = JITFunction.run
_call = JITFunction.__call__


@cache
def _make_interpreted(function: Any) -> Any:
    return interpreter.InterpretedFunction(function)


@cache
def _find_languages(function: Any) -> tuple[bool, bool]:
    """Whether a function sees `triton.language`, and its `core`, by any name: the two that are changed."""
    seen = [value for value in function.__globals__.values() if value is tl or value is tl.core]
    return tl in seen, tl.core in seen


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """`JITFunction.run`: compile if that is requested, and enqueue the kernel on the current stream."""
    from cuda_stand_in.device import enqueue, host_view

    kernel = _launch(self, *args, grid=grid, warmup=warmup, **kwargs) if COMPILES or warmup else None
    if warmup:
        return kernel
    for value in tree_flatten((args, kwargs))[0]:
        if isinstance(value, torch.Tensor) and not value.is_cuda:
            raise ValueError(f"{self.fn.__name__} got a tensor of the host, which no GPU can read")
    known = {name: value for name, value in kwargs.items() if name != "launch_pdl"}  # not to the interpreter
    host, host_kwargs = tree_map(
        lambda value: host_view(value) if isinstance(value, torch.Tensor) else value, (args, known)
    )

    def interpret() -> None:
        # What the kernel itself sees, the interpreter changes, and changes back.
        _thread.patches = {_find_languages(self.fn): interpreter._LangPatchScope()}
        try:
            _make_interpreted(self.fn).run(*host, grid=grid, warmup=False, **host_kwargs)
        finally:
            for scope in reversed(_thread.patches.values()):
                scope.restore()
            _thread.patches = None

    enqueue(interpret)
    return kernel


def _call_inside(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`JITFunction.__call__`: inside an interpreted kernel a function is interpreted, too.

    What it sees of Triton's language stays changed until the kernel ends: a change takes milliseconds.
    """
    patches = getattr(_thread, "patches", None)
    if patches is None:
        return _call(self, *args, **kwargs)
    seen = _find_languages(self.fn)
    if seen not in patches:
        patches[seen] = interpreter._patch_lang(self.fn)
    return _make_interpreted(self.fn).rewrite()(*args, **kwargs)


def install() -> None:
    """Change Triton in this process."""
    JITFunction.run = _run
    JITFunction.__call__ = _call_inside
    for name, method in make_changes().items():
        setattr(interpreter.InterpreterBuilder, name, method)
    # Sums of whole numbers wrap, as on a GPU. The interpreter's look at each takes a quarter of its time,
    # and its table of dtypes, made for each value, another tenth.
    options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    interpreter.interpreter_builder.options = options
    find_dtype = cache(interpreter._get_np_dtype)
    interpreter._get_np_dtype = lambda kind: find_dtype(tl.uint64 if kind.scalar.is_ptr() else kind.scalar)
