"""The engine's child process, as the front process holds it: start it, exchange messages, end it for good."""

from __future__ import annotations

import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

from plait.config import GIB
from plait.loading.image.lookup import has_image
from plait.resource_limits import num_oom_kills
from plait.worker.protocol import (
    LOAD_ENGINE,
    Frames,
    FromChild,
    FromFront,
    Hello,
    SharedStatus,
    frame,
)
from plait.worker.start_process import Imports, StartedProcess, start_process

PIECE = 1 << 18  # bytes read at a time
MAX_LINE = 8192  # of what the process writes to its output
LAST_OUTPUT_S = 1.0  # for the rest of that to be read, if a process of its own still holds the pipe
log = logging.getLogger("plait.engine")


class End(NamedTuple):
    """How a process ended. `is_killed`: by another's SIGKILL; `is_oom`: for memory, None: unknown."""

    how: str
    is_killed: bool = False
    is_oom: bool | None = None

    @property
    def is_foreign(self) -> bool:
        """Whether it had nothing to do with what the process was doing."""
        return self.is_killed and self.is_oom is False


def _choose_imports(hello: Hello) -> Imports:
    """What an engine's process will need first."""
    if hello.builder != LOAD_ENGINE:
        return "nothing"
    return "image" if has_image(hello.model, hello.config) else "torch"


class Spawned:
    """One process, its socket and its shared status block. Call everything from the thread that made it: when
    that thread ends, so does the process. Raises OSError if the system cannot start it.
    """

    def __init__(
        self, hello: Hello, max_planned: int, spare: int = -1, begun: StartedProcess | None = None
    ) -> None:
        """`spare`: descriptor of memory for kernels that no folder can take, or -1; the caller keeps it.

        `begun`: a process that was started already, with these numbers.
        """
        self._frames: Frames[FromChild] = Frames(FromChild)
        self._outbox: deque[memoryview] = deque()
        self._num_oom_kills = num_oom_kills()
        if begun is None:
            begun = start_process(max_planned, spare, _choose_imports(hello))
        self._process, self.socket = begun.process, begun.socket
        self._relay = threading.Thread(target=_relay, args=(begun.output,), name="plait-output", daemon=True)
        self._relay.start()
        self.status = SharedStatus(begun.status, max_planned)
        self.socket.setblocking(False)
        self.send(hello)

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: FromFront) -> None:
        """Queue a message; `pump` sends it. Raises EngineError for one that is too long."""
        self._outbox.append(memoryview(frame(message)))

    @property
    def has_outbox(self) -> bool:
        return bool(self._outbox)

    def pump(self) -> None:
        """Send what the socket takes now. Raises OSError when the child has gone."""
        while self._outbox:
            try:
                num_sent = self.socket.send(self._outbox[0])
            except BlockingIOError:
                return
            if num_sent < len(self._outbox[0]):
                self._outbox[0] = self._outbox[0][num_sent:]
            else:
                self._outbox.popleft()

    def receive(self) -> Iterator[FromChild]:
        """Messages that are there now. Raises EOFError or OSError when the child has gone, and BadFrame."""
        try:
            piece = self.socket.recv(PIECE)
        except BlockingIOError:
            return
        if not piece:
            raise EOFError("the engine's process has gone")
        yield from self._frames.feed(piece)

    def end(self, timeout_s: float = 0.0) -> End:
        """Kill the process unless it ends by itself within `timeout_s`; how it ended. Frees the socket."""
        try:
            code = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            code = None
        self.socket.close()
        self._relay.join(LAST_OUTPUT_S)
        if code is None:
            return End("it was ended")
        if code == -signal.SIGKILL:
            return self._explain_kill()
        if code < 0:
            names = {known.value: known.name for known in signal.Signals}
            return End(f"it was ended by {names.get(-code, f'signal {-code}')}")
        return End(f"it exited with code {code}")

    def _explain_kill(self) -> End:
        """How a process ended that SIGKILL ended: by another process, or for want of memory."""
        before, now = self._num_oom_kills, num_oom_kills()
        is_oom = None if before is None or now is None else now > before
        known = {
            True: "because memory ran out, as the system's count of such kills says",
            False: "which was not for memory: the system's count of such kills stayed the same, so "
            "a user or a program sent it",
            None: "and the system does not say whether for memory, which is one possibility",
        }
        unit = 1 if sys.platform == "darwin" else 1024
        peak_nbytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * unit
        peak = f"its memory was {peak_nbytes / GIB:.2f} GiB at most"
        return End(f"it was ended by SIGKILL, {known[is_oom]}; {peak}", is_killed=True, is_oom=is_oom)


def _relay(output: int) -> None:
    """Log what a process writes, line by line, until no process holds its pipe."""
    with os.fdopen(output, "rb") as lines:
        while line := lines.readline(MAX_LINE):
            if text := line.decode(errors="replace").rstrip():
                log.warning("%s", text)
