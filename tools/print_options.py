"""Print docs/options.md, the page of all options, from the classes that declare them.

`python tools/print_options.py > docs/options.md`
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, fields

from plait.cli.common.options import variable_name
from plait.cli.serve import TABLES
from plait.cluster.config import ClusterConfig

HEAD = """\
# Options

All options of `plait serve`, as flags, environment variables and keys of a TOML file (`--config`).
Options of the engine hold for every command that runs a model, and for `LLM` by their key. `[cluster]` is of
`plait cluster serve`. This page is made by `tools/print_options.py`; [operations.md](operations.md) says how
they work together.
"""


def rows(kind: type) -> Iterator[str]:
    """A line of the table for each field."""
    for field in fields(kind):
        flags = (f"--{field.name.replace('_', '-')}", *field.metadata["also"])
        default = "" if field.default in (None, (), MISSING) else str(field.default)
        words = str(field.metadata["help"]).replace("|", "\\|")
        variable = variable_name(field.name)
        yield f"| {', '.join(f'`{f}`' for f in flags)} | `{variable}` | {default} | {words} |"


def print_options() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, kind in {**TABLES, "cluster": ClusterConfig}.items():
        parts += [f"## `[{name}]`\n", "| Flag | Variable | Default | |", "|---|---|---|---|", *rows(kind), ""]
    return "\n".join(parts)


if __name__ == "__main__":
    print(print_options(), end="")
