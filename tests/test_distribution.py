"""The distribution: its name, which is another than the package's, and its version."""

from __future__ import annotations

import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest

import plait

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("plait", "docs", "tests", "tools", "benchmarks", "examples", ".ci")
KINDS = {".py", ".md", ".txt", ".toml", ".json", ".yml", ""}
# An extra, an install, a requirement or a version under the name of somebody else's distribution.
FOREIGN = re.compile(
    r"""\bplait\\?\[[a-z]|pip3? install (-\S+ )*['"]?plait\b(?!-engine|/)|\bplait *(==|>=|~=)"""
    r"""|version\(['"]plait['"]\)|pypi\.org/project/plait\b(?!-engine)"""
)


def project() -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    return found


def texts() -> list[Path]:
    """Every text of the repository; not its history, which names what was."""
    found = [path for place in PLACES for path in (ROOT / place).rglob("*")] + list(ROOT.iterdir())
    own = {Path(__file__).name, "CHANGELOG.md"}
    return [p for p in found if p.is_file() and p.suffix in KINDS and p.name not in own]


def test_nothing_names_the_distribution_of_somebody_else() -> None:
    named = [
        f"{path.relative_to(ROOT)}: {found[0]}"
        for path in texts()
        if (found := FOREIGN.search(path.read_text("utf-8", errors="replace")))
    ]
    assert len(texts()) > 500
    assert named == []


@pytest.mark.parametrize(
    "text",
    ["pip install 'plait[hub]'", "pip install plait", "pip install -U plait", 'version("plait")', "plait>=1"],
)
def test_the_other_name_would_be_found(text: str) -> None:
    assert FOREIGN.search(text)
    assert not FOREIGN.search(text.replace("plait", "plait-engine"))


def test_the_distribution_has_its_own_name_and_the_version_of_the_package() -> None:
    assert project()["name"] == "plait-engine"
    assert "version" in project()["dynamic"]
    build = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["hatch"]["version"]["path"]
    assert f'__version__ = "{plait.__version__}"' in (ROOT / build).read_text("utf-8")


def test_setup_takes_the_distribution_of_the_old_name_away_before_it_installs() -> None:
    done = subprocess.run(
        ["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert (
        0 < done.index("pip uninstall -qq -y --disable-pip-version-check plait\n") < done.index("-e '.[dev]'")
    )
