"""Work for clients that may disconnect: tasks that end with them, and threads that they share fairly."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.types import Receive

from plait.errors import Cancelled, CapacityError
from plait.fair_queue import FairQueue, asker

T = TypeVar("T")
P = ParamSpec("P")


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client goes away. Raises Cancelled then.

    The body must have been read, so that `receive` returns only when the client leaves.
    """
    running = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(wait_disconnect(receive))
    try:
        await asyncio.wait({running, watching}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise Cancelled("the client went away")
    finally:
        await cancel_tasks(running, watching)


async def wait_disconnect(receive: Receive) -> None:
    """Wait until the client has disconnected."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def cancel_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def new_id(prefix: str, mark: str = "-") -> str:
    """`prefix`-… with 122 random bits, of letters and digits."""
    return f"{prefix}{mark}{uuid.uuid4().hex}"


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
