"""What one invocation of `plait` keeps, and where its log goes."""

from __future__ import annotations

import logging
import sys

from msgspec import Struct


class Session(Struct):
    """`debug`: errors are printed with their traceback."""

    debug: bool = False


class Stderr(logging.Handler):
    """Lines on stderr: `plait: …`, the level only where it matters."""

    def emit(self, record: logging.LogRecord) -> None:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        print(f"plait: {level}{self.format(record)}", file=sys.stderr, flush=True)


def log_to_stderr(level: int) -> None:
    """Plait's own log, from this level on, to stderr."""
    logger = logging.getLogger("plait")
    logger.handlers = [Stderr()]
    logger.setLevel(level)
