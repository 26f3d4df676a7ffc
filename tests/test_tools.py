"""What stands around the package: the demo, the benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


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
        "exit code 0",
        "Everything",
    ):
        assert shown in done.stdout


@pytest.mark.slow
def test_a_benchmark_checks_before_it_counts(smollm2: Path) -> None:
    started = ("--started", "0", "--prefill", "32", "--decode", "8", "--threads", "1")
    done = run("benchmarks/measure.py", str(smollm2), *started)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["checks"] == {"batch_equals_single": True, "fastest_equals_reference": True}
    assert result["decode_tok_s"] > 0


def test_the_machine_is_described_and_has_a_name_for_files() -> None:
    script = (
        "import sys; sys.path.insert(0, 'benchmarks'); import json, machine;"
        "d = machine.describe(); print(json.dumps([d, machine.slug(d)]))"
    )
    done = run("-c", script)
    assert done.returncode == 0, done.stderr
    described, slug = json.loads(done.stdout)
    assert described["cores"] >= 1
    assert described["cpu"]
    assert slug.endswith("-cores")
    assert slug == slug.lower().replace(" ", "-")
