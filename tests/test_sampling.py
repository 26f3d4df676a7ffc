"""Which cases of a matrix `make test` runs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from plait.version import __version__
from tests.sampling import QUICK, find_left_out, is_sampled, read_commit, read_costly

ROOT = Path(__file__).resolve().parent.parent
MATRIX = """
import pytest

@pytest.mark.sampled(4)
@pytest.mark.parametrize("n", range(16))
def test_plain(n): pass

@pytest.mark.sampled(3, each="name")
@pytest.mark.parametrize("case", range(6))
@pytest.mark.parametrize("name", ["a", "b"])
def test_each(name, case): assert case < 9

SOME = [0, pytest.param(1, marks=pytest.mark.sampled(9)), pytest.param(2, marks=pytest.mark.slow)]

@pytest.mark.parametrize("n", SOME)
def test_some(n): assert n != 1, "one fails"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ("tests.sampling",)\n')
    (tmp_path / "test_matrix.py").write_text(MATRIX)
    (tmp_path / "pytest.ini").write_text(
        "[pytest]\naddopts = -m 'not slow'\nmarkers =\n    slow\n    sampled\n"
    )
    return tmp_path


def run(folder: Path, *arguments: str) -> tuple[set[str], str]:
    """The tests that ran, and the end of the output."""
    own = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    env = {**own, "PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "-m", "pytest", "-rA", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
    ran = set(re.findall(r"^(?:PASSED|FAILED) test_matrix\.py::(\S+)", done.stdout, re.M))
    return ran, done.stdout + done.stderr


def of(ran: set[str], name: str) -> list[str]:
    return sorted(one for one in ran if one.startswith(name))


def test_a_sample_has_its_share_and_each_value_and_the_cases_without_the_mark(folder: Path) -> None:
    ran, printed = run(folder, "--sample=monday", "-p", "xdist", "-n", "2")
    assert len(of(ran, "test_plain")) == 4
    assert [len(of(ran, f"test_each[{name}-")) for name in "ab"] == [2, 2]
    assert of(ran, "test_some") == ["test_some[0]", "test_some[1]"]
    assert "cases of matrices: sample monday" in printed
    (command,) = re.findall(r"^run it again: (.*)$", printed, re.M)
    assert command == f"{sys.executable} -m pytest 'test_matrix.py::test_some[1]'"


def test_a_case_that_is_named_runs_whatever_the_sample_is() -> None:
    def draws(*arguments: str, sample: str = "monday", marks: str = QUICK, keyword: str = "") -> bool:
        option = SimpleNamespace(sample=sample, markexpr=marks, keyword=keyword)
        config: Any = SimpleNamespace(option=option, args=list(arguments))
        return is_sampled(config)

    assert draws("tests/ops")
    assert not draws("tests/ops", "tests/test_a.py::test_it[3]")
    assert not draws("tests/ops", keyword="mamba2")
    assert not draws("tests/ops", sample="all")
    assert not draws("tests/ops", marks="slow or not slow")


def test_the_cases_of_one_value_run_in_all_tests() -> None:
    def case(value: str, n: int) -> Any:
        marks = {"drawn": pytest.mark.drawn(value, ("a", "b", "c")).mark}
        return SimpleNamespace(nodeid=f"tests/test_{n}.py::test_it[{value}]", get_closest_marker=marks.get)

    items = [case(value, n) for value in "abc" for n in range(4)]
    ran = [{item.nodeid for item in items} - find_left_out(items, f"commit {i}") for i in range(20)]
    assert {tuple(sorted({one[-2] for one in some})) for some in ran} == {("a",), ("b",), ("c",)}
    assert {len(some) for some in ran} == {4}


def test_commits_draw_other_cases_and_in_time_all_of_them() -> None:
    items: list[Any] = [
        SimpleNamespace(
            nodeid=f"tests/test_a.py::test_it[{n}]",
            get_closest_marker=lambda name: pytest.mark.sampled(4).mark if name == "sampled" else None,
        )
        for n in range(12)
    ]
    drawn = [{item.nodeid for item in items} - find_left_out(items, f"commit {n}") for n in range(40)]
    assert {len(one) for one in drawn} == {3}
    assert set().union(*drawn) == {item.nodeid for item in items}


def test_a_sample_is_named_by_the_commit_or_the_version(tmp_path: Path) -> None:
    assert re.fullmatch(r"[0-9a-f]{12,}|\d+\.\d+\.\d+", read_commit(ROOT))
    assert read_commit(tmp_path) == __version__


def test_of_costly_tests_a_sixth_runs_and_in_time_all() -> None:
    costly = sorted(read_costly())[:12]
    items: list[Any] = [
        SimpleNamespace(nodeid=name, get_closest_marker=lambda _: None)
        for name in (*costly, "tests/test_a.py::test_of_little_cost")
    ]
    ran = [{item.nodeid for item in items} - find_left_out(items, f"commit {n}") for n in range(40)]
    assert {len(one) for one in ran} == {3}
    assert set.intersection(*ran) == {"tests/test_a.py::test_of_little_cost"}
    assert set().union(*ran) == {item.nodeid for item in items}


def test_every_costly_test_is_there() -> None:
    for name in read_costly():
        path, _, function = name.partition("::")
        names = function.split("::")
        assert any(one in (ROOT / path).read_text() for one in names), f"{name}: not in tests any more"


def test_what_took_long_in_a_run_is_listed(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        "0.60s call     tests/ops/test_a.py::test_it[1]\n0.50s call     tests/ops/test_a.py::test_it[b-c]\n"
        "9.00s setup    tests/ops/test_b.py::test_it\n9.00s call     tests/e2e/test_c.py::test_it\n"
        " 1.00s call     tests/test_d.py::TestWalk::runTest\n0.99s call     tests/test_d.py::test_e\n"
    )
    command = [sys.executable, "tools/list_costly_tests.py", str(log)]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    found = [line for line in ran.stdout.splitlines() if not line.startswith("#")]
    assert found == ["tests/ops/test_a.py::test_it", "tests/test_d.py::TestWalk::runTest"]
