"""What the prefix cache has, published over ZeroMQ in the format of vLLM's KV events, which gateways read.

    engine ── changes ──► supervisor's thread ── queue ──► publisher's thread ──► PUB: topic, number, payload
                                                                              └─► ROUTER: missed ones again

A payload is msgpack, `[seconds since 1970, events, rank]`. Readers believe that each stored block can be
resumed, so only blocks before a resume point are published, as blocks of full attention. Their names are the
last eight bytes of ours. Events have the token ids of prompts, so their readers can read prompts.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

import msgspec

from plait.config import ServerConfig
from plait.errors import ConfigError
from plait.state.blocks import root
from plait.state.prefix_tree import PrefixChanges, StoredBlock

if TYPE_CHECKING:
    import zmq

MAX_QUESTION_NBYTES = 1024  # of a subscriber that asks for a replay: it sends a number
MAX_QUEUED = 1 << 16  # blocks that wait to be sent; more, and everything is reported anew
MAX_KEPT, MAX_KEPT_NBYTES = 10_000, 64 << 20  # messages that are kept to be sent again
END = (-1).to_bytes(8, "big", signed=True)  # in place of a number: the last answer of a replay
MEDIUM, KIND, GROUP = "GPU", "full_attention", 0  # the fastest tier of a replica, whatever its device is
POLL_MS = 1000
UNSALTED = root("")
log = logging.getLogger("plait.server")
Event = tuple[object, ...]
OnChanges = Callable[[PrefixChanges], None]


class PrefixSource(Protocol):
    """An engine that reports what it can resume: `EngineProcess`."""

    def follow_prefixes(self, on_changes: OnChanges) -> None: ...


def list_events(changes: PrefixChanges) -> list[Event]:
    """The same in vLLM's events: blocks that follow each other are one of them."""
    events: list[Event] = [("AllBlocksCleared",)] if changes.begins else []
    if changes.dropped:
        events.append(("BlockRemoved", [*map(_number, changes.dropped)], MEDIUM, GROUP))
    return events + [_describe_run(run) for run in _join_runs(changes.stored)]


def _join_runs(stored: Iterable[StoredBlock]) -> list[list[StoredBlock]]:
    """Blocks in runs: the parent of each is the one before it. Parents come before their children."""
    runs: list[list[StoredBlock]] = []
    open_runs: dict[bytes, list[StoredBlock]] = {}  # by the name of the last block
    for block in stored:
        run = open_runs.pop(block.parent, None)
        if run is None:
            runs.append(run := [])
        run.append(block)
        open_runs[block.name] = run
    return runs


def _describe_run(run: list[StoredBlock]) -> Event:
    first, names = run[0], [_number(block.name) for block in run]
    parent = _number(first.parent) if first.parent else None
    tokens = [token for block in run for token in block.tokens]
    keys: list[list[str] | None] | None = None
    if first.root not in (b"", UNSALTED):  # a digest of the salt: of a key, a request's own, an adapter
        keys = [[first.root.hex()], *[None] * (len(run) - 1)]
    lora_id = lora_name = None
    size = len(first.tokens)
    return "BlockStored", names, parent, tokens, size, lora_id, MEDIUM, lora_name, keys, GROUP, KIND


def _number(name: bytes) -> int:
    return int.from_bytes(name[-8:], "big")


