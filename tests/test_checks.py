"""The checks of `make check`: imports, modules without torch, and sizes."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tools_{name}", ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_imports, check_sizes = tool("check_imports"), tool("check_sizes")
WITHOUT_TORCH = ("plait", *(f"plait.{name}" for name in (*check_imports.NO_TORCH, "cli.main")))
BLOCKED = """
import importlib, pkgutil, sys
sys.modules["torch"] = None  # makes `import torch` an ImportError
for name in sys.argv[1:]:
    module = importlib.import_module(name)
    for found in pkgutil.walk_packages(getattr(module, "__path__", ()), name + "."):
        if name != "plait" and not found.name.endswith("__main__"):
            importlib.import_module(found.name)
if sys.argv[1:] in (["plait"], ["plait.cli.main"]):
    assert "rich" not in sys.modules, "rich was imported at the door"
"""


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / "plait" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_every_import_goes_down() -> None:
    assert check_imports.broken_edges() == []


def test_no_files_and_no_folders_import_each_other() -> None:
    assert check_imports.broken_circles() == []


def test_no_folder_is_crowded() -> None:
    assert check_imports.crowded_folders() == []


def test_a_circle_of_files_and_one_of_folders_are_named(tmp_path: Path) -> None:
    files = {
        "ops/norm.py": "from plait.ops import rope\n",
        "ops/rope.py": "def f():\n    from plait.ops.norm import norm\n",
        "text/chat/one.py": "import plait.text.output.two\n",
        "text/chat/three.py": "",
        "text/output/two.py": "import plait.text.chat.three\n",
    }
    assert check_imports.broken_circles(write(tmp_path, files)) == [
        "files import each other: ops.norm, ops.rope",
        "folders import each other: text.chat, text.output",
    ]


def test_a_crowded_folder_is_named_unless_its_modules_are_siblings(tmp_path: Path) -> None:
    files = {f"{folder}/m{n}.py": "" for folder in ("text", "families") for n in range(16)}
    assert check_imports.crowded_folders(write(tmp_path, files)) == [
        "plait/text: 16 modules, the limit is 15"
    ]


def test_every_file_and_function_is_within_its_limit() -> None:
    assert check_sizes.too_long() == []


@pytest.mark.parametrize("name", WITHOUT_TORCH)
def test_a_module_without_torch_imports_with_torch_blocked(name: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", BLOCKED, name], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("file", "text", "why"),
    [
        ("ops/norm.py", "from plait.model.decoder import Decoder\n", "tier 2 may not import from tier 3"),
        ("model/mixers/mla.py", "import plait.families.llama\n", "sideways"),
        ("families/llama.py", "from plait.checkpoint import weights\n", "sideways"),
        ("schedule/scheduler.py", "def plan():\n    import torch\n", "must not load torch"),
        ("text/output/stop_strings.py", "from torch import Tensor\n", "must not load torch"),
        ("engine/core.py", "import os\nx = os.environ['A']\n", "only cli/ may read the environment"),
        ("runner/inputs.py", "from os import getenv\n", "only cli/ may read the environment"),
        ("ops/rope.py", "from . import norm\n", "relative import"),
        ("model/layers/moe.py", "import plait.kernels.cpu.moe\n", "through plait.kernels.load()"),
        ("utils/text.py", "import plait.errors\n", "utils has no tier"),
    ],
)
def test_a_broken_edge_is_named(tmp_path: Path, file: str, text: str, why: str) -> None:
    blank = {"checkpoint/weights.py": "", "errors.py": ""}
    (edge,) = check_imports.broken_edges(write(tmp_path, {**blank, file: text}))
    assert edge.startswith(f"plait/{file}:")
    assert why in edge


def test_the_sideways_table_is_honoured(tmp_path: Path) -> None:
    files = {
        "families/llama.py": "from plait.checkpoint import names\nimport plait.checkpoint.names\n",
        "checkpoint/names.py": "from plait.errors import PlaitError\nimport torch\n",
        "model/decoder.py": "import plait.checkpoint.weights\nfrom plait.state.store import Store\n",
        "runner/runner.py": "from plait.schedule.plan import Plan\nfrom plait.model.decoder import Decoder\n",
        "cli/serve.py": "import os\nfrom plait.server.run import serve\nx = os.environ\n",
        "__init__.py": "from plait.llm.llm import LLM\n",
    }
    assert check_imports.broken_edges(write(tmp_path, files)) == []


def test_a_long_file_and_a_long_function_are_named(tmp_path: Path) -> None:
    body = "def long():\n" + "    x = 1\n" * 51
    write(tmp_path, {"ops/norm.py": body, "ops/rope.py": "x = 1\n" * 401})
    write(tmp_path, {"kernels/cpu/pointwise/norm.py": body})
    assert check_sizes.too_long(tmp_path) == [
        "plait/ops/norm.py:1: long has 52 lines, the limit is 50",
        "plait/ops/rope.py:1: 401 lines, the limit is 400",
    ]


def test_a_docstring_does_not_count_as_length(tmp_path: Path) -> None:
    text = 'def f():\n    """Long.\n' + "    words\n" * 60 + '    """\n' + "    x = 1\n" * 40
    assert check_sizes.too_long(write(tmp_path, {"ops/norm.py": text})) == []
