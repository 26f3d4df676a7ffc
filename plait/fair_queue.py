"""Fair queues: clients take turns, and none waits behind all that another has sent; shared threads."""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Generator, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Generic, ParamSpec, TypeVar

from msgspec import Struct, field

from plait.errors import CapacityError

T = TypeVar("T")
P = ParamSpec("P")
current_client: ContextVar[str] = ContextVar("current_client", default="")
"""The client that the work in progress is for: an API key's name, or a client's address."""


class Lanes(Generic[T]):
    """Items that wait, in a lane for each key. Lanes take turns; in a lane the first is first. Not locked."""

    def __init__(self) -> None:
        self._lanes: OrderedDict[str, deque[T]] = OrderedDict()

    def put(self, key: str, item: T) -> None:
        """Let an item wait behind the others of its key."""
        self._lanes.setdefault(key, deque()).append(item)

    def take(self, skipped: Collection[str] = ()) -> tuple[str, T] | None:
        """The next item with its key, of a lane that is not `skipped`; None: there is none."""
        key = next((key for key in self._lanes if key not in skipped), None)
        if key is None:
            return None
        lane = self._lanes.pop(key)
        item = lane.popleft()
        if lane:
            self._lanes[key] = lane  # behind all others
        return key, item

    def drop(self, key: str, item: T) -> None:
        """Take an item out of a lane, if it is there."""
        lane = self._lanes.get(key)
        if lane is not None and item in lane:
            lane.remove(item)
            if not lane:
                del self._lanes[key]

    def count(self, key: str) -> int:
        """How many items of a key wait."""
        return len(self._lanes.get(key, ()))


class FairQueue(Lanes[T]):
    """Lanes by client, of which each has at most `each` items in work. Not locked."""

    def __init__(self, each: int) -> None:
        super().__init__()
        self._each, self._working = each, Counter[str]()

    def take(self, skipped: Collection[str] = ()) -> tuple[str, T] | None:
        """The next item and its client, which goes to the end of the line; `done` must follow."""
        busy = [who for who, count in self._working.items() if count >= self._each]
        found = super().take([*skipped, *busy])
        if found is not None:
            self._working[found[0]] += 1
        return found

    def end_work(self, who: str) -> None:
        self._working[who] -= 1
        if not self._working[who]:
            del self._working[who]


class Turns:
    """Deals out `places` to work at, from 0, of which one client has at most `each`. Thread-safe."""

    def __init__(self, places: int, each: int) -> None:
        self._free, self._queue = list(range(places)), FairQueue[_Turn](each)
        self._lock = threading.Lock()

    @contextmanager
    def take(self, wait_s: float, refusal: str) -> Iterator[int]:
        """A place for `current_client`, the lowest that is free. Raises CapacityError(refusal)."""
        turn, who = _Turn(), current_client.get()
        with self._lock:
            self._queue.put(who, turn)
            self._deal()
        if not turn.came.wait(wait_s):
            with self._lock:
                if turn.place is None:
                    self._queue.drop(who, turn)
                    raise CapacityError(refusal)
        place = turn.place
        assert place is not None
        try:
            yield place
        finally:
            with self._lock:
                self._free.append(place)
                self._queue.end_work(who)
                self._deal()

    def _deal(self) -> None:
        while self._free and (found := self._queue.take()):
            turn = found[1]
            turn.place = min(self._free)
            self._free.remove(turn.place)
            turn.came.set()


class _Turn(Struct, eq=False):
    """A client's turn, which waits for a place."""

    came: threading.Event = field(default_factory=threading.Event)
    place: int | None = None


def capture_call(call: Callable[[], T]) -> T:
    """What `call` returns or raises. A StopIteration becomes a RuntimeError: an await would hang."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError("StopIteration where no iterator is read") from error


class FairThreads(Executor):
    """An executor in which clients take turns: none waits behind all that another has sent.

    `num_threads`, of which one `current_client` has at most `each` at once; what waits holds no thread.
    """

    def __init__(self, num_threads: int, each: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, name)
        self._queue = FairQueue[tuple[Future[Any], Callable[[], object]]](each)
        self._lock = threading.Lock()

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        with self._lock:
            self._queue.put(current_client.get(), (future, partial(fn, *args, **kwargs)))
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
                self._queue.end_work(who)
            del found, future, call  # an idle thread must hold no request

    def _next(self) -> tuple[str, tuple[Future[Any], Callable[[], Any]]] | None:
        with self._lock:
            return self._queue.take()


Slices = Generator[None, None, T]  # yields between slices, returns the result
NUM_THREADS = 2
IDLE_S = 10.0  # after which a thread without work ends


class _Job(Struct, frozen=True):
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
        import asyncio  # not at once: commands have no event loop, and would start later for it

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
            current_client.set(key)  # what a slice waits for (a template's child) is shared fairly, too
            is_done = job.is_done_after_a_slice()
            with self._changed:
                self._queue.end_work(key)
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
