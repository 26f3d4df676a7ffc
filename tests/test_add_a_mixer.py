"""docs/add-a-mixer.md, followed literally: its files are written, its commands run, its model is served."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[1] / "docs" / "add-a-mixer.md"
PLAIT = (sys.executable, "-m", "plait")
MOST_LINES, MOST_FILES = 120, 3


def written_files() -> dict[str, str]:
    """Code blocks behind a line with a file's name."""
    return dict(re.findall(r"^`(\S+\.py)`:\n\n```python\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S))


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text("utf-8"), re.M | re.S)
    return [shlex.split(line)[1:] for block in blocks for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("mixer")
    for name, text in written_files().items():
        (made / name).parent.mkdir(exist_ok=True)
        (made / name).write_text(text, "utf-8")
    return made


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(PAGE.parents[1]), "OMP_NUM_THREADS": "1"}


def plait(folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [*PLAIT, *arguments], cwd=folder, env=environment(), capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def verified(folder: Path) -> str:
    """What the page's first command printed; it leaves the small model."""
    return plait(folder, *commands()[0], "--cpu", "--threads", "1")


def test_page_makes_a_hybrid_of_few_lines_in_few_files_and_no_line_of_plait() -> None:
    files = written_files()
    assert set(files) == {"average/op.py", "average/kernel.py", "average/__init__.py"}
    assert len(files) <= MOST_FILES
    assert sum(text.count("\n") for text in files.values()) <= MOST_LINES
    assert max(len(line) for text in files.values() for line in text.splitlines()) <= 110


def test_page_verifies_its_family(verified: str) -> None:
    rows = [line.strip() for line in verified.splitlines()]
    assert rows[-1] == f"all {len(rows) - 1} checks passed"
    assert all(row.startswith("ok") for row in rows[:-1])
    for shown in re.findall(r"^\| `([^`…]+)`", PAGE.read_text("utf-8"), re.M):
        assert any(shown in row for row in rows), shown
    assert any("native kernels, one call" in row for row in rows), "the step is not recorded"


@pytest.mark.slow
def test_page_runs_its_model(folder: Path, verified: str) -> None:
    _, info, generate = commands()
    said = plait(folder, *info)
    assert "gated moving average of 48 channels" in said
    assert "attention, 4 heads × 16" in said
    assert plait(folder, *generate, "--cpu", "--threads", "1", "--quiet").strip()
    plait(folder, "convert", "tiny", "again.gguf", "--plugin", "average", "--threads", "1")
    assert (folder / "again.gguf").is_file()


@pytest.fixture
def server(folder: Path, verified: str) -> Iterator[str]:
    command = [*PLAIT, "serve", "tiny", "--plugin", "average", "--cpu", "--threads", "1", "--port", "0"]
    process = subprocess.Popen(command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    try:
        seen = []
        for line in process.stderr:
            seen.append(line)
            if found := re.search(r"listening on (http://\S+?);? ", line):
                yield found[1]
                break
        else:
            pytest.fail("".join(seen))
    finally:
        process.send_signal(signal.SIGINT)
        process.stderr.read()
        process.wait(timeout=60)


def wait_until_ready(server: str) -> None:
    for _ in range(2000):
        try:
            urllib.request.urlopen(f"{server}/health", timeout=10).close()
            return
        except urllib.error.HTTPError:  # 503: the model is loading
            time.sleep(0.1)
    pytest.fail("the model is not loaded after 200 seconds")


@pytest.mark.slow
def test_page_serves_its_model_from_the_engine_process(server: str, folder: Path) -> None:
    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{server}/v1/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    wait_until_ready(server)
    with urllib.request.urlopen(request, timeout=120) as reply:
        answer = json.load(reply)
    assert answer["usage"]["completion_tokens"] == 4
