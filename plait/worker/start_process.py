"""Starts the engine's process. Little is imported here, so that it begins while the front imports the rest.

What the process loads is in the first message that it gets, which may come much later.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from contextlib import suppress
from typing import Literal, NamedTuple

# Signals for a whole group (Ctrl-C, a terminal or a service that goes) are the front's to answer.
_RUN = (
    "import json, os, sys, signal as s; os.environ.setdefault('OPENBLAS_NUM_THREADS', '1'); "
    "[s.signal(n, s.SIG_IGN) for n in (s.SIGINT, s.SIGTERM, s.SIGHUP)]; "
    "sys.path[:] = json.loads(sys.argv[1]); from plait.loading.torch_preload import begin_torch, die_with; "
    "die_with(int(sys.argv[5])); "
    "sys.argv[6] == 'torch' and begin_torch(); from plait.worker.child import main; "
    "sys.argv[6] == 'image' and __import__('plait.loading.image.start'); main()"
)
Imports = Literal["torch", "image", "nothing"]
NUM_STATS = 64
PLANNED = 5 + NUM_STATS  # words of the shared status block before the requests that a step has


class StartedProcess(NamedTuple):
    """A process, our end of its socket, and descriptors: of its status block, its output, and `spare`.

    `spare`: memory for compiled kernels that no folder can take, or -1. The process ends with the thread that
    started it.
    """

    process: subprocess.Popen[bytes]
    socket: socket.socket
    status: int
    output: int
    spare: int


def new_memory(name: str) -> int:
    """The descriptor of memory that processes can share, empty; gone with its last user. Raises OSError."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def new_spare() -> int:
    """Memory for compiled kernels that no folder can take, or -1."""
    with suppress(OSError):
        return new_memory("plait-kernels")
    return -1


def new_status(max_planned: int) -> int:
    """The descriptor of memory for a `protocol.SharedStatus`: all zero."""
    fd = new_memory("plait-engine")
    os.truncate(fd, 8 * (PLANNED + max_planned))
    return fd


def start_process(max_planned: int, spare: int, imports: Imports) -> StartedProcess:
    """Start one. max_planned: requests of a step, at most; imports: what it imports at once.

    The caller keeps `spare`. Raises OSError if the system cannot start it.
    """
    ours, theirs = socket.socketpair()
    status = new_status(max_planned)
    output, written = os.pipe()
    try:
        numbers = (theirs.fileno(), status, max_planned, os.getpid(), imports, spare)
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _RUN, json.dumps(sys.path), *map(str, numbers)],
            stdin=subprocess.DEVNULL,
            stdout=written,  # whatever a library prints belongs to the log
            stderr=written,  # and not to our stderr: where that is not read, a step would wait for it
            pass_fds=[fd for fd in (theirs.fileno(), status, spare) if fd >= 0],
        )
    except BaseException:
        ours.close()
        os.close(status)
        os.close(output)
        raise
    finally:
        theirs.close()
        os.close(written)
    return StartedProcess(process, ours, status, output, spare)
