"""Launches of Triton kernels: each goes through `launch`, so that a recording of a step can see it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Protocol

from torch import Tensor

Grid = tuple[int, ...]


class LaunchWatcher(Protocol):
    """Sees launches in place of the device; it has to call `run` itself, now and when it likes again."""

    def launched(
        self, name: str, run: Callable[[], None], tensors: Sequence[Tensor], rest: tuple[object, ...]
    ) -> None: ...


_watchers: list[LaunchWatcher] = []
_captures: list[None] = []  # one for each capture of a step that is under way


def launch(kernel: Any, grid: Grid, *args: object, **constants: object) -> None:
    """Run a kernel over a grid, an empty one too. Arguments are tensors and numbers; constants may be launch
    options."""
    if 0 in grid:
        return
    run = partial(kernel[grid], *args, **constants)
    if not _watchers:
        run()
        return
    tensors = [value for value in args if isinstance(value, Tensor)]
    numbers = tuple(value for value in args if not isinstance(value, Tensor))
    _watchers[-1].launched(kernel.fn.__name__, run, tensors, (grid, numbers, *sorted(constants.items())))


@contextlib.contextmanager
def capture_launches() -> Iterator[None]:
    """A step is captured meanwhile, or runs before that so that its kernels are compiled."""
    _captures.append(None)
    try:
        yield
    finally:
        _captures.pop()


def is_captured() -> bool:
    """Whether what runs now will be replayed, so that it must neither wait nor need the host."""
    return bool(_captures)


@contextlib.contextmanager
def watch_launches(watcher: LaunchWatcher) -> Iterator[None]:
    """Give launches to `watcher` meanwhile; of several, the innermost gets them."""
    _watchers.append(watcher)
    try:
        yield
    finally:
        _watchers.remove(watcher)
