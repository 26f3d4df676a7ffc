"""The models of a pool in memory: which are loaded, which wait to be, and the requests that hold them.

Everything here runs on the event loop's thread, but for `close`. Times are those of `clock`, in seconds.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from plait.config import ServerConfig
from plait.errors import ModelNotFound, PlaitError, QueueFull
from plait.server.gateway.request_context import LoadingState
from plait.server.http.errors import NotReady
from plait.server.models.catalog import ModelEntry
from plait.server.models.file_facts import FileFacts, read_file_facts
from plait.server.models.hosted import HostedModel
from plait.server.models.loading_threads import Load, LoadingThreads
from plait.server.models.placement import RESIDENCE_S, MemoryBudget, place
from plait.server.models.pool_metrics import PoolMetrics
from plait.server.ollama.wire import read_keep_alive

if TYPE_CHECKING:
    from plait.frontend.frontend import Front

logger = logging.getLogger("plait.server")
Clock = Callable[[], float]
Measure = Callable[["Front"], int | None]
ReadFiles = Callable[[ModelEntry], FileFacts | None]
MAX_WAITING = 256  # requests that wait for one model to be loaded
WAIT_S = 600.0  # for so long a request waits: as long as OpenAI's clients do
MAX_QUEUED = 16  # models that wait to be loaded
USUAL_KEEP_S = 300.0
PROVEN_S = 60.0  # a model that was loaded for so long is no longer one that fails


class ResidentModels:
    """What is loaded now. `first`: the model without which no server starts; `fault`: why it did not.

    `load` makes a Front, in a thread. `measure`: bytes that its engine holds, None if that is not known.
    `read_files`: what is known of a model without loading it.
    """

    def __init__(
        self,
        config: ServerConfig,
        budget: MemoryBudget,
        load: Load,
        measure: Measure = lambda front: None,
        read_files: ReadFiles | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.budget, self.clock, self._config = budget, clock, config
        self._measure, self._read_files = measure, read_files or read_entry_facts
        self._threads = LoadingThreads(load)
        self.stopping = False
        self.first: HostedModel | None = None
        self.fault: BaseException | None = None
        self.models: dict[str, HostedModel] = {}  # replaced as a whole: other threads read it
        self.queue: list[HostedModel] = []
        self.metrics = PoolMetrics(lambda: [*self.models.values()])
        self._keep_s = USUAL_KEEP_S if config.keep_alive is None else read_keep_alive(config.keep_alive)

    def look_around(self) -> None:
        """Unload what has been idle for its time, and what was lost; measure memory."""
        now = self.clock()
        for model in self.models.values():
            if model.phase != "loaded" or model.front is None:
                continue
            if model.front.fault is not None:
                self.lose(model, model.front.fault)
                continue
            model.held_nbytes = max(model.held_nbytes, self._measure(model.front) or 0)
            if now - model.loaded_s >= PROVEN_S:
                model.failure = None
            self.unload_expired(model, now)
        self.pump()

    def stop(self) -> None:
        """Load nothing any more; requests that wait get an error. Requests that run go on."""
        self.stopping = True
        self.queue.clear()
        for model in self.models.values():
            model.loading.stop()
            self.answer(model, make_stopping_error())

    def close(self) -> None:
        """End every engine; blocks. From any thread."""
        self.stopping = True
        for model in self.models.values():
            model.loading.stop()
            front = model.front or model.loading.front
            if front is not None:
                front.close(drain=False)
        self._threads.join()

    async def learn(self, model: HostedModel) -> None:
        """Read what the files of a model say, once; again if they have changed meanwhile."""
        while not model.is_learned:
            stamp = model.entry.stamp
            found = await asyncio.to_thread(self._read_files, model.entry)
            if model.entry.stamp == stamp:
                model.files, model.is_learned = found, True

    async def hold(self, model: HostedModel) -> Front:
        """The loaded model, held until `_release`. Raises CapacityErrors."""
        if model.front is not None and model.front.fault is not None:
            self.lose(model, model.front.fault)
        if model.front is not None and model.takes_requests:
            model.num_users += 1
            return model.front
        model.check_failure(self.clock())
        if model.phase != "loading" and model not in self.queue and len(self.queue) >= MAX_QUEUED:
            raise QueueFull(f"{MAX_QUEUED} models wait to be loaded already; try again later")
        if len(model.waiters) >= MAX_WAITING:
            raise QueueFull(f"{MAX_WAITING} requests wait for the model {model.name!r}; try again later")
        waiter: asyncio.Future[Front] = asyncio.get_running_loop().create_future()
        model.waiters.append(waiter)
        try:
            await self.learn(model)
            if not waiter.done():
                self._enqueue(model)
            async with asyncio.timeout(WAIT_S):
                return await asyncio.shield(waiter)
        except TimeoutError as error:
            self._leave(model, waiter)
            text = f"the model {model.name!r} was not loaded within {WAIT_S:g} s"
            raise NotReady(f"{text}; try again later") from error
        except BaseException:
            self._leave(model, waiter)
            raise

    def _leave(self, model: HostedModel, waiter: asyncio.Future[Front]) -> None:
        """A request waits no longer; the model may have been given to it meanwhile."""
        if waiter in model.waiters:
            model.waiters.remove(waiter)
        if not waiter.done():
            waiter.cancel()
        elif not waiter.cancelled() and waiter.exception() is None:
            self.release(model, None)
        if model in self.queue and not model.waiters and not model.is_wanted:
            self.queue.remove(model)
            self.pump()

    def release(self, model: HostedModel, keep_s: float | None) -> None:
        """A request has ended. Its keep_alive counts until another request's."""
        model.num_users -= 1
        now = self.clock()
        model.used_s, model.keep_s = now, self._usual_keep_s(model) if keep_s is None else keep_s
        self.unload_expired(model, now)
        if model.num_users == 0 and self.queue:
            self.pump()

    def _usual_keep_s(self, model: HostedModel) -> float:
        return self._keep_s if model.entry.keep_alive_s is None else model.entry.keep_alive_s

    def answer(self, model: HostedModel, outcome: Front | PlaitError) -> None:
        """Give all waiting requests the model, which each of them holds, or an error."""
        waiters, model.waiters = model.waiters, []
        for waiter in waiters:
            if waiter.done():
                continue
            if isinstance(outcome, PlaitError):
                waiter.set_exception(outcome)
            else:
                model.num_users += 1
                waiter.set_result(outcome)

    # Loading and unloading

    def want(self, model: HostedModel) -> None:
        model.is_wanted = True
        self._enqueue(model)

    def _enqueue(self, model: HostedModel) -> None:
        if model not in self.queue and model.phase != "loading":
            model.queued_s = self.clock()
            self.queue.append(model)
        self.pump()

    def pump(self) -> None:
        """Load and unload what is due."""
        if self.stopping:
            return
        for model in [*self.queue]:
            if refusal := self.budget.refusal(model):
                self._drop(model, model.too_large(refusal))
        queue = [model for model in self.queue if model.phase == "unloaded"]
        found = place(queue, self.models.values(), self.budget, self.clock())
        for model in [*self.models.values()]:
            model.yields = model in found.yielding
            if model.front is not None and model.takes_requests and model in self.queue:
                self.queue.remove(model)
                self.answer(model, model.front)
        for model in found.unload:
            self.unload(model, "memory")
        for model in found.start:
            self._begin_load(model)

    def _begin_load(self, model: HostedModel) -> None:
        self.queue.remove(model)
        model.phase, model.is_unwanted = "loading", False
        model.loading = LoadingState(timeout_s=self._config.loading_timeout_s)
        logger.info("%s: loading", model.name)
        self._threads.load(
            model.entry, model.loading, partial(self._arrive, model), partial(self._fail, model)
        )

    def _arrive(self, model: HostedModel, front: Front, seconds: float) -> None:
        """A model is loaded."""
        if self.stopping:
            return  # `close` finds it
        now = self.clock()
        model.phase, model.front, model.is_wanted = "loaded", front, False
        model.loaded_s = model.used_s = now
        model.keep_s = self._usual_keep_s(model)
        model.held_nbytes = max(model.held_nbytes, self._measure(front) or 0)
        model.learn(front)
        self.metrics.record_load(model.name, seconds)
        logger.info("%s: loaded in %.1f s, about %d MiB", model.name, seconds, model.need >> 20)
        self.answer(model, front)
        if model.is_unwanted and model.is_idle:
            self.unload(model, model.unload_reason)
        self.pump()

    def _fail(self, model: HostedModel, error: BaseException) -> None:
        """A model could not be loaded, or need not be any more."""
        model.phase = "unloaded"
        if self.stopping:
            return
        if model.loading.stopping:  # it was cancelled; requests that came after that have it loaded again
            if model.has_changed:
                model.forget_engine()
            if model.waiters or model.is_wanted:
                self._enqueue(model)
            return
        model.fail(error, self.clock())
        self.metrics.record_load(model.name, None)
        logger.error("%s: it could not be loaded: %s", model.name, error)
        pause_s = model.failure.until_s - self.clock() if model.failure is not None else 0.0
        if model is self.first and model.known is None:
            self.fault = error
        self._drop(model, model.unavailable(f"it is tried again in {pause_s:.0f} s at the earliest", pause_s))
        if model.has_changed:
            model.forget_engine()
        self.pump()

    def _drop(self, model: HostedModel, error: PlaitError) -> None:
        """A model is not loaded: requests that wait for it get the error."""
        if model in self.queue:
            self.queue.remove(model)
        model.is_wanted = False
        if model is self.first and model.known is None and self.fault is None:
            self.fault = error
        self.answer(model, error)

    def forget(self, model: HostedModel) -> None:
        """A model's files are gone, and it has no engine: it is no model of the pool any more."""
        model.has_vanished = True
        self._drop(model, make_vanished_error(model))

    def lose(self, model: HostedModel, fault: BaseException) -> None:
        """A model's engine is given up. Its open requests have their errors already."""
        model.fail(fault, self.clock())
        logger.error("%s: its engine was lost: %s", model.name, fault)
        self.unload(model, "lost")

    def unload_expired(self, model: HostedModel, now: float) -> None:
        is_due = model.is_unwanted or model.yields or now >= model.expires_s(RESIDENCE_S)
        if model.is_idle and is_due:
            self.unload(model, model.unload_reason)

    def unload(self, model: HostedModel, reason: str) -> None:
        front, model.front, model.loading = model.front, None, LoadingState()
        model.phase, model.yields = "closing", False
        if reason != "lost":
            model.failure = None
        self.metrics.record_unload(model.name, reason)
        logger.info("%s: unloading (%s)", model.name, reason)
        if front is not None:
            self._threads.close(front, partial(self._forget, model))

    def _forget(self, model: HostedModel) -> None:
        """A model's engine has ended."""
        model.phase, model.is_unwanted = "unloaded", False
        if model.has_changed:
            model.forget_engine()
        if model.has_vanished:
            self.models = {name: one for name, one in self.models.items() if one is not model}
            self.forget(model)
        elif model.waiters:
            self._enqueue(model)
        self.pump()


def read_entry_facts(entry: ModelEntry) -> FileFacts | None:
    """What a model's files say; None if they cannot be found: loading it says why."""
    try:
        entry.check_contained()
        return read_file_facts(entry.source, entry.engine, entry.tool_call_parser, entry.reasoning_parser)
    except (PlaitError, OSError):
        return None


def make_stopping_error() -> NotReady:
    return NotReady("the server is stopping and takes no more requests")


def make_vanished_error(model: HostedModel) -> ModelNotFound:
    return ModelNotFound(f"the model {model.name!r} is no longer in the models' folder", "model")
