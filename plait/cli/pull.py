"""`plait pull`: fetch a model from the Hub, only the files that it needs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import click

from plait.cli.common.format_model import bytes_text
from plait.cli.common.options import common_options

if TYPE_CHECKING:
    from plait.checkpoint.find_files import Fetch


@click.command()
@click.argument("model")
@click.option("--revision", help="a branch, tag or commit, as in MODEL@REVISION")
@click.option("--offline", is_flag=True, help="ask nobody: say whether this disk has the whole model")
@click.option("--dry-run", is_flag=True, help="show what would be fetched, and fetch nothing")
@click.option("--json", "as_json", is_flag=True, help="what was found, as one JSON object")
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

    facts: dict[str, Any]
    if is_file_address(model) and not is_hub_name(model):
        if revision or dry_run:
            raise click.UsageError(
                f"{model} is a file, not a repository: --revision and --dry-run are for those"
            )
        path = find_model(model, offline=offline).weights[0]
        facts = {"model": model, "files": [str(path)]}
        sys.stdout.write((json.dumps(facts, indent=2) if as_json else f"{model}: {path}") + "\n")
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
    sys.stdout.write("\n".join([json.dumps(facts, indent=2)] if as_json else lines) + "\n")


def plan_lines(plan: Fetch, missing: list[str]) -> list[str]:
    """What would be fetched, file by file."""
    rows = [
        f"  {bytes_text(plan.sizes[n] or 0):>10}  {n}{'' if n in missing else '  (there already)'}"
        for n in plan.sizes
    ]
    total = bytes_text(sum(plan.sizes[n] or 0 for n in missing))
    return [f"{plan.name} at {plan.commit[:12]}", *rows, f"  {total:>10}  to fetch"]
