"""The end of a process of which the parent has gone. Imports little: it is the first thing that one does."""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with(parent: int) -> None:
    """End when the thread that started this process does; at once if `parent` has gone already.

    Elsewhere than on Linux the parent's end of the socket says so, when it is read.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it went before the signal was asked for
        os._exit(0)
