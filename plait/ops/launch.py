"""Launches of Triton kernels: each goes through `launch`, so that a recording of a step can see it.

On a GPU that is right in the trial of it (`launch_chain`), a kernel that waits for those before it may begin
before they have ended: programmatic dependent launch, `kernels.triton.dependent_launch`.
"""

from __future__ import annotations

import contextlib
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import cache, partial
from typing import Any, Protocol

import torch
from torch import Tensor

from plait.errors import KernelFailed, clip_text

Grid = tuple[int, ...]
MAX_REASON = 300  # characters of a compiler's error
# Of every launch that says nothing else. What Triton does by default has changed between versions: whether a
# product and a sum are one instruction, which decides bits, must not depend on the version that is installed.
LAUNCH_OPTIONS: Mapping[str, object] = {"enable_fp_fusion": True}
# A statement of the kernel itself, in no branch: each of its programs waits for the kernels before it.
WAITS = re.compile(r"^ {4}await_previous\(\)$", re.MULTILINE)


class LaunchWatcher(Protocol):
    """Sees launches in place of the device; it has to call `run` itself, now and when it likes again."""

    def record_launch(
        self, name: str, run: Callable[[], None], tensors: Sequence[Tensor], rest: tuple[object, ...]
    ) -> None: ...


class _ThreadState(threading.local):
    """What watches the launches of this thread: another engine of the process goes on unseen.

    `captures`: how many captures of a step are under way.
    """

    def __init__(self) -> None:
        self.watchers: list[LaunchWatcher] = []
        self.captures = 0


_here = _ThreadState()
_dependent = set[int]()  # numbers of the GPUs on which kernels may begin before those before them have ended


def launch(kernel: Any, grid: Grid, *args: object, **constants: object) -> None:
    """Run a kernel over a grid, an empty one too. Arguments are tensors and numbers; constants may be launch
    options.

    It runs on the device of its first tensor, whichever device this thread has selected: Triton itself
    launches on that one, where memory of another cannot be read. Raises KernelFailed if Triton cannot compile
    the kernel for these arguments, or the device has not what it needs (shared memory, registers).
    """
    if 0 in grid:
        return
    own = kernel[grid], kernel.fn.__name__, waits_for_previous(kernel)
    run = partial(_run_where_it_lies, *own, args, {**LAUNCH_OPTIONS, **constants})
    if not _here.watchers:
        run()
        return
    tensors = [value for value in args if isinstance(value, Tensor)]
    numbers = tuple(value for value in args if not isinstance(value, Tensor))
    _here.watchers[-1].record_launch(
        kernel.fn.__name__, run, tensors, (grid, numbers, *sorted(constants.items()))
    )


def _run_where_it_lies(
    run: Callable[..., object], name: str, waits: bool, args: Sequence[object], constants: dict[str, object]
) -> None:
    """waits: whether the kernel waits for all before it."""
    first = next((value for value in args if isinstance(value, Tensor)), None)
    is_here = first is None or not first.is_cuda or first.get_device() == torch.cuda.current_device()
    if first is not None and first.get_device() in _dependent and waits:
        constants["launch_pdl"] = True
    try:
        with nullcontext() if first is None or is_here else torch.cuda.device(first.device):
            run(*args, **constants)
    except Exception as error:
        if not type(error).__module__.startswith("triton."):
            raise
        text = clip_text(" ".join(str(error).split()), MAX_REASON)
        raise KernelFailed(
            f"the kernel {name} cannot run at this model's sizes on this GPU ({text}); "
            "`--ops reference` computes with torch alone"
        ) from error


def permit_dependent(device: torch.device, is_permitted: bool) -> bool:
    """Let kernels of a GPU begin before those before them have ended, or not; whether they could so far."""
    if device.type != "cuda":
        return False
    number = torch.cuda.current_device() if device.index is None else device.index
    was_permitted = number in _dependent
    (_dependent.add if is_permitted else _dependent.discard)(number)
    return was_permitted


@cache
def waits_for_previous(kernel: object) -> bool:
    """Whether a kernel waits for all before it. One of Triton's interpreter has no source, and runs alone."""
    return WAITS.search(getattr(kernel, "src", "")) is not None


@contextlib.contextmanager
def capture_launches() -> Iterator[None]:
    """A step is captured meanwhile, or runs before that so that its kernels are compiled."""
    _here.captures += 1
    try:
        yield
    finally:
        _here.captures -= 1


def is_captured() -> bool:
    """Whether what runs now will be replayed, so that it must neither wait nor need the host."""
    return _here.captures > 0


@contextlib.contextmanager
def watch_launches(watcher: LaunchWatcher) -> Iterator[None]:
    """Give launches to `watcher` meanwhile; of several, the innermost gets them."""
    _here.watchers.append(watcher)
    try:
        yield
    finally:
        _here.watchers.remove(watcher)
