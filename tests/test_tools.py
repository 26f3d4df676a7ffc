"""Scripts outside the package: the demo, the benchmarks."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def test_the_page_of_families_has_what_the_tests_give() -> None:
    spec = importlib.util.spec_from_file_location("families_table", ROOT / "tools" / "families_table.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = tool.PAGE.read_text(encoding="utf-8")
    assert tool.updated(text) == text, "run: python tools/families_table.py --write"


def test_results_of_a_machine_are_one_file_with_the_newest_of_each_kind(tmp_path: Path) -> None:
    def merge(name: str, *rows: int) -> subprocess.CompletedProcess[str]:
        (tmp_path / name).write_text(json.dumps({"rows": rows}))
        return run("benchmarks/merge_results.py", str(tmp_path / name))

    assert merge("2026-01-02-amd-epyc-2-cores-last.json", 1).returncode == 0
    assert merge("engine-2026-01-01-amd-epyc-2-cores.json", 2).returncode == 0
    assert merge("2026-01-03-amd-epyc-2-cores.json", 3).returncode == 0
    assert merge("2026-01-03-amd-epyc-2-cores.json", *range(100)).returncode == 0  # later on that day
    older = merge("2026-01-02-amd-epyc-2-cores.json", 4)
    assert (older.returncode, "is older than models of 2026-01-03" in older.stderr) == (1, True)
    assert "is not named" in merge("other.json").stderr
    kept = json.loads((tmp_path / "amd-epyc-2-cores.json").read_text())
    assert kept["engine"] == {"date": "2026-01-01", "measured": {"rows": [2]}}
    assert kept["models"] == {"date": "2026-01-03", "measured": {"rows": list(range(100))}}
    assert {p.name for p in tmp_path.iterdir()} == {
        "amd-epyc-2-cores.json", "other.json", "2026-01-02-amd-epyc-2-cores.json",
    }  # fmt: skip


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
