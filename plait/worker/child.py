"""The engine process: runs an engine for the front process, and ends when that does.

One thread does everything: it takes messages between two steps, steps while there is work, and sends the
events of a step in one frame. A second thread only shows that the process runs.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from typing import NamedTuple

from plait.config import EngineConfig
from plait.engine.core import Engine
from plait.engine.fingerprint import NO_FINGERPRINT, Fingerprint
from plait.engine.thread import end_requests
from plait.errors import EngineError, PlaitError, RankLost
from plait.frontend.deltas import TokenInterval, join_events
from plait.kernels.load import lend
from plait.loading.text_side import TextSource
from plait.loading.torch_preload import finish_torch
from plait.request import Event, Request
from plait.resource_limits import is_memory_error, trim_heap
from plait.runner.ranks.processes import RankWatch
from plait.schedule.follow_prefixes import follow_prefixes
from plait.schedule.plan import SamplingBatch, StepPlan, Ticket
from plait.spec.model import ModelSpec
from plait.spec.values import encode_spec_value
from plait.state.prefix_tree import PrefixTree
from plait.worker import protocol

STATS_S = 0.05  # the numbers of an engine at work are this old at most, or as old as its step
BEAT_S = 0.25
PIECE = 1 << 18  # bytes read at a time
log = logging.getLogger("plait.engine")
Report = Callable[[str, int, int], None]


class BuiltEngine(NamedTuple):
    """What a builder makes: an engine that no thread runs yet, its model's spec, and how to release it."""

    engine: Engine
    spec: ModelSpec
    close: Callable[[], None]
    fingerprint: Fingerprint = NO_FINGERPRINT
    device_nbytes: int = 0


Builder = Callable[[str, EngineConfig, Report, Callable[[TextSource], None]], BuiltEngine]


class Link:
    """The child's end of the socket. `send` blocks while the front is busy: an engine must not run ahead."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._frames: protocol.Frames[protocol.FromFront] = protocol.Frames(protocol.FromFront)
        self._lock = threading.Lock()  # logs come from any thread
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)

    def send(self, message: protocol.FromChild) -> None:
        """Raises OSError when the front has gone."""
        data = protocol.frame(message)
        with self._lock:
            self._socket.sendall(data)

    def receive(self, timeout_s: float | None) -> list[protocol.FromFront]:
        """What has arrived; waits so long for it. Raises EOFError or OSError when the front has gone."""
        if not self._poll.poll(None if timeout_s is None else timeout_s * 1000):
            return []
        piece = self._socket.recv(PIECE)
        if not piece:
            raise EOFError("the front process has gone")
        return list(self._frames.feed(piece))


class WireLog(logging.Handler):
    """A log handler that sends the records of this process to the front's log."""

    def __init__(self, link: Link) -> None:
        super().__init__()
        self._link = link

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self.format(record)  # sets what is sent
            self._link.send(
                protocol.Logged(record.name, record.levelno, record.message, record.exc_text or "")
            )
        except OSError:
            self.handleError(record)


