"""Samples of matrices: `make test` runs a part of their cases, and other cases for each commit.

`@pytest.mark.sampled(4)`, on a test or on some of its parameters, runs one in four of the marked cases.
`sampled(4, each="name")` runs that share for every value of the parameter `name`, and one at least;
`sampled(4, across="matrix")` of the cases of all tests with that word, where a matrix is several tests.
Tests that `costly.txt` names run one in six of their cases, or of what a mark leaves.
`@pytest.mark.drawn("b", "abc")` runs the cases of one letter, the same in all tests: what each of the letters
needs, as a kernel that is compiled, is made for one of them.
The commit decides which cases they are, so a run of one commit is the same everywhere.
`make test SAMPLE=all` and `make test-all` run every case, and so does a test that is named by `::` or `-k`.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from collections import defaultdict
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from plait.version import __version__

ROOT = Path(__file__).resolve().parent.parent
COSTLY, COSTLY_SHARE = ROOT / "tests" / "costly.txt", 6
EVERY = "all"
QUICK = "not slow"  # the marks that `make test` runs
FEW_EXAMPLES, MANY_EXAMPLES = 50, 100  # of a test that draws its inputs, unless it says how many


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample", default="", help=f"which cases of a matrix run: a text that draws them, or {EVERY!r}"
    )


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {}).get("sample") or config.option.sample
    config.option.sample = given or read_commit(ROOT)
    # No test depends on how busy the machine is.
    settings.register_profile(
        "plait",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
        max_examples=FEW_EXAMPLES if is_sampled(config) else MANY_EXAMPLES,
    )
    settings.load_profile("plait")


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Workers of one run have one sample, whatever is committed meanwhile."""
    node.workerinput["sample"] = node.config.option.sample


def read_commit(root: Path) -> str:
    """The checkout's commit; the version where there is none, as in a package of the sources."""
    command = ["git", "rev-parse", "--short=12", "HEAD"]
    try:
        found = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return __version__
    return found.stdout.strip() if found.returncode == 0 else __version__


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not is_sampled(config):
        return
    left = find_left_out(items, config.option.sample)
    if left:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left])
        items[:] = [item for item in items if item.nodeid not in left]


def is_sampled(config: pytest.Config) -> bool:
    """Whether a run is of whole files with the quick tests; who names a test gets it."""
    option = config.option
    is_named = bool(option.keyword) or any("::" in argument for argument in config.args)
    return option.sample != EVERY and option.markexpr == QUICK and not is_named


def find_left_out(items: list[pytest.Item], sample: str) -> set[str]:
    """The ids of marked cases that are in no sample of this name."""
    groups: defaultdict[tuple[str, str, int], list[str]] = defaultdict(list)
    costly = read_costly()
    for item in items:
        mark, function = item.get_closest_marker("sampled"), item.nodeid.partition("[")[0]
        if item.get_closest_marker("slow"):
            continue
        if mark is None:
            if function in costly:
                groups["costly", "", COSTLY_SHARE].append(item.nodeid)
            continue
        share, each, across = mark.args[0], mark.kwargs.get("each"), mark.kwargs.get("across")
        share *= COSTLY_SHARE if function in costly else 1
        value = repr(item.callspec.params[each]) if each and isinstance(item, pytest.Function) else ""
        groups[across or function, value, share].append(item.nodeid)
    left = {item.nodeid for item in items if is_left_out(item.get_closest_marker("drawn"), sample)}
    for (_, _, share), ids in groups.items():
        drawn = sorted(ids, key=lambda one: sha256(f"{sample} {one}".encode()).digest())
        left.update(drawn[-(-len(ids) // share) :])
    return left


def read_costly(path: Path = COSTLY) -> frozenset[str]:
    """The tests that take most of a run."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return frozenset(line for line in lines if line and not line.startswith("#"))


def is_left_out(mark: pytest.Mark | None, sample: str) -> bool:
    """Whether a sample has drawn another value than that of a case."""
    if mark is None:
        return False
    value, values = mark.args
    return bool(value != min(values, key=lambda one: sha256(f"{sample} {one}".encode()).digest()))


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say which sample ran, and for each failed test the command that runs it alone."""
    option = terminalreporter.config.option
    if is_sampled(terminalreporter.config):
        terminalreporter.write_line(
            f"cases of matrices: sample {option.sample} (make test SAMPLE=all: every case)"
        )
    failed = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    ids = dict.fromkeys(report.nodeid for report in failed if "::" in report.nodeid)
    for one in ids:
        marks = "" if option.markexpr == QUICK else f" -m {shlex.quote(option.markexpr)}"
        terminalreporter.write_line(f"run it again: {sys.executable} -m pytest{marks} {shlex.quote(one)}")
