"""The engine loop: a thread that owns an engine. Requests arrive from any thread, events leave on its own."""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import cached_property, partial
from typing import TYPE_CHECKING

from plait.engine.admission import OnEvent
from plait.engine.core import Engine
from plait.engine.fingerprint import NO_FINGERPRINT
from plait.errors import DeviceLost, EngineClosing, EngineError, QueueFull
from plait.request import Request

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry

STALLED_S = 300.0  # a step of a large model on a slow CPU takes minutes; none takes longer than this
JOIN_GRACE_S = 5.0  # a last step may still be running when the time to drain is over
Command = Callable[[], None]
log = logging.getLogger("plait.engine")


class EngineLoop:
    """Runs an engine while there is work and sleeps when there is none. Started at construction.

    Every method is safe from any thread. `num_rounds` grows with every step. While `has_work` and it does not
    grow, the engine hangs, and after `STALLED_S` it is not `healthy`. If an exception escapes the engine,
    open requests end with it, and none is taken any more. `on_end` is called on the engine's thread after the
    last step. When it is idle after work, it has the engine audit its accounting, once.
    """

    loading: None = None  # it was loaded before there was a loop
    # No server reports these of an engine in this process.
    fingerprint, device_nbytes = NO_FINGERPRINT, 0

    def __init__(self, engine: Engine, *, on_end: Callable[[], None] | None = None) -> None:
        self.engine, self._on_end, limits = engine, on_end, engine.scheduler.limits
        self.max_open = limits.max_waiting + limits.max_num_seqs  # requests at once, running or waiting
        self.longest = engine.scheduler.longest  # tokens of the longest sequence that memory holds
        self.num_rounds = 0
        self.fault: BaseException | None = None
        self._step_began: float | None = None
        self._wake = threading.Condition()
        self._commands: deque[Command] = deque()
        self._arriving = 0
        self._closing = False
        self._drain_until = 0.0
        self._thread = threading.Thread(target=self._run, name="plait-engine", daemon=True)
        self._thread.start()
        # A thread inside torch while Python ends would abort the process.
        self._abandon = partial(self.close, drain=False)
        atexit.register(self._abandon)

    @cached_property
    def registry(self) -> CollectorRegistry:
        """The engine's metrics, to be scraped from any thread."""
        from plait.engine.metric_registry import make_registry  # its library takes a twentieth of a startup

        return make_registry(self.engine.metrics.families)

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Hand over a request; `on_event` is called on the engine's thread and must only pass events on.

        Raises QueueFull, and EngineError if the engine is closed or dead. What `Engine.submit` rejects
        arrives as events with finish_reason "error".
        """
        arrived = self.engine.clock()
        with self._wake:
            self.check_capacity()
            self._arriving += 1
            self._commands.append(lambda: self._submit(request, on_event, arrived))
            self._wake.notify()

    def check_capacity(self) -> None:
        """Raises QueueFull or EngineError if any request that came now would be rejected."""
        if self.fault is not None:
            raise EngineError(f"the engine has stopped after a fault: {self.fault}") from self.fault
        if self._closing:
            raise EngineClosing("the engine is closing and takes no more requests")
        if not self.engine.scheduler.has_capacity(self._arriving):
            most = self.engine.scheduler.limits.max_waiting
            raise QueueFull(f"max_waiting ({most}) requests wait already; try again later")

    def cancel(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its choices, before the next plan. Safe after its end, and after close."""
        if not self._thread.is_alive():
            return
        with self._wake:
            self._commands.append(lambda: self.engine.cancel(request_id, index))
            self._wake.notify()

    def change_adapter(self, name: str, path: str | None) -> None:
        """Load an adapter, or with None unload it, between two steps; waits. Raises as the table does."""
        done: Future[None] = Future()

        def change() -> None:
            try:
                self.engine.adapters.change(name, path, self.engine.used_adapters)
                done.set_result(None)
            except Exception as error:
                done.set_exception(error)

        with self._wake:
            if self.fault is not None or self._closing:
                raise EngineError("the engine is closing and loads no adapter")
            self._commands.append(change)
            self._wake.notify()
        done.result()

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        """Stop. With `drain`, open requests get `timeout_s` seconds; what is left then is cancelled.

        Returns whether the thread has ended: False means that a step hangs. May be called twice.
        """
        with self._wake:
            deadline = time.monotonic() + (timeout_s if drain else 0.0)
            self._drain_until = min(deadline, self._drain_until) if self._closing else deadline
            self._closing = True
            self._wake.notify()
        atexit.unregister(self._abandon)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(deadline - time.monotonic(), 0.0) + JOIN_GRACE_S)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """Whether requests are taken: running, not closing, no fault, and no step that hangs."""
        began = self._step_began
        hangs = began is not None and time.monotonic() - began > STALLED_S
        return self._thread.is_alive() and not self._closing and self.fault is None and not hangs

    @property
    def live(self) -> bool:
        """As `healthy`: there is no other engine that could take its place."""
        return self.healthy or self._closing

    @property
    def has_work(self) -> bool:
        return bool(self._commands) or self.engine.has_work

    def follow_log_levels(self) -> None:
        """Does nothing, because the engine logs with this process's own levels."""

    def stats(self) -> Mapping[str, int]:
        """The engine's numbers as they are now."""
        return self.engine.stats()

    def _submit(self, request: Request, on_event: OnEvent, arrived: float) -> None:
        try:
            self.engine.submit(request, on_event, arrived)
        except Exception as error:
            self.engine.refuse(request, on_event, error)
        finally:
            with self._wake:
                self._arriving -= 1

    def _run(self) -> None:
        try:
            while self._obey():
                self._step_began = time.monotonic()
                self.engine.step_or_wait()
                self._step_began = None
                self.num_rounds += 1
            end_requests(self.engine)
        except BaseException as error:
            self._die(error)
        finally:
            if self._on_end:
                self._on_end()

    def _obey(self) -> bool:
        """Run the commands since the last step, sleeping while there is nothing to do. False: stop."""
        while True:
            commands = self._next_commands()
            for command in commands:
                command()
            if self._closing and (not self.engine.has_work or time.monotonic() >= self._drain_until):
                with self._wake:
                    if not self._commands:
                        return False
            elif self.engine.has_work:
                return True

    def _next_commands(self) -> deque[Command]:
        """The next commands; waits for them while there is no other work, and uses that time for an audit."""
        with self._wake:
            while not self._commands and not self.engine.has_work and not self._closing:
                if not self._wake.wait(self.engine.idle_s):
                    break
            commands, self._commands = self._commands, deque()
        if not commands and not self.engine.has_work and not self._closing:
            self.engine.audit()
        return commands

    def fail(self, error: BaseException) -> None:
        """Open requests end with this error, and none is taken any more: the engine's thread waits for ever.

        For other threads.
        """
        log.error("the engine waits for ever, and takes no more requests: %s", error)
        self._die(error)

    def _die(self, error: BaseException) -> None:
        with self._wake:
            if self.fault is not None:
                return
            self.fault = error
            commands, self._commands = self._commands, deque()
        kind = type(error) if isinstance(error, DeviceLost) else EngineError
        shown = kind(f"the engine stopped: {type(error).__name__}: {error}")
        shown.__cause__ = error
        self.engine.fail_all(shown)
        for command in commands:  # requests on their way become open, and end like the rest
            try:
                command()
            except Exception:  # none of them may keep the others from their end
                log.exception("a command to an engine that has stopped failed")
        self.engine.fail_all(shown)


def end_requests(engine: Engine) -> None:
    """Cancel every open request, and make the copies for the disk that are left. The last call."""
    for request_id in engine.open_requests:
        engine.cancel(request_id)
    if engine.scheduler.memory.disk:
        engine.step()
