"""The tool that counts the files a request crosses, and the lines of the reading path."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("trace_request", ROOT / "tools" / "trace_request.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reading_path_is_under_its_limit(tool: ModuleType) -> None:
    found = tool.reading_path()
    assert found["lines"] == sum(found["files"].values()) < tool.MOST_READING


def test_reading_path_names_a_file_that_is_not_there(tool: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    text = "# A\n\n## How a token is made\n\n1. `spec.py`\n2. `gone/file.py`\n"
    (tmp_path / "docs" / "ARCHITECTURE.md").write_text(text)
    (tmp_path / "plait").mkdir()
    (tmp_path / "plait" / "spec.py").write_text("x = 1\n")
    with pytest.raises(tool.TraceFailed, match="gone/file"):
        tool.reading_path(tmp_path)


def test_recorder_counts_lines_of_all_threads_in_files_of_every_chat(
    tool: ModuleType, tmp_path: Path
) -> None:
    folder = tmp_path / "plait"
    folder.mkdir()
    (folder / "work.py").write_text("def work():\n    x = 1\n    return x\n")
    (tmp_path / "flag").write_bytes(b"\0")
    (folder / "timer.py").write_text("def tick():\n    return 1\n")
    recorder = tool.RECORDER.format(folder=f"{folder}/", state=str(tmp_path), chats=2)
    script = f"""
{recorder}
sys.path.insert(0, {str(folder)!r})
from work import work
from timer import tick
work()
flag[0] = 1
thread = threading.Thread(target=work)
thread.start()
thread.join()
tick()
flag[0] = 2
work()
flag[0] = {tool.OVER}
while not os.path.exists(os.path.join(state, f"{{os.getpid()}}.json")):
    time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
    (path,) = tmp_path.glob("*.json")
    counted = json.loads(path.read_text())
    assert counted == {str(folder / "work.py"): 2}
    found = tool.report(tmp_path, {"front": counted, "engine": counted})
    assert (found["num_files"], found["num_files_of"]) == (1, {"engine": 1, "front": 1})
    assert found["files"] == [
        {"file": "plait/work.py", "lines_run": 4, "lines": 3, "processes": ["engine", "front"]}
    ]


@pytest.mark.slow
def test_trace_of_a_streamed_chat_covers_both_processes(tool: ModuleType, smollm2: Path) -> None:
    found = tool.trace(ROOT, smollm2, 8, [])
    assert found["completion_tokens"] == 8
    processes = {file["file"]: file["processes"] for file in found["files"]}
    assert processes["plait/engine/core.py"] == ["engine"]
    assert processes["plait/server/app.py"] == ["front"]
