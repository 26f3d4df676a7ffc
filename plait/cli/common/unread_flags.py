"""What has no effect: flags next to others of the same command line, variables of no option."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import fields

import click
from click.core import ParameterSource

from plait.cli.common.help import suggest_word
from plait.config import EngineConfig, ServerConfig

PREFIX = "PLAIT_"  # of the environment variables: --max-num-seqs is PLAIT_MAX_NUM_SEQS, too
# Variables with our prefix that are no options: what is read elsewhere, and the links that Kubernetes and
# Docker put into a container next to a service that is called plait.
NO_OPTIONS = re.compile(r"PLAIT_(CONFIG|URL|SCREENSHOTS|NAME|ENV_.*|SERVICE_.*|PORT(_\d+_.*)?)")


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


def variable_name(name: str) -> str:
    """The environment variable of an option."""
    return PREFIX + name.upper()


def warn_of_variables(environment: Mapping[str, str]) -> None:
    """Say which variables with our prefix no option reads: most likely they are misspelt."""
    known = {variable_name(f.name) for kind in (ServerConfig, EngineConfig) for f in fields(kind)}
    unknown = [name for name in sorted(environment) if name.startswith(PREFIX) and name not in known]
    if unknown:  # seldom, so that `plait serve` does not import it
        from plait.cluster.config import ClusterConfig

        known |= {variable_name(f.name) for f in fields(ClusterConfig)}
    for name in unknown:
        if name not in known and not NO_OPTIONS.fullmatch(name):
            hint = suggest_word(name, known)
            print(f"plait: {name} is set, and no option has this name{hint}", file=sys.stderr)
