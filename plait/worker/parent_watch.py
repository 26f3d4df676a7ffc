"""Ends a process when its parent has gone. Imports little, because a child process calls it first."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """End this process when the thread that started it does; at once if `parent` has gone already.

    Elsewhere than on Linux, the child sees it when it reads the socket: the parent's end is closed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the signal was requested
        os._exit(0)
