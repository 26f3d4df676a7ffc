"""An engine in a process of its own, with the interface of `EngineLoop`, which runs one in this process.

A process that dies is replaced, and open requests go on with the very tokens they would have had.
Nothing here imports torch.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TypeVar

from prometheus_client import CollectorRegistry

from plait.config import EngineConfig
from plait.engine.admission import OnEvent
from plait.engine.fingerprint import NO_FINGERPRINT, Fingerprint
from plait.engine.metric_registry import RemoteMetrics
from plait.errors import EngineClosing, EngineError, EngineLost, EngineRestarting, PlaitError, QueueFull
from plait.frontend.frontend import TEMPLATES_OWN, Front, Parsers
from plait.loading.text_side import TextSource
from plait.request import JsonStyle, Request
from plait.spec.model import ModelSpec
from plait.state.prefix_tree import PrefixChanges
from plait.text.chat.template import begin_start
from plait.worker import protocol
from plait.worker.child_process import Spawned
from plait.worker.start_process import StartedProcess
from plait.worker.supervisor import CLOSE_GRACE_S, Patience, Supervisor

COUNTED = ("num_steps", "num_prompt_tokens", "num_output_tokens")  # as `/metrics` names them
SUMS = (*COUNTED, "num_preemptions", "num_swaps")
ASK_AGAIN_S = 0.5  # between two checks whether a caller still waits for a model that is loading
Report = Callable[[str, int, int], None]
OnPrefixes = Callable[[PrefixChanges], None]
log = logging.getLogger("plait.engine")
T = TypeVar("T")


class EngineProcess:
    """Starts loading `model` at construction; `source`, then `spec`, wait for it. Safe from any thread.

    `builder` names the function that makes the engine there, as "module:function". `healthy` is False while
    there is no engine; requests are taken then all the same, and wait for it.
    """

    def __init__(
        self,
        model: str,
        config: EngineConfig,
        *,
        builder: str = protocol.LOAD_ENGINE,
        patience: Patience | None = None,
        begun: StartedProcess | None = None,
    ) -> None:
        self.config, self.max_open = config, config.max_waiting + config.max_num_seqs
        self.fault: PlaitError | None = None
        self._lost: EngineLost | None = None  # given up for now: another is tried all the same
        self._patience = patience or Patience()
        self._changed = threading.Condition()
        self._progress = protocol.ProgressReport("starting", 0, 1)
        self._source: TextSource | None = None
        self._ready: protocol.Ready | None = None
        self._engine: Spawned | None = None  # one that is up
        self._past_sums = dict.fromkeys(SUMS, 0)
        self._closing = self._has_ended = False
        self._numbers = count(1)
        self._changes: dict[int, Future[None]] = {}  # of adapters, that are not answered
        self._num_arriving = 0
        self._on_prefixes: OnPrefixes | None = None
        self._collected = RemoteMetrics(
            lambda number: self.healthy and self._supervisor.mailbox.put(lambda s: s.ask_counts(number)),
            lambda: (self.num_restarts, self.healthy),
            lambda: self._supervisor.requests.num_ended,
            self.stats,
        )
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(self._collected)
        self.on_charged: Callable[[tuple[str, ...], bool], None] = lambda request_ids, is_foreign: None
        self._supervisor = Supervisor(protocol.Hello(builder, model, config, {}), self, self._patience, begun)
        self._thread = threading.Thread(target=self._supervisor.run, name="plait-supervisor", daemon=True)
        self._thread.start()
        self._abandon = partial(self.close, drain=False)
        atexit.register(self._abandon)

    # While it loads

    def source(self, report: Report) -> TextSource:
        """Where the files of the text side are, once known. Raises what loading and `report` raise."""
        return self._wait_for(lambda: self._source, report)

    def ready(self, report: Report) -> tuple[ModelSpec, int]:
        """The model and its longest sequence, once requests are accepted. Raises as `source` does."""
        ready = self._wait_for(lambda: self._ready, report)
        return protocol.decode_spec(ready.spec), ready.max_model_len

    @property
    def fingerprint(self) -> Fingerprint:
        """Which engines give the same replies; not known until requests are accepted."""
        return self._ready.fingerprint if self._ready else NO_FINGERPRINT

    @property
    def device_nbytes(self) -> int:
        """Memory of a GPU that the engine had once it was loaded: of the first rank's; 0 on a CPU."""
        return self._ready.device_nbytes if self._ready else 0

    @property
    def longest(self) -> int | None:
        """The most tokens of one sequence that memory holds; None until requests are accepted."""
        return self._ready.longest if self._ready else None

    @property
    def adapters(self) -> dict[str, str]:
        """The adapters that the engine had at its startup, with a hash of each one's numbers."""
        return self._ready.adapters if self._ready else {}

    # As `EngineLoop`, which documents what is the same

    def submit(self, request: Request, on_event: OnEvent) -> None:
        """Hand over a request. Raises QueueFull, and EngineError if it is loading, closed or given up."""
        arrived = time.monotonic()
        with self._changed:
            self.check_capacity()
            self._num_arriving += 1
        if not self._supervisor.mailbox.put(lambda s: self._submit(s, request, on_event, arrived)):
            with self._changed:
                self._num_arriving -= 1
            raise EngineClosing("the engine is closing and takes no more requests")

    def check_capacity(self) -> None:
        self._check_open()
        if self._num_open >= self.max_open:
            most = self.config.max_waiting
            raise QueueFull(f"max_waiting ({most}) requests wait already; try again later")

    def cancel(self, request_id: str, index: int | None = None) -> None:
        self._supervisor.mailbox.put(lambda s: s.cancel(request_id, index))

    def change_adapter(self, name: str, path: str | None) -> None:
        """Load an adapter, or with None unload it; waits.

        Raises what the engine raised, EngineRestarting while there is none, or EngineError.
        """
        self._check_open()
        with self._changed:
            number = next(self._numbers)
            done = self._changes[number] = Future()

        def send(supervisor: Supervisor) -> None:
            supervisor.change_adapter(number, name, path)

        if not self._supervisor.mailbox.put(send):
            raise EngineError("the engine is closing and loads no adapter")
        done.result()

    def follow_prefixes(self, on_changes: OnPrefixes) -> None:
        """Have `on_changes` get what the engine can resume: all of it first, then changes, 20 times a second.

        It runs on the supervisor's thread and must be quick. When an engine ends, what it could resume is
        gone: `begins`. A second call replaces the first, and gets everything anew.
        """

        def send(supervisor: Supervisor) -> None:
            self._on_prefixes = on_changes
            if supervisor.engine is not None and supervisor.is_up:
                supervisor.engine.send(protocol.FollowPrefixes())

        self._supervisor.mailbox.put(send)

    def _answer_change(self, number: int, error: PlaitError | None) -> None:
        with self._changed:
            done = self._changes.pop(number, None)
        if done is None:
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    def _fail_changes(self, error: PlaitError) -> None:
        for number in [*self._changes]:
            self._answer_change(number, error)

    def close(self, *, drain: bool = True, timeout_s: float = 30.0) -> bool:
        """Stop. Returns whether the process and the thread have ended."""
        deadline = time.monotonic() + (timeout_s if drain else 0.0)
        with self._changed:
            self._closing = True
        self._supervisor.mailbox.put(lambda s: s.close(deadline))
        atexit.unregister(self._abandon)
        if threading.current_thread() is not self._thread:
            self._thread.join(max(deadline - time.monotonic(), 0.0) + 2 * CLOSE_GRACE_S)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def healthy(self) -> bool:
        """Whether there is an engine that works: up, not closing, and with signs of life."""
        now = time.monotonic()
        with self._changed:
            if self._engine is None or self._closing or self.fault is not None:
                return False
            status = self._engine.status
            hangs = status.busy_since_s and now - status.busy_since_s > self._patience.stalled_s
            return not hangs and now - status.alive_s < self._patience.frozen_s / 2

    @property
    def silent_s(self) -> float:
        """Seconds since any thread of the engine's process ran; 0 while there is none."""
        with self._changed:
            alive_s = 0.0 if self._engine is None else self._engine.status.alive_s
        return max(time.monotonic() - alive_s, 0.0) if alive_s else 0.0

    @property
    def loading(self) -> tuple[str, int, int] | None:
        """Progress of an engine that replaces another: (what it does, done, of). None: none is loading."""
        with self._changed:
            if self._engine is not None or self._ready is None or self._closing:
                return None
            if self._has_ended or self._lost is not None:
                return None
            return self._progress.text, self._progress.done, self._progress.total

    @property
    def live(self) -> bool:
        """Whether it works or will be tried again: its supervisor goes on, and has not given it up."""
        with self._changed:
            return self.fault is None and self._supervisor.is_watching

    def follow_log_levels(self) -> None:
        self._supervisor.mailbox.put(lambda s: s.send_log_levels())

    @property
    def pid(self) -> int | None:
        """The process of the engine, if it is up."""
        with self._changed:
            return None if self._engine is None else self._engine.pid

    @property
    def num_restarts(self) -> int:
        """Engines that were replaced."""
        return self._supervisor.num_restarts

    def stats(self) -> Mapping[str, int]:
        """The engine's numbers as of a moment ago; totals are of all engines since startup."""
        with self._changed:
            num_seen = 0 if self._engine is None else self._engine.status.num_seen
            found = self._stats()
            # A request that a long step has kept the engine from looking at waits.
            unseen = self._num_arriving + self._supervisor.requests.count_unseen(num_seen)
            found["num_waiting"] = found.get("num_waiting", 0) + unseen
            for name, value in self._past_sums.items():
                found[name] = found.get(name, 0) + value
        return {**found, "num_restarts": self.num_restarts}

    # As `Watcher`, on the supervisor's thread

    def on_message(self, message: protocol.FromChild) -> None:
        if isinstance(message, protocol.MetricsReport):
            self._collected.arrive(message.number, message.families)
            return
        if isinstance(message, protocol.AdapterChanged):
            self._answer_change(message.number, message.error)
            return
        if isinstance(message, protocol.PrefixReport):
            if self._on_prefixes is not None:
                self._on_prefixes(message.changes)
            return
        with self._changed:
            if isinstance(message, protocol.ProgressReport):
                self._progress = message
            elif isinstance(message, protocol.Headers) and self._source is None:
                self._source = TextSource.from_json(message.source)
            self._changed.notify_all()

    def on_up(self, engine: Spawned, ready: protocol.Ready) -> None:
        """Take the engine. Raises EngineLost for one with other weights than the one before it had: replies
        would go on with them, and the front has the tokenizer of the old ones.
        """
        if self._ready is not None and self._ready.fingerprint.weights != ready.fingerprint.weights:
            text = "the engine ended, and the model's weights were replaced since it was loaded"
            log.critical("%s; no other engine takes its place", text)
            raise EngineLost(f"{text}; restart the server")
        with self._changed:
            self._engine, self._ready, self._lost = engine, ready, None
            self._changed.notify_all()
        if self._on_prefixes is not None:
            engine.send(protocol.FollowPrefixes())

    def on_down(self) -> None:
        why = "the engine ended before it had changed the adapter; try again later"
        self._fail_changes(EngineRestarting(why))
        if self._on_prefixes is not None:
            self._on_prefixes(PrefixChanges(begins=True))
        with self._changed:
            last, self._engine = self._stats(), None
            self._progress = protocol.ProgressReport("starting another engine", 0, 1)
            for name in SUMS:
                self._past_sums[name] += last.get(name, 0)
        self._collected.keep({name: last.get(name, 0) for name in COUNTED})

    # `on_charged`, of `Watcher` too, is an attribute: a replica of a cluster puts its own function there.

    def on_lost(self, error: EngineLost) -> None:
        with self._changed:
            self._lost = error

    def on_end(self, error: PlaitError | None) -> None:
        self._fail_changes(error or EngineError("the engine is closing and changes no adapter"))
        with self._changed:
            self.fault, self._has_ended = error, True
            self._changed.notify_all()

    # Inside

    def _wait_for(self, found: Callable[[], T | None], report: Report) -> T:
        while True:
            with self._changed:
                value, progress = found(), self._progress
                if value is None and self._has_ended:
                    raise self.fault or EngineError("the engine is closing and is loaded no further")
                if value is None:
                    self._changed.wait(ASK_AGAIN_S)
            if value is not None:
                return value
            report(progress.text, progress.done, progress.total)

    def _check_open(self) -> None:
        if self.fault is not None:
            raise EngineLost(f"the engine has stopped after a fault: {self.fault}") from self.fault
        if self._lost is not None:
            raise EngineLost(str(self._lost))
        if self._closing or self._has_ended:
            raise EngineClosing("the engine is closing and takes no more requests")
        if self._ready is None:
            raise EngineError("the model is still loading")

    @property
    def _num_open(self) -> int:
        return len(self._supervisor.requests) + self._num_arriving

    def _submit(self, supervisor: Supervisor, request: Request, on_event: OnEvent, arrived: float) -> None:
        with self._changed:
            self._num_arriving -= 1
        supervisor.requests.add(request, on_event, arrived)

    def _stats(self) -> dict[str, int]:
        """With the lock: the numbers of the engine that is up, zeros if none is."""
        names = self._ready.stat_names if self._ready else ()
        if self._engine is None:
            return dict.fromkeys(names, 0)
        return dict(zip(names, self._engine.status.stats(len(names)), strict=True))


def load_process(
    model: str,
    config: EngineConfig,
    report: Report,
    parsers: Parsers = TEMPLATES_OWN,
    patience: Patience | None = None,
    begun: StartedProcess | None = None,
) -> Front:
    """A Front over an engine in a process of its own. Raises what loading and `report` raise.

    `begun`: that process, started already by the main thread.
    """
    process = EngineProcess(model, config, patience=patience, begun=begun)
    try:
        source = process.source(report)
        language = source.language()
        wait_for_template = begin_start(language.chat_template, is_chosen=source.chat_template is not None)
        spec, longest = process.ready(report)
        parsers = replace(parsers, style=JsonStyle(config.open_objects, config.json_space))
        front = Front(source.name, spec, longest, process, language, config, parsers)
        front.start()
        if source.chat_template is not None:
            wait_for_template()
        return front
    except BaseException:
        process.close(drain=False)
        raise
