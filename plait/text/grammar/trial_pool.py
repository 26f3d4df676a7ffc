"""Grammars are tried out in processes that may be killed, before an engine compiles them.

submit ──> verdict known? ──────────────────────────────> future, at once
       └─> lanes, one for each key ──> a runner ──> child 1..N ──> future of all who wait for it
"""

from __future__ import annotations

import hashlib
import json
import logging
import signal
import sys
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, replace
from typing import Any

from msgspec import Struct, field

from plait.errors import BadGrammar, CapacityError, EngineError, PlaitError
from plait.fair_queue import Lanes
from plait.request import Grammar
from plait.text.grammar.library import PARTS, GrammarLimits, readable
from plait.text.isolation.child_process import ChildProcess, is_foreign

log = logging.getLogger("plait")
_OVERHEAD = 512  # bytes of the objects around a text
_MIB = 1 << 20
_CLOSED = "the server is stopping; the grammar was not tried out"
_ASKED = ("kind", "source", "open_objects", "space", *PARTS)


class Verdict(Struct, frozen=True):
    """Whether a grammar is good, and its form for the library, or what is wrong with it."""

    is_good: bool
    text: str


def apply_verdict(grammar: Grammar, verdict: Verdict) -> Grammar:
    """The grammar with its form. Raises BadGrammar if the verdict is a refusal."""
    if not verdict.is_good:
        raise BadGrammar(verdict.text, grammar.param)
    return replace(grammar, form=verdict.text)


def too_late(waited_s: float) -> CapacityError:
    """The error for a request with a grammar that did not get its turn in time."""
    return CapacityError(
        f"the grammar was not tried out within {waited_s:g} s, as others are before it; try again later"
    )


def digest(grammar: Grammar) -> bytes:
    """Equal for two grammars exactly when the library would compile the same from them."""
    parts = (grammar.kind, grammar.source, grammar.lead, grammar.instead, grammar.opening)
    style = (str(grammar.open_objects), str(grammar.space))
    found = hashlib.sha256()
    for part in parts + style:
        data = part.encode("utf-8", "surrogatepass")
        found.update(b"%d:" % len(data) + data)
    return found.digest()