class EngineChild:
    """Runs an engine for the front at the other end of `link`, until that says `Close`."""

    def __init__(self, link: Link, status: protocol.SharedStatus, engine: Engine) -> None:
        self._link, self._status, self._engine = link, status, engine
        self._keys: dict[str, int] = {}  # of open requests, by id
        self._ids: dict[int, str] = {}
        self._events: list[protocol.EventMessage] = []
        self._closing = False
        self._num_seen = 0  # requests that the front has sent
        self._counted_s = self._reported_s = 0.0
        self._prefixes: PrefixTree | None = None  # what is cached, if the front follows it
        self._has_ended = False  # a choice, since prefixes were reported
        engine.runner, self._runner = self, engine.runner
        self._show_stats()

    def run(self) -> None:
        """Serve. Raises OSError or EOFError when the front has gone, and what escapes the engine."""
        while not self._closing:
            for message in self._next():
                self._handle(message)
            if self._engine.has_work and not self._closing:
                self._engine.step_or_wait()
            self.flush()

    def launch(self, plan: StepPlan, sampling: SamplingBatch) -> Ticket:
        """Run a step. Its requests are in the shared status block before, where the front finds them.

        So are the numbers, if requests have arrived: a long step would show them as if they still waited.
        """
        if self._num_seen != self._status.num_seen:
            self._show_stats()
        self._status.planned = [self._keys[i] for i in self._engine.requests_in(plan) if i in self._keys]
        return self._runner.launch(plan, sampling)

    def send_event(self, key: int, event: Event) -> None:
        """Send an event, together with all others of its step."""
        self._events.append(protocol.encode_event(key, event))
        self._has_ended |= event.finish_reason is not None
        if event.prompt_logprobs:  # megabytes
            self.flush()

    def flush(self) -> None:
        """Send the events that wait. Now and then, and at the end, update the shared numbers before that.

        What can be resumed behind a reply is reported before its end: the chat's next turn may come at once.
        """
        if not self._engine.has_work or time.monotonic() - self._counted_s > STATS_S:
            self._show_stats()
        if self._prefixes is not None:
            self._report_prefixes(self._prefixes)
        if self._events:
            events, self._events = tuple(self._events), []
            self._link.send(protocol.Events(events))

    def _report_prefixes(self, prefixes: PrefixTree) -> None:
        """Send what has changed in the prefix cache: now and then, and before a reply ends or work does."""
        now = time.monotonic()
        if self._has_ended or not self._engine.has_work or now - self._reported_s > STATS_S:
            self._reported_s, self._has_ended = now, False
            for changes in prefixes.take():
                self._link.send(protocol.PrefixReport(changes))

    def forget(self, request_id: str) -> None:
        """A request has ended."""
        self._ids.pop(self._keys.pop(request_id, 0), None)

    def _next(self) -> list[protocol.FromFront]:
        if self._engine.has_work:
            self._status.begin()
            return self._link.receive(0)
        self._status.rest()
        messages = self._link.receive(self._engine.idle_s)
        self._status.begin()
        if not messages:
            self._engine.audit()
            trim_heap()  # what steps that run op by op have freed stays in the process, until the next ones
        return messages

    def _handle(self, message: protocol.FromFront) -> None:
        match message:
            case protocol.Submit():
                self._status.arriving = message.key
                self._submit(message.key, message.request, message.arrival_s)
                self._status.arriving = 0
            case protocol.Cancel(key, index):
                if request_id := self._ids.get(key):
                    self._engine.cancel(request_id, index)
            case protocol.Count(number):
                self._link.send(protocol.MetricsReport(number, tuple(self._engine.metrics.families())))
            case protocol.LogLevels(levels):
                _log_from(levels)
            case protocol.FollowPrefixes():
                self._follow_prefixes()
            case protocol.ChangeAdapter():
                self._change_adapter(message)
            case protocol.Close():
                end_requests(self._engine)
                self._closing = True
            case protocol.Hello():
                raise EngineError("the front process sent a second Hello")

    def _change_adapter(self, message: protocol.ChangeAdapter) -> None:
        table, found = self._engine.adapters, None
        change = table.change if message.number else table.restore
        try:
            change(message.name, message.path, self._engine.used_adapters)
        except Exception as error:
            found = protocol.decode_error(*protocol.encode_error(error))
        if message.number:
            self._link.send(protocol.AdapterChanged(message.number, found))
        elif found is not None:  # no requester gets it
            log.warning("adapter %s is not what it was in the engine before: %s", message.name, found)

    def _follow_prefixes(self) -> None:
        if self._prefixes is None:
            self._prefixes = follow_prefixes(self._engine.scheduler)
        else:
            self._prefixes.report_anew()

    def _submit(self, key: int, request: Request, arrival_s: float) -> None:
        self._num_seen += 1
        reader = _Reader(self, key, request)
        self._keys[request.id], self._ids[key] = key, request.id
        try:
            self._engine.submit(request, reader, arrival_s)
        except Exception as error:
            self._engine.refuse(request, reader, error)

    def _show_stats(self) -> None:
        self._counted_s = time.monotonic()
        self._status.put_stats(list(self._engine.stats().values()), self._num_seen)


class _Reader:
    """Passes the events of one request on, those of `interval` tokens as one.

    It does not wait for choices that ended elsewhere.
    """

    def __init__(self, child: EngineChild, key: int, request: Request) -> None:
        self._child, self._key, self._request = child, key, request
        self._num_open = request.params.n - sum(tokens is None for tokens in request.resumed)
        self._paces = [TokenInterval(request.interval) for _ in range(request.params.n)]
        self._held: list[list[Event]] = [[] for _ in self._paces]

    def __call__(self, event: Event) -> None:
        held = self._held[event.index]
        held.append(event)
        if self._paces[event.index].is_due(event):
            for one in join_events(held):
                self._child.send_event(self._key, one)
            held.clear()
        if event.finish_reason is not None:
            self._num_open -= 1
            if not self._num_open:
                self._child.forget(self._request.id)


