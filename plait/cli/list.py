"""`plait list`: the models of the Hub that are on this disk."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plait.checkpoint.packed_cache.file_format import default_folder, list_packed
from plait.cli.common.format_model import bytes_text
from plait.cli.common.options import common_options

if TYPE_CHECKING:
    from plait.checkpoint.hub.cache import CachedModel

UNITS = ((86_400 * 365, "year"), (86_400 * 30, "month"), (86_400, "day"), (3600, "hour"), (60, "minute"))


@click.command("list")
@click.option("--json", "as_json", is_flag=True, help="everything as one JSON array")
@click.option("--cache-dir", help="where packed weights are, if not under ~/.cache/plait")
@common_options()
def list(as_json: bool, cache_dir: str | None) -> None:
    """The models of the Hub on this disk: revision, format, size, when they were last used.

    And the packed weights that `plait warmup` keeps (not in --json).
    """
    from plait.checkpoint.hub.cache import cached_models
    from plait.checkpoint.hub.client import cache_folder

    models = cached_models()
    if as_json:
        text = json.dumps([as_facts(m) for m in models], indent=2)
    else:
        text = f"no models in {cache_folder()}; `plait pull org/name` fetches one"
        if models:
            text = table(models, time.time()) + f"\n{cache_folder()}"
        text += packed_text(default_folder(cache_dir), time.time())
    sys.stdout.write(text + "\n")


def packed_text(folder: Path | None, now: float) -> str:
    """The packed weights that are kept in a folder, if there are any."""
    kept = list_packed(folder)
    width = max((len(item.model) for item in kept), default=0)
    rows = [f"{i.model:{width}}  {bytes_text(i.nbytes)}  {ago(now - i.made)}" for i in kept]
    how = "`plait warmup --clear` removes them"
    return "\n".join(["", "", "packed weights", *rows, f"{folder}; {how}"]) if rows else ""


def as_facts(model: CachedModel) -> dict[str, Any]:
    """One entry of `--json`. `last_used` is in seconds since 1970."""
    return {
        "name": model.repo,
        "commit": model.commit or None,
        "refs": [*model.refs],
        "kind": model.kind,
        "quantizations": [*model.quantizations],
        "nbytes": model.nbytes,
        "unfinished_nbytes": model.unfinished,
        "last_used": model.last_used,
        "folder": str(model.folder),
        "files": model.files,
    }


def table(models: Sequence[CachedModel], now: float) -> str:
    """A line for each revision."""
    rows = [("name", "revision", "format", "size", "used")]
    for m in models:
        kind = " ".join([m.kind or ("-" if m.commit else "unfinished"), ", ".join(m.quantizations)]).strip()
        size = bytes_text(m.nbytes) + (f" + {bytes_text(m.unfinished)} unfinished" if m.unfinished else "")
        revision = " ".join([m.commit[:12], *m.refs])
        rows.append((m.repo, revision, kind, size, ago(now - m.last_used)))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([*map(str.ljust, row, widths), row[-1]]).rstrip() for row in rows)


def ago(seconds: float) -> str:
    """90 -> '1 minute ago'."""
    for length, unit in UNITS:
        if (count := int(seconds // length)) > 0:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "just now"
