"""`plait upgrade-check`: versions, and what has changed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from plait.cli import upgrade_check
from plait.version import __version__

Run = Callable[..., Any]


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A pip that prints what a test writes."""
    answer = SimpleNamespace(stdout="", stderr="", returncode=0, asked=[])

    def run(command: list[str], **_: object) -> SimpleNamespace:
        answer.asked.append(command)
        return answer

    monkeypatch.setattr(subprocess, "run", run)
    return answer


def test_a_newer_version_is_shown_with_how_to_get_it(plait: Run, pip: SimpleNamespace) -> None:
    pip.stdout = "plait-engine (99.1.0)\nAvailable versions: 99.1.0, 0.1.0\n"
    result = plait("upgrade-check")
    assert result.code == 0
    assert "99.1.0 is there" in result.out
    assert "pip install --upgrade plait-engine" in result.out
    assert json.loads(plait("upgrade-check", "--json").out)["newest"] == "99.1.0"


def test_the_newest_version_says_so(plait: Run, pip: SimpleNamespace) -> None:
    pip.stdout = f"plait-engine ({__version__})\n"
    assert f"the index has {__version__}" in plait("upgrade-check").out


def test_an_index_that_does_not_answer_is_one_line(plait: Run, pip: SimpleNamespace) -> None:
    pip.stderr, pip.returncode = "WARNING: x\nERROR: No matching distribution found for plait-engine\n", 1
    result = plait("upgrade-check")
    assert result.code == 1
    assert result.err.count("\n") == 1
    assert "No matching distribution" in result.err


def test_offline_asks_no_one(plait: Run, pip: SimpleNamespace) -> None:
    result = plait("upgrade-check", "--offline", "--changelog")
    assert result.code == 0
    assert "### Added" in result.out
    assert pip.asked == []


def test_versions_are_compared_by_their_numbers() -> None:
    assert upgrade_check.is_newer("0.10.0", "0.9.1")
    assert not upgrade_check.is_newer("0.9.1", "0.9.1")
    assert not upgrade_check.is_newer("0.9.1rc1", "0.9.1")


def test_a_section_ends_at_the_next_version() -> None:
    text = "# Changelog\n## [0.2.0] - 2026\nnew\n\n## 0.1.0 (unreleased)\nold\n"
    assert upgrade_check.section_of(text, "0.2.0") == "new"
    assert upgrade_check.section_of(text, "0.1.0") == "old"
    assert upgrade_check.section_of(text, "0.3.0") is None
