"""Launches of Triton kernels: enqueued on the stream, and run there in Triton's interpreter.

With CUDA_STAND_IN_COMPILE=1 each kernel is also compiled to machine code and goes through Triton's launcher,
so what the compiler or the launcher refuses shows. Triton is changed from inside (version 3.7).
"""

from __future__ import annotations

import os
import threading
from functools import cache
from typing import Any

import torch
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


def _run(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
    """`JITFunction.run`: compile if that is requested, and enqueue the kernel on the current stream."""
    from cuda_stand_in.device import enqueue, host_view

    kernel = _launch(self, *args, grid=grid, warmup=warmup, **kwargs) if COMPILES or warmup else None
    if warmup:
        return kernel
    for value in tree_flatten((args, kwargs))[0]:
        if isinstance(value, torch.Tensor) and not value.is_cuda:
            raise ValueError(f"{self.fn.__name__} got a tensor of the host, which no GPU can read")
    host, host_kwargs = tree_map(
        lambda value: host_view(value) if isinstance(value, torch.Tensor) else value, (args, kwargs)
    )

    def interpret() -> None:
        _thread.interprets = True
        try:
            _make_interpreted(self.fn).run(*host, grid=grid, warmup=False, **host_kwargs)
        finally:
            _thread.interprets = False

    enqueue(interpret)
    return kernel


def _call_inside(self: Any, *args: Any, **kwargs: Any) -> Any:
    """`JITFunction.__call__`: inside an interpreted kernel a function is interpreted, too."""
    if not getattr(_thread, "interprets", False):
        return _call(self, *args, **kwargs)
    scope = interpreter._patch_lang(self.fn)
    try:
        return _make_interpreted(self.fn).rewrite()(*args, **kwargs)
    finally:
        scope.restore()


def install() -> None:
    """Change Triton in this process."""
    JITFunction.run = _run
    JITFunction.__call__ = _call_inside
    for name, method in make_changes().items():
        setattr(interpreter.InterpreterBuilder, name, method)
