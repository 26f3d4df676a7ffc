"""`python -m plait`, and the console script: Ctrl-C ends it without a traceback while it still imports."""

from __future__ import annotations

import sys

INTERRUPTED = 130  # as in plait.cli.main, which is what takes the time


def run_plait() -> None:
    """Run the command line and end the process."""
    try:
        from plait.cli.main import main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    main()


if __name__ == "__main__":
    run_plait()
