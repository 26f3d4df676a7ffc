"""The wheel that images are built from, and what of Plait runs without which packages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import plait
from tests.test_deploy import DOCKERFILES, ROOT, steps
from tests.test_distribution import settings

EXTRAS = {"server", "cuda", "hub", "otel", "bench", "convert", "cluster", "store"}
# What only a server, a GPU, the Hub or a benchmark needs.
NOT_CORE = (
    *("starlette", "uvicorn", "httptools", "uvloop", "cryptography", "opentelemetry"),
    *("huggingface_hub", "aiohttp", "matplotlib", "triton", "transformers"),
)
WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Missing())
from plait.cli.main import main
sys.argv = ["plait", *{arguments!r}]
main()
"""


@pytest.fixture(scope="module", params=DOCKERFILES)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a folder with nothing but what the image copies there, by the backend that pip runs."""
    context = tmp_path_factory.mktemp("context")
    for kind, text in steps(request.param):
        if kind == "COPY" and "--from=" not in text:
            *sources, target = text.split()
            (context / target.rstrip("/")).parent.mkdir(parents=True, exist_ok=True)
            if target.endswith("/"):
                (context / target).mkdir(exist_ok=True)
            for source in sources:
                if (ROOT / source).is_dir():
                    ignored = shutil.ignore_patterns("__pycache__")
                    shutil.copytree(ROOT / source, context / target, ignore=ignored)
                else:
                    shutil.copy(ROOT / source, context / target)
    code = "from hatchling import build; print(build.build_wheel('out'))"
    done = subprocess.run([sys.executable, "-c", code], cwd=context, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-500:]
    return context / "out" / done.stdout.splitlines()[-1]


def test_the_wheel_of_an_image_has_the_package_and_its_metadata(wheel: Path) -> None:
    assert wheel.name == f"plait_engine-{plait.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        (info,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        found = HeaderParser().parsestr(file.read(info).decode())
        (entry,) = (name for name in names if name.endswith("entry_points.txt"))
        assert "plait = plait.__main__:run_plait" in file.read(entry).decode()
    package = {
        path for path in (ROOT / "plait").rglob("*") if path.is_file() and "__pycache__" not in path.parts
    }
    assert names >= {path.relative_to(ROOT).as_posix() for path in package}
    assert {"plait/CHANGELOG.md", "plait/py.typed", "plait/server/page/index.html"} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "tools/"))]
    assert (found["Name"], found["Version"]) == ("plait-engine", plait.__version__)
    assert set(found.get_all("Provides-Extra") or ()) >= EXTRAS
    assert found["Requires-Python"] == ">=3.11"


def test_a_plain_install_has_what_a_server_needs() -> None:
    """pip takes no extra unasked, so `server` names a part of the dependencies."""
    project = settings()["project"]
    needed = {Requirement(one).name for one in project["dependencies"]}
    extras = project["optional-dependencies"]
    assert {Requirement(one).name for one in extras["server"]} <= needed
    for extra in ("cuda", "hub", "otel", "bench", "store"):
        assert not {Requirement(one).name for one in extras[extra]} & needed
    assert {*extras["server"]} <= {*project["dependencies"]}


def test_every_python_of_the_classifiers_is_in_the_matrix_of_tests() -> None:
    stated = {
        one.rpartition(" ")[2]
        for one in settings()["project"]["classifiers"]
        if one.startswith("Programming")
    }
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8")
    matrices = re.findall(r"python: \[(.+)\]", workflow)
    assert matrices
    for matrix in matrices:  # of the tests, and of the wheels with kernels
        assert {one.strip(' "') for one in matrix.split(",")} == stated == {"3.11", "3.12", "3.13", "3.14"}


@pytest.mark.parametrize(
    "arguments",
    [
        ("generate", "--prompt", "And it came to pass", "--max-tokens", "4", "--temperature", "0", "--cpu"),
        pytest.param(("info", "--ops", "--cpu"), marks=pytest.mark.slow),
        pytest.param(("tokenize", "-t", "And"), marks=pytest.mark.slow),
    ],
    ids=lambda words: words[0],
)
def test_the_core_runs_without_what_only_a_server_or_a_gpu_needs(arguments: tuple[str, ...]) -> None:
    command, *rest = arguments
    words = [command, "--model", str(ROOT / "examples" / "nano-hybrid"), *rest]
    code = WITHOUT.format(blocked=set(NOT_CORE), arguments=words)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-500:]
    assert done.stdout.strip()
