"""Compute answers in slices, on a few threads that serve the API keys by turns.

Such work holds Python's interpreter, and with it the event loop of every stream. So there are few threads,
and a key has one of them at a time. Work of many tokens gives its thread back after each slice.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Generator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from plait.errors import CapacityError
from plait.fair_queue import FairQueue, asker

T = TypeVar("T")
Slices = Generator[None, None, T]  # yields between slices, returns the result
NUM_THREADS = 2
IDLE_S = 10.0  # after which a thread without work ends


@dataclass(frozen=True, slots=True)
class _Job:
    work: Slices[Any]
    done: Future[Any]

    def is_done_after_a_slice(self) -> bool:
        """Run one slice. What it returns or raises is the job's result."""
        if self.done.cancelled():
            self.work.close()
            return True
        try:
            next(self.work)
            return False
        except StopIteration as end:
            result, error = end.value, None
        except BaseException as raised:
            result, error = None, raised
        if self.done.set_running_or_notify_cancel():
            if error is None:
                self.done.set_result(result)
            else:
                self.done.set_exception(error)
        return True


class SliceTurns:
    """Jobs by key. The keys' turns go round, and so do the jobs of one key. Threads start when needed."""

    def __init__(self, num_threads: int = NUM_THREADS) -> None:
        self._num_threads = num_threads
        self._changed = threading.Condition()
        self._queue = FairQueue[_Job](each=1)
        self._threads: set[threading.Thread] = set()

    async def run(self, key: str, work: Slices[T]) -> T:
        """The result of `work`, or what it raises. If this is cancelled, no more slices of it are run.

        Raises CapacityError if the system gives no thread.
        """
        job = _Job(work, Future())
        with self._changed:
            self._add_thread()
            self._queue.put(key, job)
            self._changed.notify()
        result: T = await asyncio.wrap_future(job.done)
        return result

    def _add_thread(self) -> None:
        """Start another thread unless there are enough. The caller holds the lock."""
        if len(self._threads) >= self._num_threads:
            return
        thread = threading.Thread(target=self._serve, name="plait-turns", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            if not self._threads:  # else those that run take the work
                raise CapacityError(f"no thread can be started: {error}; try again later") from error
        else:
            self._threads.add(thread)

    def _serve(self) -> None:
        while (found := self._next()) is not None:
            key, job = found
            asker.set(key)  # what a slice waits for (a template's child) is shared fairly, too
            is_done = job.is_done_after_a_slice()
            with self._changed:
                self._queue.done(key)
                if not is_done:
                    self._queue.put(key, job)
                self._changed.notify()

    def _next(self) -> tuple[str, _Job] | None:
        """Wait for a key with a job that no other thread works for; its next turn is after all others'.

        None: there was none for a while, and this thread ends.
        """
        is_late = False
        with self._changed:
            while (found := self._queue.take()) is None:
                if is_late:
                    self._threads.discard(threading.current_thread())
                    return None
                is_late = not self._changed.wait(IDLE_S)  # work may come at that very moment
            return found
