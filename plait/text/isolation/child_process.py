"""Starts the child processes that run code of strangers, and explains their exit status. See `confine`."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[3]
# Signals for a whole group (Ctrl-C, a terminal or a service that goes) are the server's to answer. Before all
# else: imports take a while. The child ends with its standard input.
_RUN = (
    "import sys, signal as s; [s.signal(n, s.SIG_IGN) for n in (s.SIGINT, s.SIGTERM, s.SIGHUP)]; "
    "sys.path.insert(0, sys.argv[1]); from {module} import main; main()"
)
# What a process does to itself: too much of the processor, a stack that ends, a library that gives up.
_OWN = frozenset(
    -number
    for number in (
        *(signal.SIGPROF, signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS),
        *(signal.SIGILL, signal.SIGFPE, signal.SIGTRAP, signal.SIGSYS),
    )
)


def command(module: str, *arguments: str) -> list[str]:
    """The command line of a child that runs `main` of a module; `arguments` end its `sys.argv`."""
    return [sys.executable, "-I", "-c", _RUN.format(module=module), str(_ROOT), *arguments]


def is_foreign(status: int) -> bool:
    """Whether that exit status (negative: a signal) is no fault of what the child worked on.

    Memory that a child may not have is refused to it, so a SIGKILL comes from outside.
    """
    return status < 0 and status not in _OWN