def load_engine(
    model: str, config: EngineConfig, report: Report, on_source: Callable[[TextSource], None]
) -> BuiltEngine:
    """The builder of every real model. Raises what `plait.loading.build.build` does."""
    from plait.loading.image.start import start_image

    if (started := start_image(model, config, on_source)) is not None:
        return BuiltEngine(started.engine, started.spec, started.close, started.fingerprint)
    finish_torch()
    from plait.engine.device import count_memory
    from plait.loading.build import build
    from plait.loading.identity.fingerprint import fingerprint
    from plait.loading.image.write import keep_image_at_startup
    from plait.loading.open_model import Opened
    from plait.text.tokenizers.tokenizer import Tokenizer

    def on_open(opened: Opened) -> Tokenizer | None:
        source = opened.whole_source()
        on_source(source)
        return source.tokenizer()

    built = build(model, config, report, on_open)
    keep_image_at_startup(built)
    prints, device_nbytes = fingerprint(built.opened, built.target), count_memory(built.target.device)
    return BuiltEngine(built.engine, built.spec, built.close, prints, device_nbytes)


def serve_link(link: Link, status: protocol.SharedStatus, hello: protocol.Hello) -> None:
    """Load what `hello` asks for and run it. Raises what loading and the engine raise."""
    module, _, function = hello.builder.partition(":")
    builder: Builder = getattr(import_module(module), function)
    built = builder(
        hello.model,
        hello.config,
        lambda text, done, total: link.send(protocol.ProgressReport(text, done, total)),
        lambda source: link.send(protocol.Headers(source.to_json())),
    )
    gc.freeze()  # what exists now stays; looking at it would take a quarter of a second, and find nothing
    gc.enable()
    engine = built.engine
    engine.metrics.arithmetic = built.fingerprint.arithmetic
    child = EngineChild(link, status, engine)
    spec, longest = encode_spec_value(built.spec), engine.scheduler.longest
    names = tuple(engine.stats())
    most, adapters = engine.limits.max_model_len, engine.adapters.digests()
    link.send(protocol.Ready(spec, most, longest, names, built.fingerprint, adapters, built.device_nbytes))
    try:
        child.run()
    finally:
        built.close()


def main() -> None:
    """Run the engine process. Its arguments, after the path: descriptors of the socket and of the shared
    status block, and the size of that block; see `plait.worker.child_process` for the others.
    """
    gc.disable()  # while it loads: looking for cycles in what libraries define is a twentieth of the time
    fd, status_fd, max_planned = map(int, sys.argv[2:5])
    faulthandler.enable()
    status, link = protocol.SharedStatus(status_fd, max_planned), Link(socket.socket(fileno=fd))
    try:
        while not (messages := link.receive(None)):
            pass  # the first message has not arrived whole
        hello = messages[0]
        if not isinstance(hello, protocol.Hello):
            raise EngineError(f"a hello was expected, not {type(hello).__name__}")
        why = None
        if hello.config.num_ranks > 1 and hello.builder == protocol.LOAD_ENGINE:
            from plait.worker.fork_ranks import fork_ranks

            why = fork_ranks(hello.config)
        if (spare := int(sys.argv[7])) >= 0:
            lend(spare)
        threading.Thread(target=_beat, args=(status, link), name="plait-beat", daemon=True).start()
        _log_to(link, hello.log_levels)
        if why is not None:
            log.info("ranks are started anew, and share less memory: %s", why)
        serve_link(link, status, hello)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the front has gone, so nothing reads a report
    except BaseException as error:
        _report_end(link, error)
        os._exit(1)  # whatever state things are in, there is nothing left to do


def _report_end(link: Link, error: BaseException) -> None:
    if not isinstance(error, PlaitError) and not is_memory_error(error):
        log.exception("the engine's process ends")
    try:
        link.send(protocol.Fault(protocol.decode_error(*protocol.encode_error(error))))
    except OSError:
        sys.stderr.write(f"plait: the engine's process ends: {error}\n")


def _log_to(link: Link, levels: dict[str, int]) -> None:
    logging.captureWarnings(True)
    logging.basicConfig(handlers=[WireLog(link)], level=logging.WARNING)
    _log_from(levels)


def _log_from(levels: dict[str, int]) -> None:
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def _beat(status: protocol.SharedStatus, link: Link) -> None:
    """Show that this process runs, as long as its ranks do: a step waits for all of them."""
    watch = RankWatch()
    while True:
        status.beat()
        if (lost := watch.find_lost()) is not None:
            with suppress(ProcessLookupError):
                os.kill(lost[0], signal.SIGKILL)  # one that is stopped would not see that this process ends
            _report_end(link, RankLost(f"a rank (process {lost[0]}) {lost[1]}"))
            os._exit(1)
        time.sleep(BEAT_S)
