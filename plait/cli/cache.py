"""`plait cache`: what Plait keeps on this disk so that starts are fast: sizes, ages, removal."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import click

from plait.cache_folder import NO_HOME, cache_base
from plait.checkpoint.packed_cache.file_format import drop_unfinished, list_packed
from plait.cli.common.format_model import bytes_text
from plait.cli.common.options import Command, common_options, json_option, to_json
from plait.cli.hub import ago
from plait.errors import ConfigError
from plait.kernels.load import cached_kernels, remove_cached
from plait.loading.image.lookup import SUFFIX
from plait.loading.kernel_trials.verdicts import FOLDER

KINDS = ("kernels", "packed", "images", "trials", "findings")
DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class CachedItem:
    """An item of the cache. `used`: when it was last used at a startup, or made, in seconds since 1970."""

    kind: str
    name: str
    nbytes: int
    used: float
    path: Path


def folder_option(function: Command) -> Command:
    text = "the folder to look into, if it is not ~/.cache/plait"
    return click.option("--cache-dir", metavar="FOLDER", help=text)(function)


@click.group(invoke_without_command=True)
@folder_option
@json_option("everything as one JSON array")
@common_options()
@click.pass_context
def cache(ctx: click.Context, cache_dir: str | None, as_json: bool) -> None:
    """List kernels, packed weights, startup images, trials of GPU kernels and findings: sizes and ages.

    Compiled kernels that no run has used for 30 days are removed by a later run. Models of the Hub are kept
    elsewhere: see `plait list`.
    """
    if ctx.invoked_subcommand is not None:
        if cache_dir or as_json:
            raise click.UsageError(f"options of `plait cache` come after {ctx.invoked_subcommand!r}")
        return
    base = base_of(cache_dir)
    found, now = list_cached(base), time.time()
    if as_json:
        text = to_json([{**as_facts(one), "age_s": round(now - one.used)} for one in found])
    else:
        rows = [(one.kind, one.name, bytes_text(one.nbytes), ago(now - one.used)) for one in found]
        widths = [max((len(row[i]) for row in rows), default=0) for i in range(3)]
        lines = ["  ".join([*map(str.ljust, row, widths), row[-1]]) for row in rows]
        total = bytes_text(sum(one.nbytes for one in found))
        text = "\n".join([*lines, f"{base}: {total if found else 'nothing is kept'}"])
    sys.stdout.write(text + "\n")


@cache.command()
@click.argument("kinds", nargs=-1, type=click.Choice(KINDS), metavar="[KIND]...")
@folder_option
@click.option("--unused-days", type=click.IntRange(0), default=0, help="only what no run used for so long")
@common_options()
def clean(kinds: tuple[str, ...], cache_dir: str | None, unused_days: int) -> None:
    """Remove what is kept: kernels, packed, images, trials or findings; without KIND all but findings.

    \b
    plait cache clean
    plait cache clean kernels --unused-days 7

    Runs compile kernels and try them on a GPU again, `plait warmup` packs weights again, and servers that
    run keep what they have loaded. Findings say what a model is: they go only if they are named, and
    `--probe` finds them again.
    """
    base, freed = base_of(cache_dir), 0
    for kind in kinds or ("kernels", "packed", "images", "trials"):
        freed += CLEANERS[kind](base, unused_days * DAY_S)
    sys.stdout.write(f"removed from {base}: {bytes_text(freed)} freed\n")


def base_of(cache_dir: str | None) -> Path:
    """The folder that is meant. Raises ConfigError if there is none."""
    base = cache_base(cache_dir)
    if base is None:
        raise ConfigError(NO_HOME)
    return base


def list_cached(base: Path) -> list[CachedItem]:
    """Everything that is kept under a folder, by kind and name."""
    kernels = [
        CachedItem("kernels", one.path.name, one.nbytes, one.used, one.path) for one in cached_kernels(base)
    ]
    packed = [
        CachedItem("packed", one.model, one.nbytes, one.made, one.path)
        for one in list_packed(base / "packed")
    ]
    images = list_files("images", base / "images", f"*{SUFFIX}")
    trials = list_files("trials", base / FOLDER)
    return [*kernels, *packed, *images, *trials, *list_files("findings", base / "probes")]


def list_files(kind: str, folder: Path, pattern: str = "*.json") -> list[CachedItem]:
    """Files of one kind, such as findings of probes without a place next to a model."""
    found = []
    for path in sorted(folder.glob(pattern)):
        with suppress(FileNotFoundError):  # another process has removed it meanwhile
            status = path.stat()
            found.append(CachedItem(kind, path.stem, status.st_size, status.st_mtime, path))
    return found


def as_facts(one: CachedItem) -> dict[str, object]:
    return {"kind": one.kind, "name": one.name, "nbytes": one.nbytes, "path": str(one.path)}


def remove_files(kind: str, base: Path, unused_s: float) -> int:
    """Remove the files of one kind that are that old; the bytes freed. Raises OSError."""
    old = [one for one in list_cached(base) if one.kind == kind and time.time() - one.used >= unused_s]
    for one in old:
        one.path.unlink(missing_ok=True)
    return sum(one.nbytes for one in old)


def remove_packed(base: Path, unused_s: float) -> int:
    drop_unfinished(base / "packed")
    return remove_files("packed", base, unused_s)


def remove_images(base: Path, unused_s: float) -> int:
    drop_unfinished(base / "images")
    return remove_files("images", base, unused_s)


CLEANERS: dict[str, Callable[[Path, float], int]] = {
    "kernels": remove_cached,
    "packed": remove_packed,
    "images": remove_images,
    "trials": lambda base, unused_s: remove_files("trials", base, unused_s),
    "findings": lambda base, unused_s: remove_files("findings", base, unused_s),
}
