"""`plait pull`, `plait list` and `plait rm`: models of the Hub on this disk."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from plait.checkpoint.packed_cache.file_format import default_folder, list_packed
from plait.cli.common.format_model import bytes_text
from plait.cli.common.options import common_options, json_option, to_json
from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.checkpoint.find_files import Fetch
    from plait.checkpoint.hub.cache import CachedModel

UNITS = ((86_400 * 365, "year"), (86_400 * 30, "month"), (86_400, "day"), (3600, "hour"), (60, "minute"))


@click.command()
@click.argument("model")
@click.option("--revision", help="a branch, tag or commit, as in MODEL@REVISION")
@click.option("--offline", is_flag=True, help="do not ask the Hub: say whether this disk has the whole model")
@click.option("--dry-run", is_flag=True, help="show what would be fetched, and fetch nothing")
@json_option("what was found, as one JSON object")
@common_options()
def pull(model: str, revision: str | None, offline: bool, dry_run: bool, as_json: bool) -> None:
    """Fetch a model from the Hub: its weights, tokenizer and config, and nothing else.

    \b
    plait pull org/name                  # safetensors, or the only GGUF file
    plait pull org/name:Q4_K_M           # one quantization of a repository of GGUF files
    plait pull org/name/file.gguf        # one file, with all its parts
    plait pull org/name@v1.0             # a branch, tag or commit
    plait pull hf.co/org/name:Q4_K_M     # also with the Hub's address in front, or a page's whole address
    plait pull https://host/model.gguf   # a GGUF file of any server

    What was cut off goes on where it stopped. Where it is kept is the library's choice (HF_HOME,
    HF_HUB_CACHE); for gated models log in with `hf auth login`, or set HF_TOKEN.
    """
    from plait.checkpoint.find_files import fetch_model, find_model, plan_fetch
    from plait.checkpoint.hub.client import ask, is_file_address, is_hub_name, parse_hub_name

    facts: dict[str, object]
    if is_file_address(model) and not is_hub_name(model):
        if revision or dry_run:
            raise click.UsageError(
                f"{model} is a file, not a repository: --revision and --dry-run are for those"
            )
        path = find_model(model, offline=offline).weights[0]
        facts = {"model": model, "files": [str(path)]}
        sys.stdout.write((to_json(facts) if as_json else f"{model}: {path}") + "\n")
        return
    name = parse_hub_name(f"{model}@{revision}" if revision else model)
    if offline:
        files = find_model(str(name), offline=True)
        facts = {"model": str(name), "files": [str(p) for p in files.weights], "fetched": 0}
        lines = [f"{name} is on this disk: {files.directory}"]
    else:
        plan = plan_fetch(name, ask(name))
        missing = plan.missing
        nbytes = sum(plan.sizes[n] or 0 for n in missing)
        facts = {
            "model": str(name),
            "commit": plan.commit,
            "folder": str(plan.folder),
            "files": {n: {"nbytes": plan.sizes[n], "there": n not in missing} for n in plan.sizes},
            "fetched": 0 if dry_run else nbytes,
        }
        lines = plan_lines(plan, missing) if dry_run else []
        if not dry_run:
            files = fetch_model(plan)
            verb = f"fetched {bytes_text(nbytes)}" if missing else "everything was there"
            lines = [f"{name} at {plan.commit[:12]}: {verb}", f"  {files.directory}"]
    sys.stdout.write("\n".join([to_json(facts)] if as_json else lines) + "\n")


def plan_lines(plan: Fetch, missing: list[str]) -> list[str]:
    """What would be fetched, file by file."""
    rows = [
        f"  {bytes_text(plan.sizes[n] or 0):>10}  {n}{'' if n in missing else '  (there already)'}"
        for n in plan.sizes
    ]
    total = bytes_text(sum(plan.sizes[n] or 0 for n in missing))
    return [f"{plan.name} at {plan.commit[:12]}", *rows, f"  {total:>10}  to fetch"]


@click.command("list")
@json_option("everything as one JSON array")
@click.option("--cache-dir", help="where packed weights are, if not under ~/.cache/plait")
@common_options()
def list_models(as_json: bool, cache_dir: str | None) -> None:
    """The models of the Hub on this disk: revision, format, size, when they were last used.

    And the packed weights that `plait warmup` keeps (not in --json).
    """
    from plait.checkpoint.hub.cache import cached_models
    from plait.checkpoint.hub.client import cache_folder

    models = cached_models()
    if as_json:
        text = to_json([as_facts(m) for m in models])
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


def as_facts(model: CachedModel) -> dict[str, object]:
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


@click.command()
@click.argument("models", nargs=-1, required=True, metavar="MODEL…")
@click.option("--yes", "-y", is_flag=True, help="do not ask")
@common_options()
def rm(models: tuple[str, ...], yes: bool) -> None:
    """Remove models of the Hub from this disk.

    \b
    plait rm org/name                    # all of it
    plait rm org/name@v1.0               # one revision; files that another one shares stay
    plait rm org/name:Q4_K_M             # one quantization, or /file.gguf

    Only the Hub's cache is touched, never a directory of yours.
    """
    from plait.checkpoint.hub.cache import plan_removal
    from plait.checkpoint.hub.client import parse_hub_name

    plans = [plan_removal(parse_hub_name(model)) for model in models]
    nbytes = bytes_text(sum(plan.nbytes for plan in plans))
    what = ", ".join(text for plan in plans for text in plan.what)
    if not yes:
        if not sys.stdin.isatty():
            raise ConfigError(f"would remove {what} ({nbytes}); stdin is no terminal to ask on: pass --yes")
        click.confirm(f"remove {what} ({nbytes})?", abort=True, err=True)
    for plan in plans:
        plan.execute()
    sys.stdout.write(f"removed {what}: {nbytes} freed\n")
