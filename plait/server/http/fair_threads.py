"""Threads for work that a request needs before the engine sees it, shared fairly among clients."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from plait.fair_queue import FairQueue, asker

P = ParamSpec("P")
T = TypeVar("T")


def capture_call(call: Callable[[], T]) -> T:
    """What `call` returns or raises. A StopIteration becomes a RuntimeError: an await would hang."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError("StopIteration where no iterator is read") from error


class FairThreads(Executor):
    """An executor in which clients take turns: none waits behind all that another has sent.

    `num_threads`, of which one `asker` has at most `each` at once; what waits holds no thread.
    """

    def __init__(self, num_threads: int, each: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._queue = FairQueue[tuple[Future[Any], Callable[[], Any]]](each)
        self._lock = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._queue.put(asker.get(), (future, partial(fn, *args, **kwargs)))
        self._pool.submit(self._work)
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)

    def _work(self) -> None:
        """Run the calls that may run now. The others are of clients with enough in work, and follow later."""
        while found := self._next():
            who, (future, call) = found
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(capture_call(call))
                except BaseException as error:
                    future.set_exception(error)
            with self._lock:
                self._queue.done(who)
            del found, future, call  # an idle thread must hold no request

    def _next(self) -> tuple[str, tuple[Future[Any], Callable[[], Any]]] | None:
        with self._lock:
            return self._queue.take()
