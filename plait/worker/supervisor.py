"""The thread that keeps an engine process running: starts it, reads its messages, replaces it when it ends.

Everything about a process happens on this thread; others leave commands in its `Mailbox`.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Protocol

from msgspec import Struct

from plait.errors import EngineError, EngineLost, OutOfMemory, PlaitError
from plait.frontend.loop_bridge import wake_together
from plait.worker import protocol
from plait.worker.adapter_changes import AdapterChanges
from plait.worker.child_process import End, Spawned
from plait.worker.request_table import RequestTable
from plait.worker.start_process import StartedProcess, new_spare

TICK_S = 1.0  # between two looks at the signs of life
ASLEEP_S = 5.0  # without a look, this process was stopped itself, and perhaps the engine with it
NOT_STARTED = "it could not be started"
MAX_DEATHS = 6  # of engines in a row, with no token between them and no request to blame
BACKOFF_S = 0.5  # before the third start; twice as long before each further one
LONGEST_BACKOFF_S = 10.0
LOST_BACKOFF_S = 60.0  # between attempts, where an engine that was lost is tried for ever
STABLE_S = 60.0  # an engine that has run so long, or has emitted a token, begins a new row
COUNTS_S = 5.0  # what was counted since is lost with an engine
CLOSE_GRACE_S = 5.0  # a last step may still be running when the time to drain is over
LOGGERS = ("plait", "plait.engine", "plait.step", "plait.trace")
GONE = "its end of the socket is closed"
Command = Callable[["Supervisor"], None]
log = logging.getLogger("plait.engine")


class Patience(Struct, frozen=True, kw_only=True):
    """When a process is taken for dead, in seconds. Generous: a wrong death costs what it has computed.

    `stalled_s`: at one round, a step of a large model on a slow CPU. `frozen_s`: since any thread of it ran.
    `loading_s`: since loading last made progress; kernels are compiled without a report. `goes_on`: an engine
    that ended `MAX_DEATHS` times is tried again and again, with pauses, instead of being given up.
    """

    stalled_s: float = 300.0
    frozen_s: float = 60.0
    loading_s: float = 1800.0
    goes_on: bool = False


class Watcher(Protocol):
    """Receives changes of the engine's state; called on the supervisor's thread.

    `on_message`: progress, headers, metrics. `on_up`: requests are accepted; EngineLost refuses the engine.
    `on_down`: it has ended; `on_charged`: with these requests in its last step, or killed from outside
    (`is_foreign`). `on_lost`: no engine stays up, so requests are rejected until one does. `on_end`: over.
    """

    def on_message(self, message: protocol.FromChild) -> None: ...
    def on_up(self, engine: Spawned, ready: protocol.Ready) -> None: ...
    def on_down(self) -> None: ...
    def on_charged(self, request_ids: tuple[str, ...], is_foreign: bool) -> None: ...
    def on_lost(self, error: EngineLost) -> None: ...
    def on_end(self, error: PlaitError | None) -> None: ...


class Mailbox:
    """Commands for a thread that waits for descriptors."""

    def __init__(self) -> None:
        self.fd, self._wake = os.pipe()
        os.set_blocking(self.fd, False)
        os.set_blocking(self._wake, False)
        self._lock = threading.Lock()
        self._commands: deque[Command] | None = deque()

    def put(self, command: Command) -> bool:
        """Add a command, from any thread. False: commands are not taken any more."""
        with self._lock:
            if self._commands is None:
                return False
            self._commands.append(command)
            with suppress(BlockingIOError):  # full of bytes that have not been read: it wakes anyhow
                os.write(self._wake, b"\0")
            return True

    def take(self) -> deque[Command]:
        """All commands that are there."""
        with self._lock:
            if found := self._commands:  # a read for nothing would give other threads the interpreter
                os.read(self.fd, 1 << 16)  # every byte: each was written with its command
                self._commands = deque()
            return found or deque()

    def close(self) -> deque[Command]:
        """The last commands; none are taken from now on."""
        with self._lock:
            found, self._commands = self._commands or deque(), None
            os.close(self.fd)
            os.close(self._wake)
        return found


class Supervisor:
    """`run` it on a thread of its own. It ends after a call of `close`, or when the engine is given up."""

    def __init__(
        self,
        hello: protocol.Hello,
        watcher: Watcher,
        patience: Patience,
        begun: StartedProcess | None = None,
    ) -> None:
        """`begun`: the first process, started already by a thread that lives at least as long as this one."""
        self._hello, self._watcher, self._patience = hello, watcher, patience
        self.mailbox, self.requests = Mailbox(), RequestTable()
        self.engine: Spawned | None = None
        self.num_restarts = 0
        self._adapters = AdapterChanges()
        self._up_since: float | None = None  # None: it is loading
        self._progress_s = self._counted_s = self._looked_s = self._awake_s = 0.0
        self._turned_s = time.monotonic()
        self._was_up = self._has_spoken = False
        self._reported: PlaitError | None = None  # why the process says that it ends
        self._close_at: float | None = None
        self._num_in_row = self._num_unexplained = 0
        self._begun, self._has_crashed = begun, False
        self._spare = begun.spare if begun else new_spare()  # kept for the next engine
        self._last = End(NOT_STARTED)

    @property
    def is_up(self) -> bool:
        """Whether there is an engine that takes requests."""
        return self._up_since is not None

    @property
    def is_watching(self) -> bool:
        """Whether the thread goes on: it may hang itself, on a process that cannot be killed."""
        return time.monotonic() - self._turned_s < max(self._patience.frozen_s, 2 * ASLEEP_S)

    def run(self) -> None:
        """The thread's whole life."""
        lost: PlaitError | None = None
        try:
            while (death := self._live()) is not None:
                lost = self._after(death)
                if lost is not None or self._pause():
                    break
        except EngineLost as error:  # the watcher does not take the engine
            lost = error
        except BaseException as error:
            log.exception("the supervisor of the engine's process failed")
            lost = EngineLost(f"the supervisor of the engine's process failed: {error}")
        finally:
            self._end(lost)

    def close(self, at: float) -> None:
        """End at this time, or as soon as no request is open. A later call may only hurry."""
        self._close_at = at if self._close_at is None else min(at, self._close_at)

    def cancel(self, request_id: str, index: int | None) -> None:
        """End a request, or one of its choices."""
        key = self.requests.cancel(request_id, index)
        if key is not None and self.engine is not None:
            self.engine.send(protocol.Cancel(key, index))

    def ask_counts(self, number: int) -> None:
        """Ask an engine that is up for its metrics."""
        if self.engine is not None and self.is_up:
            self.engine.send(protocol.Count(number))

    def change_adapter(self, number: int, name: str, path: str | None) -> None:
        """Have an engine that is up load or unload an adapter: `on_message` gets the answer."""
        if self.engine is not None and self.is_up:
            self.engine.send(self._adapters.send(number, name, path))
        else:
            self._watcher.on_message(self._adapters.refuse(number))

    def send_log_levels(self) -> None:
        """Send the levels of loggers, which may have changed. An engine that loads gets them once up."""
        if self.engine is not None and self.is_up:
            self.engine.send(protocol.LogLevels(_log_levels()))

    # One process

    def _live(self) -> str | None:
        """One process from its start to its end. Returns why it ended, or None if it was closed."""
        self._reported, self._has_spoken, self._up_since = None, False, None
        try:
            config = self._hello.config
            if self._has_crashed:  # a wrong startup image would end the next engine, too
                config = replace(config, startup_image="off")
            hello = protocol.Hello(self._hello.builder, self._hello.model, config, _log_levels())
            engine = self.engine = Spawned(hello, hello.config.max_num_seqs, self._spare, self._begun)
            self._begun = None
        except OSError as error:  # no memory, no processes, no files left: it may be better later
            self._num_in_row = max(self._num_in_row, 1) + 1
            self._num_unexplained += 1
            self._last = End(f"{NOT_STARTED}: {error}")
            return self._last.how
        self._progress_s = time.monotonic()
        death: str | None = None
        try:
            death = self._attend(engine)
        finally:
            self._watcher.on_down()
            end = engine.end(0.5 if death == GONE else 0.0)
            if death is not None:
                self._last = end if death == GONE else End(death)
                death = self._last.how
                self._has_crashed = not self._last.is_foreign
                self._record_end(engine)
            self.engine, self._up_since = None, None
            engine.status.close()
        return death

    def _attend(self, engine: Spawned) -> str | None:
        poll = select.poll()
        poll.register(self.mailbox.fd, select.POLLIN)
        while True:
            self._obey()
            if self._is_over():
                self._close_engine(engine)
                return None
            try:
                if self.is_up:
                    self._send_requests(engine)
                self._exchange(engine, poll, self._wait_s())
            except (EOFError, OSError):
                return GONE
            except protocol.BadFrame as error:
                return f"it sent {error}"
            if self.is_up and len(self.requests) and time.monotonic() - self._counted_s > COUNTS_S:
                self._counted_s = time.monotonic()
                self.ask_counts(0)  # now and then: the engine's totals must outlive it
            if overdue := self._overdue(engine):
                return overdue

    def _send_requests(self, engine: Spawned) -> None:
        """Send every request that is due, and end those with readers that have failed."""
        for entry in self.requests.due():
            try:
                engine.send(protocol.Submit(entry.key, entry.so_far(), entry.arrival_s))
            except EngineError as error:  # too long for a frame
                self.requests.fail(entry, error)
        while self.requests.unread:
            engine.send(protocol.Cancel(self.requests.unread.pop(), None))

    def _exchange(self, engine: Spawned, poll: select.poll, wait_s: float) -> None:
        """Send and receive what there is, and wait for it. Raises EOFError or OSError when it has gone."""
        engine.pump()
        poll.register(engine.socket, select.POLLIN | (select.POLLOUT if engine.has_outbox else 0))
        poll.poll(wait_s * 1000)
        for message in engine.receive():
            self._handle(engine, message)

    def _handle(self, engine: Spawned, message: protocol.FromChild) -> None:
        match message:
            case protocol.Events(events):
                self._has_spoken = self._has_spoken or any(event.token_ids for event in events)
                with wake_together():
                    for event in events:
                        self.requests.deliver(event, time.monotonic())
            case protocol.Logged():
                message.log()
            case protocol.Ready():
                self._up_since, self._was_up = time.monotonic(), True
                self._hello = protocol.keep_on_gpu(self._hello, message)
                self.send_log_levels()
                self._adapters.restore(engine.send)
                self._watcher.on_up(engine, message)
                if self.num_restarts:
                    log.warning("the engine is back (process %d)", engine.pid)
            case protocol.Fault(error):
                self._reported = error
            case _:
                self._progress_s = time.monotonic()
                if (name := self._adapters.read(message)) is not None:
                    self.requests.lose_adapter(name)
                self._watcher.on_message(message)

    def _overdue(self, engine: Spawned) -> str | None:
        """Why a process that has not ended is taken for dead."""
        now, patience, status = time.monotonic(), self._patience, engine.status
        if now - self._looked_s > ASLEEP_S:
            self._awake_s = now
        self._looked_s = now
        # Before its first sign of life it imports, which a slow disk may draw out: that is loading.
        if status.alive_s and now - max(status.alive_s, self._awake_s) > patience.frozen_s:
            return f"no thread of it has run for {patience.frozen_s:g} s"
        if not self.is_up:
            stands = now - self._progress_s > patience.loading_s
            return f"loading has not got on for {patience.loading_s:g} s" if stands else None
        since = status.busy_since_s
        if since and now - max(since, self._awake_s) > patience.stalled_s:
            return f"a step has taken more than {patience.stalled_s:g} s"
        return None

    def _close_engine(self, engine: Spawned) -> None:
        """Close an engine, and deliver the events that it still sends."""
        if not self.is_up:
            return
        until = time.monotonic() + CLOSE_GRACE_S
        with suppress(EOFError, OSError, protocol.BadFrame):
            engine.send(protocol.Close())
            while time.monotonic() < until:
                self._exchange(engine, select.poll(), max(until - time.monotonic(), 0))
        engine.end(max(until - time.monotonic(), 0.1))

    # Between two processes

    def _record_end(self, engine: Spawned) -> None:
        status, is_foreign = engine.status, self._last.is_foreign
        charged = self.requests.record_end(status.planned, status.arriving, is_foreign=is_foreign)
        self._watcher.on_charged(charged, is_foreign)
        stood = self._up_since is not None and time.monotonic() - self._up_since > STABLE_S
        self._num_in_row = 1 if stood or self._has_spoken else self._num_in_row + 1
        if self._has_spoken or charged:
            self._num_unexplained = 0
        else:
            self._num_unexplained = 1 if stood else self._num_unexplained + 1

    def _after(self, death: str) -> PlaitError | None:
        """What follows the end of a process. None: start another; else why nothing more is done."""
        reported = self._reported
        why = f"{reported} ({death})" if reported else death
        if not self._was_up:
            return reported or _first_death(self._last)
        if self._num_unexplained >= MAX_DEATHS:
            times = f"{self._num_unexplained} times"
            text = f"the engine's process has ended {times} without a token between ({why}); "
            if not self._patience.goes_on:
                log.critical("the engine's process has ended: %s; it is not started any more", why)
                return EngineLost(text + "it is not started any more: restart the server")
            lost = EngineLost(text + "another is tried again and again, with pauses; try again later")
            self._watcher.on_lost(lost)
            self.requests.end_all(lost)
        self.num_restarts += 1
        num_open = len(self.requests)
        log.error("the engine's process has ended: %s; starting another; open requests: %d", why, num_open)
        return None

    def _pause(self) -> bool:
        """Wait, the longer the more processes ended in a row, and obey commands. Whether to end meanwhile."""
        self._obey()
        seconds, longest = 0.0, LONGEST_BACKOFF_S if self._num_unexplained < MAX_DEATHS else LOST_BACKOFF_S
        if self._num_in_row > 1:
            seconds = min(BACKOFF_S * 2.0 ** min(self._num_in_row - 2, 32), longest)
        until, poll = time.monotonic() + seconds, select.poll()
        poll.register(self.mailbox.fd, select.POLLIN)
        while not self._is_over() and (left := until - time.monotonic()) > 0:
            poll.poll(min(left, self._wait_s()) * 1000)
            self._obey()
        return self._is_over()

    def _obey(self) -> None:
        self._turned_s = time.monotonic()
        for command in self.mailbox.take():
            command(self)
        self.requests.expire(time.monotonic())

    def _is_over(self) -> bool:
        at = self._close_at
        return at is not None and (not len(self.requests) or time.monotonic() >= at)

    def _wait_s(self) -> float:
        tick = min(TICK_S, self._patience.frozen_s / 4)
        return tick if self._close_at is None else min(max(self._close_at - time.monotonic(), 0.0), tick)

    def _end(self, lost: PlaitError | None) -> None:
        self._watcher.on_end(lost)
        for command in self.mailbox.close():
            try:
                command(self)
            except Exception:  # none of them may keep open requests from their end
                log.exception("a command to an engine that has ended failed")
        self.requests.end_all(lost)
        if self._spare >= 0:
            os.close(self._spare)


def _log_levels() -> dict[str, int]:
    return {name: logging.getLogger(name).getEffectiveLevel() for name in LOGGERS}


def _first_death(end: End) -> PlaitError:
    """Why a model could not be loaded by a process that reported nothing at its end."""
    text = f"the engine's process ended while the model was loading: {end.how}"
    if end.is_oom:
        return OutOfMemory(f"{text}; choose a smaller --max-model-len, --max-num-seqs or model")
    said_all = end.is_killed or end.how.startswith(NOT_STARTED)
    return EngineError(text if said_all else f"{text}; the log says more")
