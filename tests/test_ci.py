"""What the pipeline says of what it could not test."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TOOLS = ("bash", "env", "id", "mktemp", "rm", "tail", "timeout", "dirname", "true", "chmod")
SKIPS = """
import pytest

@pytest.mark.parametrize("n", range(4))
def test_a(n): pytest.skip("no moon tonight") if n else None

@pytest.mark.skipif(True, reason="no sun")
def test_b(): pass
"""


@pytest.mark.parametrize("workers", ["0", "2"])
def test_a_run_ends_with_how_many_were_skipped_for_what(tmp_path: Path, workers: str) -> None:
    (tmp_path / "conftest.py").write_text("from tests.skips import pytest_terminal_summary\n")
    (tmp_path / "test_skips.py").write_text(SKIPS)
    command = [sys.executable, "-m", "pytest", "-q", "-p", "xdist", "-n", workers, str(tmp_path)]
    own = {
        key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")
    }  # like PYTEST_ADDOPTS
    env = {**own, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    *_, head, first, second, last = done.stdout.splitlines()
    assert head == "skipped 4, because:"
    assert re.fullmatch(r" +3  no moon tonight \(.*test_skips\.py\)", first)
    assert re.fullmatch(r" +1  no sun \(.*test_skips\.py\)", second)
    assert re.match("1 passed, 4 skipped", last)


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A checkout with the pipeline, and a folder of the only programs that there are."""
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    (tmp_path / "bin").mkdir()
    for name in TOOLS:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name) or name)
    return tmp_path


def program(machine: Path, name: str, script: str) -> None:
    path = machine / "bin" / name
    path.unlink(missing_ok=True)
    path.write_text(f"#!{machine}/bin/bash\n{script}\n")
    path.chmod(0o755)


def run(machine: Path, what: str, **env: str) -> subprocess.CompletedProcess[str]:
    given = {"PATH": str(machine / "bin"), "BIN": str(machine / "bin"), **env}
    return subprocess.run([f".ci/{what}"], cwd=machine, env=given, capture_output=True, text=True, timeout=60)


def test_chromium_that_is_there_is_not_installed(machine: Path) -> None:
    program(machine, "apt-get", "exit 9")
    program(machine, "chromium", "")
    assert run(machine, "chromium").returncode == 0
    (machine / "bin" / "chromium").unlink()
    assert run(machine, "chromium", CHROME_BIN="/somewhere/chrome").returncode == 0


@pytest.mark.parametrize(
    ("user", "found"),
    [("0", "chromium-headless-shell"), ("1000", "chromium-headless-shell"), ("0", "chromium")],
)
def test_chromium_is_installed_by_root_or_with_sudo(machine: Path, user: str, found: str) -> None:
    """Its shell where there is a package of it."""
    program(machine, "id", f"echo {user}")
    program(machine, "sudo", 'shift; exec "$@"')
    script = f'echo "$1 ${{!#}}" >>"$BIN/log"; [ "$1" = update ] || [ "${{!#}}" = {found} ]'
    program(machine, "apt-get", script)
    assert run(machine, "chromium").returncode == 0
    update, *installed = (machine / "bin" / "log").read_text().splitlines()
    assert update.startswith("update ")
    tried = ["chromium-headless-shell", "chromium"]
    assert installed == [f"install {name}" for name in tried[: tried.index(found) + 1]]


def test_why_chromium_could_not_be_installed_is_reported(machine: Path) -> None:
    done = run(machine, "chromium")
    assert (done.returncode, done.stdout) == (1, "this system has no apt-get to install it\n")
    program(machine, "apt-get", "echo E: no network; exit 100")
    program(machine, "id", "echo 1000")
    assert "neither root nor sudo" in run(machine, "chromium").stdout
    program(machine, "id", "echo 0")
    assert "E: no network" in run(machine, "chromium").stdout


@pytest.mark.parametrize("status", [0, 2])
def test_the_last_lines_are_the_summary_and_what_was_not_tested(machine: Path, status: int) -> None:
    program(machine, "make", f'[ "$1" = check ] || {{ echo 7 passed in 1.0s; exit {status}; }}')
    done = run(machine, "run")
    assert done.returncode == status
    summary, more = done.stdout.splitlines()
    assert summary == "7 passed in 1.0s"
    assert more.startswith(
        ".ci/run: the page was not tested: there is no Chromium, and this system has no apt-get"
    )
    program(machine, "chromium", "")
    assert run(machine, "run").stdout.splitlines() == ["7 passed in 1.0s"]