class Verdicts:
    """The verdicts that were used last, as many as fit into `max_bytes`. Not thread-safe.

    One that takes more than an eighth is not kept: a few such would drop all others.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._nbytes = max_bytes, 0
        self._kept: OrderedDict[bytes, Verdict] = OrderedDict()

    def get(self, key: bytes) -> Verdict | None:
        if key in self._kept:
            self._kept.move_to_end(key)
        return self._kept.get(key)

    def put(self, key: bytes, verdict: Verdict) -> None:
        if (old := self._kept.pop(key, None)) is not None:
            self._nbytes -= _nbytes(old)
        if _nbytes(verdict) > self._max_bytes // 8:
            return
        self._kept[key] = verdict
        self._nbytes += _nbytes(verdict)
        while self._nbytes > self._max_bytes:
            self._nbytes -= _nbytes(self._kept.popitem(last=False)[1])


class TrialChild(ChildProcess):
    """A process that tries grammars out."""

    def __init__(self, limits: GrammarLimits) -> None:
        super().__init__("plait.text.grammar.trial_child", max_bytes=limits.memory_bytes)

    def set_up(self, setup: str, limits: GrammarLimits) -> None:
        """Say which vocabulary it is for. Raises CapacityError if it does not come up."""
        try:
            self.ask(setup, limits.start_s)
        except (OSError, EOFError, ValueError) as error:
            why = self.explain_start(error, limits.start_s)
            self.stop()
            raise CapacityError(f"the process that tries grammars out {why}") from error


def _refusal(status: int, limits: GrammarLimits) -> str:
    """What is wrong with a grammar for which the process ended with that status."""
    if status == -signal.SIGPROF:
        return f"the grammar takes more than {limits.cpu_s:g} s to compile; make it simpler"
    return (
        "the grammar is too large or its references too deep to compile in "
        f"{limits.memory_bytes // _MIB} MiB of memory and {limits.stack_bytes / _MIB:g} MiB of stack; "
        "make it simpler"
    )


class _Job(Struct, eq=False):
    """One grammar, and all callers that wait for its verdict: futures with their keys."""

    line: str
    name: bytes
    waiters: dict[Future[Verdict], str] = field(default_factory=dict)
    is_running: bool = False


class TrialPool:
    """Up to `limits.children` processes, and the grammars that wait for them. Thread-safe.

    Keys take turns, and no named key has all of the processes at once: another never waits for more than one
    trial to end. A grammar that many ask for is tried once. `vocabulary`: `size`, `special` (text by id) and
    `ends` (ids), of plain JSON. Runners are threads that live while there is something to do.
    """

    def __init__(self, vocabulary: Mapping[str, object], limits: GrammarLimits) -> None:
        self._setup = json.dumps({**vocabulary, "limits": asdict(limits)}) + "\n"
        self._limits = limits
        self._lock = threading.Lock()
        self._turns: Lanes[_Job] = Lanes()
        self._jobs: dict[bytes, _Job] = {}
        self._verdicts = Verdicts(limits.remembered_bytes)
        self._children: list[TrialChild | None] = [None] * limits.children
        self._running: dict[int, str | None] = {}  # place of a runner → the key that it works for
        self._starting: list[TrialChild] = []
        self._num_closings = 0  # a process that was begun before the last of them is not kept

    def start(self) -> None:
        """Starts the processes now, so that no grammar waits for them. Raises CapacityError.

        They get ready meanwhile: the first grammar waits for what is left of that.
        """
        with self._lock:
            free = [i for i, child in enumerate(self._children) if child is None and i not in self._running]
            self._running |= dict.fromkeys(free)
            era = self._num_closings
        try:
            made = [(place, TrialChild(self._limits)) for place in free]  # all import their library at once
        except OSError as error:
            self._free_places(free)
            raise CapacityError(f"no process can be started that tries grammars out: {error}") from error
        with self._lock:
            self._starting += [child for _, child in made]
        finish = threading.Thread(
            target=self._finish_start, args=(free, made, era), name="plait-trials", daemon=True
        )
        try:
            finish.start()
        except RuntimeError:  # the system has no more threads
            self._finish_start(free, made, era)

    def _finish_start(self, free: Sequence[int], made: Sequence[tuple[int, TrialChild]], era: int) -> None:
        try:
            for place, child in made:
                self._set_up(place, child, era)
        except (PlaitError, OSError) as error:
            if era == self._num_closings:  # else it was closed meanwhile
                log.warning("grammars: %s", error)
        finally:
            begun = {id(child) for _, child in made}
            with self._lock:
                self._starting = [child for child in self._starting if id(child) not in begun]
            self._free_places(free)

    def _free_places(self, places: Sequence[int]) -> None:
        with self._lock:
            for place in places:
                self._running.pop(place, None)
            self._add_runners()

    def submit(self, grammar: Grammar, key: str = "") -> Future[Verdict]:
        """The verdict on a grammar, tried for `key`. Cancelling the future takes it out of the queue.

        Raises CapacityError, as the future may, for reasons outside the grammar: too many of the key's wait,
        the machine is too busy to try it, or the pool is closed.
        """
        name, future = digest(grammar), Future[Verdict]()
        with self._lock:
            if (known := self._verdicts.get(name)) is not None:
                future.set_result(known)
                return future
            if self._turns.count(key) >= self._limits.max_waiting:
                raise CapacityError(
                    f"{self._limits.max_waiting} grammars of this key wait to be tried out; try again later"
                )
            job = self._jobs.get(name)
            if job is None:
                line = json.dumps({part: getattr(grammar, part) for part in _ASKED}) + "\n"
                job = self._jobs[name] = _Job(line, name)
            if not job.is_running and key not in job.waiters.values():
                self._turns.put(key, job)
            job.waiters[future] = key
            self._add_runners()
        future.add_done_callback(lambda done: self._leave(name, done) if done.cancelled() else None)
        return future

    def close(self) -> None:
        """Ends the processes, and refuses what waits. A later grammar starts new ones."""
        with self._lock:
            waiting = [job for job in self._jobs.values() if not job.is_running]
            for job in waiting:
                self._forget(job)
            children = [child for child in (*self._children, *self._starting) if child is not None]
            self._starting, self._num_closings = [], self._num_closings + 1
            self._children = [None] * len(self._children)
        for job in waiting:
            _deliver(job, CapacityError(_CLOSED))
        for child in children:
            child.stop()

    def _leave(self, name: bytes, future: Future[Verdict]) -> None:
        """The caller does not wait for this future any more."""
        with self._lock:
            job = self._jobs.get(name)
            key = job.waiters.pop(future, None) if job is not None else None
            if job is None or key is None or job.is_running:
                return
            if key not in job.waiters.values():
                self._turns.drop(key, job)
            if not job.waiters:
                del self._jobs[name]

    def _forget(self, job: _Job) -> None:
        self._jobs.pop(job.name, None)
        for key in set(job.waiters.values()):
            self._turns.drop(key, job)

    # Runners, with the lock

    def _add_runners(self) -> None:
        """Start one for each free place with a job that it may take."""
        for place in range(len(self._children)):
            while place not in self._running and (job := self._take(place)) is not None:
                thread = threading.Thread(
                    target=self._run, args=(place, job), name="plait-trial", daemon=True
                )
                try:
                    thread.start()
                except RuntimeError as error:  # the system gives no thread
                    del self._running[place]
                    if self._running:  # runners at work go on with it
                        self._put_back(job)
                        return
                    del self._jobs[job.name]
                    _deliver(job, CapacityError(f"no grammar can be tried out: {error}; try again later"))

    def _put_back(self, job: _Job) -> None:
        job.is_running = False
        for key in dict.fromkeys(job.waiters.values()):
            self._turns.put(key, job)

    def _take(self, place: int) -> _Job | None:
        self._running.pop(place, None)
        busy = [key for key in self._running.values() if key]
        most = max(len(self._children) - 1, 1)
        found = self._turns.take({key for key in busy if busy.count(key) >= most})
        if found is None:
            return None
        key, job = found
        job.is_running, self._running[place] = True, key
        for other in set(job.waiters.values()) - {key}:
            self._turns.drop(other, job)
        return job

    # Runners, without it

    def _run(self, place: int, job: _Job | None) -> None:
        while job is not None:
            result: Verdict | PlaitError
            try:
                result = self._try(place, job.line)
            except Exception as error:  # the callers that wait must get it, and the next one is tried
                result = EngineError(f"a grammar could not be tried out: {error!r}")
            with self._lock:
                del self._jobs[job.name]
                if isinstance(result, Verdict):
                    self._verdicts.put(job.name, result)
            _deliver(job, result)
            with self._lock:
                job = self._take(place)
                self._add_runners()  # a key that held back for this one may go on

    def _try(self, place: int, line: str) -> Verdict | PlaitError:
        try:
            child = self._ready(place)
        except CapacityError as error:
            return error
        except OSError as error:
            return CapacityError(f"no process can be started that tries grammars out: {error}")
        limits = self._limits
        try:
            answer: dict[str, Any] = json.loads(child.ask(line, limits.timeout_s))
        except (OSError, EOFError, ValueError) as error:
            with self._lock:
                if self._children[place] is child:
                    self._children[place] = None
            status = None if isinstance(error, TimeoutError) else child.read_status()
            child.stop()
            if status in (None, -signal.SIGKILL):
                return CapacityError(
                    f"the grammar could not be tried out within {limits.timeout_s:g} s, as the "
                    "machine is busy; try again later, or make it simpler"
                )
            if is_foreign(status):
                return CapacityError("the process that tries grammars out was ended by the system; try again")
            return Verdict(False, _refusal(status, limits))
        if "error" in answer:
            return Verdict(False, f"the grammar cannot be honoured: {readable(answer['error'])}")
        return Verdict(True, answer["form"])

    def _ready(self, place: int) -> TrialChild:
        with self._lock:
            child, era = self._children[place], self._num_closings
        if child is not None and child.alive():
            return child
        if child is not None:
            child.stop()
        return self._set_up(place, TrialChild(self._limits), era)

    def _set_up(self, place: int, child: TrialChild, era: int) -> TrialChild:
        """Make a process ready, and keep it. Raises CapacityError, also if the pool was closed meanwhile."""
        child.set_up(self._setup, self._limits)
        with self._lock:
            if era == self._num_closings:
                self._children[place] = child
                return child
        child.stop()
        raise CapacityError(_CLOSED)


def _deliver(job: _Job, result: Verdict | PlaitError) -> None:
    for future in [*job.waiters]:
        if not future.set_running_or_notify_cancel():
            continue
        if isinstance(result, Verdict):
            future.set_result(result)
        else:
            future.set_exception(type(result)(str(result)))


def _nbytes(verdict: Verdict) -> int:
    return sys.getsizeof(verdict.text) + _OVERHEAD
