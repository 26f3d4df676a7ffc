"""`plait families`: every family, the names by which a config asks for it, and the files it is read from."""

from __future__ import annotations

import sys
from typing import Any

import click

from plait.cli.common.options import common_options, engine_option, json_option, to_json
from plait.cli.model_facts.tables import columns, make_heading


@click.command()
@json_option()
@engine_option("plugins")
@common_options()
def families(as_json: bool, plugins: tuple[str, ...]) -> None:
    """Every family of models: architectures, model types, formats; and what is refused, with the reason."""
    from plait.config import EngineConfig
    from plait.loading.plugins import load_plugins

    load_plugins(EngineConfig(plugins=plugins))
    facts = {"families": list_families(), "refused": list_refused()}
    sys.stdout.write((to_json(facts) if as_json else "\n".join(text_lines(facts))) + "\n")


def list_families() -> list[dict[str, Any]]:
    """Each family: `architectures` and `model_types` of its configs, architectures of GGUF, and two flags.

    `names_only`: it is recognised without a config. `verified`: `plait verify --family` has a small one.
    """
    from plait.families.common.registry import families, find
    from plait.families.gguf.arch import ARCHITECTURES

    every = families()
    files: dict[str, list[str]] = {}
    for arch in ARCHITECTURES.values():
        files.setdefault(find({"architectures": [arch.architecture]}).name, []).append(arch.name)
    return [
        {
            "family": entry.name,
            "architectures": list(entry.architectures),
            "model_types": list(entry.model_types),
            "gguf": sorted(files.get(entry.name, ())),
            "names_only": bool(entry.detection.markers),
            "verified": bool(entry.tiny),
        }
        for entry in sorted(every, key=lambda entry: entry.name)
    ]


def list_refused() -> dict[str, str]:
    """Model types that are known and refused, each with the reason: some but for checkpoints of decoders."""
    from plait.families.common.refused import DECODERS, REFUSED

    decoders = {name: f"{why}; a decoder alone is built" for name, why in DECODERS.items()}
    return dict(sorted({**REFUSED, **decoders}.items()))


def text_lines(facts: dict[str, Any]) -> list[str]:
    """The facts for a reader in a terminal."""
    rows = [("family", "GGUF", "names only", "architectures")]
    for entry in facts["families"]:
        marks = (", ".join(entry["gguf"]) or "-", "yes" if entry["names_only"] else "-")
        rows.append((entry["family"], *marks, ", ".join(entry["architectures"])))
    reasons: dict[str, list[str]] = {}
    for name, why in facts["refused"].items():
        reasons.setdefault(why, []).append(name)
    refused = [f"  {', '.join(names)}: {why}" for why, names in reasons.items()]
    heading = f"{len(facts['families'])} families, all of them from Hugging Face's files"
    return [make_heading(heading), *columns(rows), make_heading("refused"), *refused]
