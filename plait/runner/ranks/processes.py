"""The processes of ranks: started anew, or forked earlier from the engine's process, which then offers them.

A new process imports torch and Numba for itself. A forked one shares these pages with the engine's process.
It must be forked before that has threads, so long before a `RankGroup` knows the model (`worker/fork_ranks`).

The pair of sockets that holds a rank has two uses. When this end closes, the rank ends. And the rank sends
signs of life through it, which `RankWatch` reads.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol

from msgspec import Struct

from plait.errors import EngineError

LEAVE_S = 5.0  # a rank gets this long to end by itself
LOOK_S = 0.005  # between two looks at a process that is to end
SIGN_S = 0.25  # between two signs of life
QUIET_S = 60.0  # a rank without any is taken for dead, as an engine is
ENDED_S = 5.0  # for this process to find out that a rank has ended, unless it waits for that rank's part
_RUN = (
    "import json, sys, signal as s; [s.signal(n, s.SIG_IGN) for n in (s.SIGINT, s.SIGTERM, s.SIGHUP)]; "
    "sys.path[:] = json.loads(sys.argv[1]); from plait.loading.torch_preload import finish_torch; "
    "finish_torch(); from plait.worker.rank import main; main(int(sys.argv[2]), int(sys.argv[3]))"
)
_offered: list[StartedRank] = []  # by the engine's process that this is
_running: list[StartedRank] = []  # of this process


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


class StartedRank(Struct, frozen=True):
    """A process that waits for `Join` at the other end of `connection`. It ends when `held` closes."""

    process: RankProcess
    connection: Connection
    held: socket.socket

    def let_go(self) -> None:
        """Close what holds it."""
        with suppress(ValueError):
            _running.remove(self)
        self.connection.close()
        self.held.close()

    def has_sign(self) -> bool:
        """Whether it has sent a sign of life since the last call, or has ended, which others find out."""
        try:
            while len(self.held.recv(4096, socket.MSG_DONTWAIT)) == 4096:
                pass
        except BlockingIOError:
            return False
        except OSError:
            return True
        return True

    def has_ended(self) -> bool:
        """Whether its process has closed the other end."""
        with suppress(OSError):
            return self.held.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        return False

    def read_failure(self) -> str | None:
        """Why it failed, if that is among the reports that nothing has read; they are read then."""
        from plait.runner.ranks.messages import Failed, receive_report  # with torch, which is late here

        with suppress(OSError, EOFError, EngineError):
            while self.connection.poll():
                report = receive_report(self.connection)
                if isinstance(report, Failed):
                    return report.text
        return None

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
    alive, held = socket.socketpair()
    numbers = (theirs.fileno(), alive.fileno())
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _RUN, json.dumps(sys.path), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            pass_fds=numbers,
        )
    except BaseException:
        ours.close()
        held.close()
        raise
    finally:
        theirs.close()
        alive.close()
    return StartedRank(process, Connection(ours.detach()), held)


def offer_ranks(ranks: Iterable[StartedRank]) -> None:
    """Have the next `RankGroup` of this process take these."""
    _offered.extend(ranks)


def take_rank() -> StartedRank:
    """A process that was offered, else a new one. Raises OSError."""
    taken = _offered.pop(0) if _offered else start_rank()
    _running.append(taken)
    return taken


class RankWatch:
    """Finds ranks of which no thread runs: of this process, or those given.

    One thread makes it, and looks again and again; no two look at the same ranks.
    """

    def __init__(self, ranks: Sequence[StartedRank] = _running) -> None:
        self._ranks = ranks
        self._signs: dict[int, float] = {}  # by process: when it last showed that it runs
        self._ends: dict[int, float] = {}  # by process: when it was seen to have ended
        self._looked_s = time.monotonic()

    def find_lost(self, ended_s: float = ENDED_S) -> tuple[int, str] | None:
        """(process, why) of a rank that others wait for in vain; None: there is none."""
        if (ended := self.find_ended(ended_s)) is not None:
            return ended
        quiet = self.find_quiet()
        return None if quiet is None else (quiet, f"has shown no sign of life for {QUIET_S:g} s")

    def find_quiet(self, quiet_s: float = QUIET_S) -> int | None:
        """A process that has shown signs of life, and none for so long; None: there is none.

        Before its first one a rank imports, which a slow disk may draw out.
        """
        now = time.monotonic()
        # After a pause of its own this process was stopped, perhaps together with its ranks.
        is_awake = now - self._looked_s <= quiet_s / 4
        self._looked_s = now
        for rank in [*self._ranks]:
            pid = rank.process.pid
            if rank.has_sign() or (pid in self._signs and not is_awake):
                self._signs[pid] = now
            if now - self._signs.get(pid, now) > quiet_s:
                return pid
        return None

    def find_ended(self, ended_s: float = ENDED_S) -> tuple[int, str] | None:
        """(process, why) of a rank that ended so long ago, and is not let go; None: there is none.

        This process waits in a sum for it, on a GPU until NCCL's limit of minutes.
        """
        now = time.monotonic()
        for rank in [*self._ranks]:
            pid = rank.process.pid
            if rank.has_ended() and now - self._ends.setdefault(pid, now) > ended_s:
                failure = rank.read_failure()
                return pid, "has ended" if failure is None else f"has failed: {failure}"
        return None


def show_signs(alive: socket.socket) -> None:
    """Show that this process runs, until rank 0's process has ended: the other end is closed."""
    poll = select.poll()
    poll.register(alive, select.POLLIN)
    while not poll.poll(SIGN_S * 1000):
        try:
            alive.send(b".", socket.MSG_DONTWAIT)
        except BlockingIOError:  # nothing has read the last ones
            pass
        except OSError:
            return