class EventPublisher:
    """Publishes the changes of one engine from a thread of its own. `publish` never waits.

    Raises ConfigError without pyzmq, and for an address on which it cannot listen.
    """

    def __init__(self, address: str, replay: str | None = None, topic: str | None = None) -> None:
        """`topic` None: `kv@HOST@MODEL`."""
        try:
            import zmq
        except ImportError as error:
            raise ConfigError("kv_events: it needs pyzmq: pip install 'plait-engine[kv-events]'") from error
        self._zmq, self._topic = zmq, topic
        self._queue: deque[PrefixChanges] = deque()
        self._num_queued, self._has_lost, self._is_closed, self._has_ended = 0, False, False, False
        self._kept: deque[tuple[bytes, bytes]] = deque()
        self._kept_nbytes = self._last = 0
        self._source: PrefixSource | None = None
        self._lock = threading.Lock()
        self._context = zmq.Context()
        try:
            self._events = self._listen("kv_events", zmq.PUB, address)
            self._replays = self._listen("kv_events_replay", zmq.ROUTER, replay) if replay else None
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._wake, self._waker = os.pipe()
        os.set_blocking(self._waker, False)
        self._thread = threading.Thread(target=self._run, name="plait-kv-events", daemon=True)
        self._thread.start()

    @property
    def addresses(self) -> list[str]:
        """Where it listens: events, and replays if there are any."""
        found = [one for one in (self._events, self._replays) if one is not None]
        return [one.getsockopt_string(self._zmq.LAST_ENDPOINT) for one in found]

    def follow(self, source: PrefixSource, model: str) -> None:
        """Publish what this engine of a model of that name reports, and begin with all that it has."""
        if self._topic is None:
            self._topic = f"kv@{socket.gethostname()}@{model}"
        self._source = source
        source.follow_prefixes(self.publish)

    def publish(self, changes: PrefixChanges) -> None:
        """Queue changes. If too many wait, all are dropped, and the engine has to report anew."""
        with self._lock:
            self._has_lost = self._has_lost and not changes.begins
            if self._has_lost:
                return
            size = 1 + len(changes.stored) + len(changes.dropped)
            is_full = self._num_queued > 0 and self._num_queued + size > MAX_QUEUED
            if is_full:
                self._queue.clear()
                self._num_queued, self._has_lost = 0, True
            else:
                self._queue.append(changes)
                self._num_queued += size
        if is_full and self._source is not None:
            log.warning("KV events: more than %d changes wait, and all are reported anew", MAX_QUEUED)
            self._source.follow_prefixes(self.publish)
        self._wake_up()

    def close(self) -> None:
        """Send what waits, and end the thread. May be called twice."""
        with self._lock:
            self._is_closed = True
        self._wake_up()
        self._thread.join(2.0)

    def _listen(self, option: str, kind: int, address: str) -> zmq.Socket[bytes]:
        made = self._context.socket(kind)
        made.setsockopt(self._zmq.LINGER, 200)
        made.setsockopt(self._zmq.SNDHWM, MAX_KEPT)
        if kind == self._zmq.ROUTER:
            made.setsockopt(self._zmq.MAXMSGSIZE, MAX_QUESTION_NBYTES)
        try:
            made.bind(address)
        except self._zmq.ZMQError as error:
            text = f"{option}: cannot listen on {address!r}: {error}; an address is like tcp://*:5557"
            raise ConfigError(text) from error
        return made

    def _wake_up(self) -> None:
        with self._lock, suppress(OSError):  # full: it wakes anyhow
            if not self._has_ended:  # else the number may be another file's by now
                os.write(self._waker, b"\0")

    # The publisher's thread

    def _run(self) -> None:
        poller = self._zmq.Poller()
        poller.register(self._wake, self._zmq.POLLIN)
        if self._replays is not None:
            poller.register(self._replays, self._zmq.POLLIN)
        try:
            while True:
                ready = dict(poller.poll(POLL_MS))
                if self._wake in ready:
                    os.read(self._wake, 1 << 12)
                if self._replays is not None and self._replays in ready:
                    self._replay(self._replays)
                while (changes := self._next()) is not None:
                    self._send(changes)
                if self._is_closed:
                    return
        except Exception:
            log.exception("KV events are not published any more; requests are served as before")
        finally:
            self._context.destroy(linger=200)
            with self._lock:
                self._has_ended = True
                os.close(self._wake)
                os.close(self._waker)

    def _next(self) -> PrefixChanges | None:
        with self._lock:
            if not self._queue:
                return None
            changes = self._queue.popleft()
            self._num_queued -= 1 + len(changes.stored) + len(changes.dropped)
            return changes

    def _send(self, changes: PrefixChanges) -> None:
        if not (events := list_events(changes)):
            return
        number = self._last.to_bytes(8, "big")
        payload = msgspec.msgpack.encode((time.time(), events, 0))
        self._last += 1
        self._kept.append((number, payload))
        self._kept_nbytes += len(payload)
        while len(self._kept) > MAX_KEPT or (self._kept_nbytes > MAX_KEPT_NBYTES and len(self._kept) > 1):
            self._kept_nbytes -= len(self._kept.popleft()[1])
        self._events.send_multipart(((self._topic or "").encode(), number, payload))

    def _replay(self, replays: zmq.Socket[bytes]) -> None:
        """Answer a reader that has missed messages: those from its number on, and the end."""
        frames = replays.recv_multipart()
        if len(frames) != 3 or frames[1] or len(frames[2]) != 8:
            return  # no request of this protocol
        reader, first = frames[0], int.from_bytes(frames[2], "big")
        for number, payload in self._kept:
            if int.from_bytes(number, "big") >= first:
                replays.send_multipart((reader, b"", number, payload))
        replays.send_multipart((reader, b"", END, b""))


def open_publisher(address: str, config: ServerConfig) -> EventPublisher:
    """A publisher at this address, with the other options. Raises ConfigError."""
    publisher = EventPublisher(address, config.kv_events_replay, config.kv_events_topic)
    log.warning("KV events with the tokens of prompts are published on %s", ", ".join(publisher.addresses))
    return publisher
