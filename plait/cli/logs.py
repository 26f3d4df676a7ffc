"""`plait logs`: what servers that `plait run` started have written."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import click

from plait.cli.common.help import GroupedCommand
from plait.cli.common.log_file import last_lines, log_path
from plait.cli.common.options import common_options
from plait.errors import ConfigError

LOOK_S = 0.2  # between two looks at a file that is followed


@click.command(cls=GroupedCommand)
@click.option("--file", "named", metavar="FILE", help="another log, as `plait serve --log-file` writes it")
@click.option(
    "--lines", "-n", type=click.IntRange(min=0), default=50, show_default=True, help="lines of its end"
)
@click.option("--follow", "-f", is_flag=True, help="go on with what is written, until Ctrl-C")
@common_options()
def logs(named: str | None, lines: int, follow: bool) -> None:
    """Show the end of the log of servers that `plait run` started.

    \b
    plait logs -f
    plait logs --file /var/log/plait.log --lines 200
    """
    path = Path(named) if named else log_path()
    try:
        size = path.stat().st_size
        told = last_lines(path, lines)
    except FileNotFoundError:
        why = (
            "there is no such log" if named else "`plait run` has started no server yet; --file names another"
        )
        raise ConfigError(f"{path}: {why}") from None
    sys.stdout.write("".join(f"{line}\n" for line in told))
    sys.stdout.flush()
    if follow:
        follow_file(path, size)


def follow_file(path: Path, position: int) -> None:
    """Write what is appended from byte `position` on; a file that is replaced is read from its beginning."""
    while True:
        with path.open("rb") as file:
            file.seek(position)
            seen = os.fstat(file.fileno())
            while True:
                if piece := file.read(1 << 16):
                    sys.stdout.write(piece.decode("utf-8", "replace"))
                    sys.stdout.flush()
                    continue
                time.sleep(LOOK_S)
                if has_changed(path, seen, file.tell()):
                    break
        position = 0


def has_changed(path: Path, seen: os.stat_result, position: int) -> bool:
    """Whether another file has the name now, or the file was cut behind `position`."""
    try:
        now = path.stat()
    except FileNotFoundError:
        return False  # a new one is about to come
    return (now.st_dev, now.st_ino) != (seen.st_dev, seen.st_ino) or now.st_size < position
