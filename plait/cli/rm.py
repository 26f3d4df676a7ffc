"""`plait rm`: models of the Hub leave this disk."""

from __future__ import annotations

import sys

import click

from plait.cli.common.format_model import bytes_text
from plait.cli.common.options import common_options
from plait.errors import ConfigError


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
            raise ConfigError(f"would remove {what} ({nbytes}); nobody is there to ask: pass --yes")
        click.confirm(f"remove {what} ({nbytes})?", abort=True, err=True)
    for plan in plans:
        plan.execute()
    sys.stdout.write(f"removed {what}: {nbytes} freed\n")
