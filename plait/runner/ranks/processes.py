"""The processes of ranks: started anew, or forked earlier from the engine's process, which then offers them.

A new process imports torch and Numba for itself. A forked one shares these pages with the engine's process.
It must be forked before that has threads, so long before a `RankGroup` knows the model (`worker/fork_ranks`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Protocol

LEAVE_S = 5.0  # a rank gets this long to end by itself
LOOK_S = 0.005  # between two looks at a process that is to end
_RUN = (
    "import json, sys, signal as s; [s.signal(n, s.SIG_IGN) for n in (s.SIGINT, s.SIGTERM, s.SIGHUP)]; "
    "sys.path[:] = json.loads(sys.argv[1]); from plait.worker.rank import main; "
    "main(int(sys.argv[2]), int(sys.argv[3]))"
)
_offered: list[StartedRank] = []  # by the engine's process that this is


class RankProcess(Protocol):
    """A child of this process, as `subprocess.Popen` has it."""

    @property
    def pid(self) -> int: ...
    def wait(self, timeout: float | None = None) -> int:
        """Its exit code, or -N after signal N. Raises subprocess.TimeoutExpired."""
        ...

    def kill(self) -> None: ...


class ForkedProcess:
    """A child that `os.fork` made."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """As `RankProcess`."""
        until = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            try:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:  # the program ignores SIGCHLD, so the system has forgotten the code
                pid, status = self.pid, 0
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired(f"rank process {self.pid}", timeout or 0.0)
            else:
                time.sleep(LOOK_S)
        return self._code

    def kill(self) -> None:
        """End it; nothing happens to one that `wait` has seen end."""
        if self._code is None:
            with suppress(ProcessLookupError):  # the system has forgotten it
                os.kill(self.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class StartedRank:
    """A process that waits for `Join` at the other end of `connection`. It ends when `held` closes."""

    process: RankProcess
    connection: Connection
    held: int

    def let_go(self) -> None:
        """Close what holds it."""
        self.connection.close()
        with suppress(OSError):
            os.close(self.held)

    def end(self) -> None:
        """Wait for its end, and kill it if that does not come. `let_go` comes before."""
        try:
            self.process.wait(LEAVE_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def start_rank() -> StartedRank:
    """Start a process anew. Raises OSError if the system cannot."""
    ours, theirs = socket.socketpair()
    alive, held = os.pipe()
    numbers = (theirs.fileno(), alive)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _RUN, json.dumps(sys.path), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            pass_fds=numbers,
        )
    except BaseException:
        ours.close()
        os.close(held)
        raise
    finally:
        theirs.close()
        os.close(alive)
    return StartedRank(process, Connection(ours.detach()), held)


def offer_ranks(ranks: Iterable[StartedRank]) -> None:
    """Have the next `RankGroup` of this process take these."""
    _offered.extend(ranks)


def take_rank() -> StartedRank:
    """A process that was offered, else a new one. Raises OSError."""
    return _offered.pop(0) if _offered else start_rank()
