"""Scripts outside the package: the demo, the benchmarks."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_readme_has_the_tables_that_the_tests_give() -> None:
    spec = importlib.util.spec_from_file_location("families_table", ROOT / "tools" / "families_table.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert tool.updated(text) == text, "run: python tools/families_table.py --write"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_the_demo_shows_a_chat_and_a_completion_and_ends_cleanly(smollm2: Path) -> None:
    done = run("tools/demo.py")
    assert done.returncode == 0, done.stderr
    for shown in (
        "healthy after",
        "POST /v1/chat/completions",
        "POST /v1/completions",
        "both are loaded",
        "exit code 0",
        "Everything",
    ):
        assert shown in done.stdout


@pytest.mark.slow
def test_a_benchmark_checks_before_it_counts(smollm2: Path) -> None:
    few = ("--repeats", "1", "--tokens", "2", "--contexts", "8", "--lengths", "16", "--batches", "1,2")
    done = run("benchmarks/run.py", "--only", "smollm2", "--dry", "--", *few)
    assert done.returncode == 0, done.stderr
    assert "checked: " in done.stdout
    assert "decode, context 8" in done.stdout
