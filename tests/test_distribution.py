"""The distribution: its name, which is another than the package's, and its version."""

from __future__ import annotations

import platform
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import plait

ROOT = Path(__file__).resolve().parent.parent
PLACES = ("plait", "docs", "tests", "tools", "benchmarks", "examples", ".ci")
KINDS = {".py", ".md", ".txt", ".toml", ".json", ".yml", ""}
# An extra, an install, a requirement or a version under the name of a distribution that is not ours.
FOREIGN = re.compile(
    r"""\bplait\\?\[[a-z]|pip3? install (-\S+ )*['"]?plait\b(?!-engine|/)|\bplait *(==|>=|~=)"""
    r"""|version\(['"]plait['"]\)|pypi\.org/project/plait\b(?!-engine)"""
)


def settings() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def texts() -> list[Path]:
    """Every text of the repository; not its history, which names what was."""
    found = [path for place in PLACES for path in (ROOT / place).rglob("*")] + list(ROOT.iterdir())
    own = {Path(__file__).name, "CHANGELOG.md"}
    return [p for p in found if p.is_file() and p.suffix in KINDS and p.name not in own]


def test_nothing_names_the_distribution_of_others() -> None:
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


def test_distribution_has_its_own_name() -> None:
    assert settings()["project"]["name"] == "plait-engine"


def test_version_is_stated_once_and_read_from_there() -> None:
    project, hatch = settings()["project"], settings()["tool"]["hatch"]
    assert (project["dynamic"], "version" in project) == (["version"], False)
    assert hatch["version"]["path"] == "plait/version.py"
    stated = re.compile(rf"""version\W{{0,6}}{re.escape(plait.__version__)}\b|__version__ = ["']""")
    found = {
        p.relative_to(ROOT).as_posix() for p in texts() if stated.search(p.read_text("utf-8", "replace"))
    }
    measured = {name for name in found if name.startswith("benchmarks/results/")}
    assert found - measured == {"plait/version.py", "docs/openapi.json"}  # the document is generated


def test_setup_takes_the_distribution_of_the_old_name_away_before_it_installs() -> None:
    done = subprocess.run(
        ["make", "-n", "-B", "setup"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert (
        0 < done.index("pip uninstall -qq -y --disable-pip-version-check plait\n") < done.index("-e '.[dev]'")
    )


@pytest.mark.parametrize("has_kernels", [True, False])
def test_a_wheel_with_compiled_kernels_is_for_the_python_that_made_them(
    tmp_path: Path, has_kernels: bool
) -> None:
    """Built by the real backend, from a tree with a package of one module."""
    for name in (
        "pyproject.toml",
        "hatch_build.py",
        "README.md",
        "CHANGELOG.md",
        "LICENSE",
        "plait/version.py",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / ".gitignore").write_text("plait/kernels/cpu/shipped/\n")
    kernel = "plait/kernels/cpu/shipped/x86-64-v3-0/add-0.kernel"
    if has_kernels:
        (tmp_path / kernel).parent.mkdir(parents=True)
        (tmp_path / kernel).write_bytes(b"code")
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel"]
    subprocess.run(build, cwd=tmp_path, check=True, capture_output=True)
    (wheel,) = (tmp_path / "dist").iterdir()
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.endswith(
        f"-{python}-none-manylinux_2_17_{platform.machine()}.whl" if has_kernels else "-py3-none-any.whl"
    )
    assert (kernel in zipfile.ZipFile(wheel).namelist()) == has_kernels
