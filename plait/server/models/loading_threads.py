"""Threads that load and close models, because both block; what they find comes back on the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from plait.server.gateway.request_context import LoadingState
from plait.server.models.catalog import ModelEntry

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

Report = Callable[[str, int, int], None]
Load = Callable[[ModelEntry, Report], "Front"]
ENDING_S = 20.0  # a thread that loads gets so long to end when the server stops


class LoadingThreads:
    """One thread for each model that is being loaded or closed."""

    def __init__(self, load: Load) -> None:
        self._load = load
        self._lock, self._threads = threading.Lock(), set[threading.Thread]()

    def load(
        self,
        entry: ModelEntry,
        loading: LoadingState,
        on_front: Callable[[Front, float], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        """Load a model; `on_front` gets it with the seconds that it took, or `on_error` the reason."""
        self._start(partial(self._run_load, asyncio.get_running_loop(), entry, loading, on_front, on_error))

    def close(self, front: Front, on_gone: Callable[[], None]) -> None:
        """End a model's engine, and forget its text side. The caller keeps no reference to it."""
        self._start(partial(_run_close, asyncio.get_running_loop(), [front], on_gone))

    def join(self) -> None:
        """Wait until all have ended, for a bounded time."""
        with self._lock:
            threads = [*self._threads]
        deadline = time.monotonic() + ENDING_S
        for thread in threads:
            thread.join(max(deadline - time.monotonic(), 0.0))

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._threads.discard(threading.current_thread())

        thread = threading.Thread(target=run, name="plait-model", daemon=True)
        with self._lock:
            self._threads.add(thread)
        thread.start()

    def _run_load(
        self,
        loop: asyncio.AbstractEventLoop,
        entry: ModelEntry,
        loading: LoadingState,
        on_front: Callable[[Front, float], None],
        on_error: Callable[[BaseException], None],
    ) -> None:
        began = time.monotonic()
        try:
            entry.check_contained()
            front = self._load(entry, loading.report)
        except BaseException as error:
            _call(loop, partial(on_error, error))
            return
        # From `arrive` on, the state of its loading has it, and the pool finds it there when it is closed.
        if not loading.arrive(front):
            front.close(drain=False)
            _call(loop, partial(on_error, InterruptedError("loading was cancelled")))
        else:
            _call(loop, partial(on_front, front, time.monotonic() - began))


def _run_close(loop: asyncio.AbstractEventLoop, holder: list[Front], on_gone: Callable[[], None]) -> None:
    try:
        holder.pop().close(drain=False)
        gc.unfreeze()
        gc.collect()  # a front is in circles; its vocabulary may have a hundred megabytes
        gc.freeze()
    finally:
        _call(loop, on_gone)


def _call(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:  # the loop has ended: the server has stopped, and closes what there is
        return
