"""`python -m plait`, and the console script: Ctrl-C ends it without a traceback while it still imports."""

from __future__ import annotations

import os
import sys

INTERRUPTED = 130  # as in plait.cli.main, which is what takes the time


def open_missing_streams() -> None:
    """Have standard streams that were closed for this process (`2>&-`) read nothing and lead nowhere.

    Else the next files or sockets would get their numbers, and messages would be written into these.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            handle = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free: that of this stream
            os.set_inheritable(handle, True)
            setattr(sys, name, os.fdopen(handle, "w" if number else "r", encoding="utf-8"))


def run_plait() -> None:
    """Run the command line and end the process."""
    open_missing_streams()
    try:
        from plait.cli.main import main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    main()


if __name__ == "__main__":
    run_plait()
