"""Headings and tables in a terminal, and the type of what they show."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import click

Facts = dict[str, Any]


def make_heading(text: str) -> str:
    return click.style(text, bold=True) if sys.stdout.isatty() else text


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text, every column but the last as wide as it must be."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]) - 1)]
    return ["  " + "  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows]
