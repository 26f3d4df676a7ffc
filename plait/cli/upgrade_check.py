"""`plait upgrade-check`: the version that runs here, the newest one, and what has changed."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from importlib import resources
from pathlib import Path

import click

from plait.cli.common.help import GroupedCommand
from plait.cli.common.options import common_options, json_option, write_json
from plait.errors import PlaitError
from plait.version import __version__

DISTRIBUTION = "plait-engine"
PIP_S = 30.0  # for the package index to answer
SECTION = re.compile(r"^## +\[?(\S+?)\]?(?: |$)")


class IndexUnreachable(PlaitError):
    """The package index did not answer with the newest version."""


@click.command(name="upgrade-check", cls=GroupedCommand)
@click.option("--offline", is_flag=True, help="ask no package index: only what is installed")
@click.option("--changelog", is_flag=True, help="what has changed in the version that is installed")
@json_option("versions as one JSON object")
@common_options()
def upgrade_check(offline: bool, changelog: bool, as_json: bool) -> None:
    """Show which version is installed, and whether the package index has a newer one.

    It asks the index that pip is set up for, and nothing else; no other command asks anyone.

    \b
    plait upgrade-check
    plait upgrade-check --offline --changelog
    """
    newest = None if offline else newest_version()
    if as_json:
        write_json({"installed": __version__, "newest": newest, "python": platform.python_version()})
        return
    print(f"{DISTRIBUTION} {__version__}, on Python {platform.python_version()}")
    if newest is not None and is_newer(newest, __version__):
        print(f"{newest} is there: {sys.executable} -m pip install --upgrade {DISTRIBUTION}")
    elif newest is not None:
        print(f"it is the newest: the index has {newest}")
    if changelog:
        print(read_changelog(__version__))


def newest_version() -> str:
    """The newest version that pip finds, with its own settings. Raises IndexUnreachable."""
    command = [sys.executable, "-m", "pip", "index", "versions", DISTRIBUTION, "--disable-pip-version-check"]
    try:
        done = subprocess.run(
            [*command, "--no-input"], capture_output=True, text=True, timeout=PIP_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise IndexUnreachable(f"pip did not answer: {error}; --offline does not ask it") from error
    found = re.match(rf"{DISTRIBUTION} \((\S+)\)", done.stdout)
    if found is None:
        lines = [
            line.removeprefix("ERROR: ") for line in done.stderr.splitlines() if line.startswith("ERROR: ")
        ]
        why = lines[-1] if lines else f"pip ended with {done.returncode}"
        raise IndexUnreachable(f"the package index has no answer: {why}; --offline does not ask it")
    return found[1]


def is_newer(one: str, other: str) -> bool:
    """Whether a version is after another: 0.10.0 is after 0.9.1."""
    return release(one) > release(other)


def release(version: str) -> tuple[int, ...]:
    """Its numbers, up to what is no number."""
    plain = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in plain[0].split(".")) if plain else ()


def read_changelog(version: str) -> str:
    """What the changelog says of a version; a sentence where it says nothing."""
    packaged = resources.files("plait") / "CHANGELOG.md"
    source = Path(__file__).resolve().parents[2] / "CHANGELOG.md"
    for place in (packaged, source):
        if place.is_file():
            return section_of(place.read_text("utf-8"), version) or f"the changelog does not name {version}"
    return "this installation has no changelog"


def section_of(text: str, version: str) -> str | None:
    """The lines under the heading of a version."""
    found: list[str] = []
    is_inside = False
    for line in text.splitlines():
        heading = SECTION.match(line)
        if heading:
            if is_inside:
                break
            is_inside = heading[1] == version
        elif is_inside:
            found.append(line)
    return "\n".join(found).strip() or None
