"""Child processes that run code of strangers: one line in, one line out, within a time. See `confine`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
import weakref
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import cast

GONE_S = 30.0  # for a process that was killed to be gone: a GPU's driver frees its memory first
_ROOT = Path(__file__).resolve().parents[3]
# Signals for a whole group (Ctrl-C, a terminal or a service that goes) are the server's to answer. Before all
# else: imports take a while. The child ends with its standard input. Hashes come from Python's own modules:
# OpenSSL, which would come with `hashlib`, takes 4 MB of each child. Some builds of Python have no others.
_RUN = (
    "import sys, signal as s; [s.signal(n, s.SIG_IGN) for n in (s.SIGINT, s.SIGTERM, s.SIGHUP)]; "
    "{places}; from importlib.util import find_spec; "
    "sys.modules.update({{'_hashlib': None}} if find_spec('_sha1') else {{}}); "
    "from {module} import main; main()"
)
# Where modules are found: what was installed, or all that this process has, as of an environment's variable.
_OWN_PLACES = "sys.path.insert(0, sys.argv[1])"
_ALL_PLACES = "import json; sys.path[:] = json.loads(sys.argv[1])"
# What a process does to itself: too much of the processor, a stack that ends, a library that gives up.
_OWN = frozenset(
    -number
    for number in (
        *(signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS),
        *(signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS),
    )
)


class ChildProcess:
    """A process that runs `main` of a module, and its two pipes. It may be killed at any time.

    `arguments` end its `sys.argv`; `max_bytes`: of an answer; `inherits`: it gets this process's environment,
    and finds modules where this process does. One thread at a time may ask it; `stop` and `kill` may be
    called by any. Raises OSError if it cannot be started.
    """

    def __init__(self, module: str, *arguments: str, max_bytes: int, inherits: bool = False) -> None:
        run = _RUN.format(module=module, places=_ALL_PLACES if inherits else _OWN_PLACES)
        places = json.dumps([str(_ROOT), *sys.path]) if inherits else str(_ROOT)
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", run, places, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=None if inherits else {},
        )
        self.stop = weakref.finalize(self, _reap, self._process)
        self._max_bytes = max_bytes
        self._in, self._out = cast(FileIO, self._process.stdin), cast(FileIO, self._process.stdout)
        os.set_blocking(self._in.fileno(), False)

    def alive(self) -> bool:
        return self._process.poll() is None

    def kill(self) -> None:
        self._process.kill()

    def read_status(self, within_s: float = 1.0) -> int | None:
        """The exit status of a process that closed its pipe; negative for the signal that ended it.

        None: it has not ended `within_s`. Its pipe closes before it is gone, by as long as the system takes
        to free what it had.
        """
        try:
            return self._process.wait(within_s)
        except subprocess.TimeoutExpired:
            return None

    def explain_start(self, error: Exception, start_s: float) -> str:
        """Why it is not ready, as the end of a sentence. `error`: what its first answer raised."""
        if isinstance(error, TimeoutError):
            return f"did not start within {start_s:g} s; try again"
        status = self.read_status()
        if status is None:
            return f"wrote no first line that can be read ({type(error).__name__})"
        how = f"with exit code {status}" if status >= 0 else f"by {_name_signal(-status)}"
        return (
            f"ended {how} before it was ready; look for a limit of memory or processes, or a broken install"
        )

    def ask(self, line: str, timeout_s: float) -> bytes:
        """The line that it answers to `line`. Raises TimeoutError, after which it must be stopped.

        Raises EOFError or OSError if it ends before that, ValueError for an answer that is too long.
        """
        deadline = time.monotonic() + timeout_s
        rest = memoryview(line.encode())
        while rest:
            _wait(self._in, select.POLLOUT, deadline)
            rest = rest[self._in.write(rest[: 1 << 16]) or 0 :]
        return self.read_line(timeout_s=deadline - time.monotonic())

    def read_line(self, timeout_s: float) -> bytes:
        """The next line that it writes. Raises as `ask` does."""
        deadline = time.monotonic() + timeout_s
        pieces: list[bytes] = []
        size = 0
        while not (pieces and pieces[-1].endswith(b"\n")):
            _wait(self._out, select.POLLIN, deadline)
            piece = self._out.read(1 << 16)
            if not piece:
                raise EOFError("the child closed its pipe")
            size += len(piece)
            if size > self._max_bytes:
                raise ValueError(f"an answer of more than {self._max_bytes} bytes")
            pieces.append(piece)
        return b"".join(pieces)


def _wait(pipe: FileIO, event: int, deadline: float) -> None:
    poll = select.poll()  # select() itself cannot watch descriptors above 1023, which a busy server has
    poll.register(pipe, event)
    left = deadline - time.monotonic()
    if left <= 0 or not poll.poll(left * 1000):
        raise TimeoutError


def _name_signal(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _reap(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    with suppress(subprocess.TimeoutExpired):  # a driver that hangs holds it: it is left to the system
        process.wait(GONE_S)
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()


def is_foreign(status: int) -> bool:
    """Whether that exit status (negative: a signal) is no fault of what the child worked on.

    Memory that a child may not have is refused to it, so a SIGKILL comes from outside.
    """
    return status < 0 and status not in _OWN
