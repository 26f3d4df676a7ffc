"""Flags that have no effect next to others of the same command line."""

from __future__ import annotations

from collections.abc import Sequence

import click
from click.core import ParameterSource


def refuse_unread(*rows: tuple[bool, Sequence[str], str]) -> None:
    """Raises UsageError for an option on the command line that has no effect there.

    `rows`: whether it holds, which parameters are not read then, and why.
    """
    context = click.get_current_context()
    flags = {param.name: param.opts[0] for param in context.command.params}
    for holds, names, why in rows:
        for name in names if holds else ():
            if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
                raise click.UsageError(f"{flags[name]} has no effect: {why}; leave it out")


def refuse_in_verify(family: str | None, made_up: object, cell: str | None, *, has_ranks: bool) -> None:
    """Raises UsageError for what `plait verify` does not read. `made_up`: what makes models of its own."""
    texts = ("batch", "max_tokens", "prompts_file", "head", "quick", "graph")
    refuse_unread(
        (family is not None, ("cell", "certificate", "tokens"), "--family checks other things"),
        (made_up is not None, texts, "models that are made up have requests of their own"),
        (made_up is None, ("tokens",), "it is of --certificate"),
        (cell is not None, ("tokens",), "--cell is run once"),
        (
            made_up is None and has_ranks,
            ("batch", "head", "quick", "graph", "cell"),
            "ranks run the same requests",
        ),
    )


def name_head(head: str | None) -> str:
    """What `--speculate` is, of `plait verify --head`. Raises UsageError for what names no head."""
    if head in ("", "off", "ngram", "mtp"):
        raise click.UsageError(
            f"--head {head}: it takes a head of its own files; all other drafts are checked anyway"
        )
    return head or "off"
