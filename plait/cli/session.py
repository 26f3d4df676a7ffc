"""What one invocation of `plait` remembers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Session:
    """`debug`: errors are printed with their traceback."""

    debug: bool = False
