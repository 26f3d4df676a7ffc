"""A hash of our source code follows the content and the names of its modules, and not where they lie."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from plait.loading.identity import source_code
from plait.loading.identity.fingerprint import COMPUTES
from plait.loading.identity.source_code import PACKAGE, hash_code
from plait.loading.packed_cache import ROOMS


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for part in {*ROOMS, *COMPUTES}:
        (tmp_path / part).parent.mkdir(parents=True, exist_ok=True)
        if part.endswith(".py"):
            shutil.copy(PACKAGE / part, tmp_path / part)
        else:
            shutil.copytree(PACKAGE / part, tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(source_code, "PACKAGE", tmp_path)
    source_code._hash_part.cache_clear()
    yield tmp_path
    source_code._hash_part.cache_clear()


@pytest.mark.parametrize("module", ["kernels/cpu/linear/layout.py", "spec/model.py"])
@pytest.mark.parametrize("parts", [ROOMS, COMPUTES])
def test_each_line_of_the_parts_counts(copied: Path, parts: tuple[str, ...], module: str) -> None:
    found = [hash_code(parts)]
    with (copied / module).open("a") as file:
        file.write("#")
    assert hash_code(parts) == found[0]  # what was imported does not change with its file
    source_code._hash_part.cache_clear()
    assert hash_code(parts) != found[0]


def test_a_module_that_moves_is_other_code(copied: Path) -> None:
    before = hash_code(COMPUTES)
    source_code._hash_part.cache_clear()
    (copied / "runner/sampling/sampler.py").rename(copied / "runner/sampling/other.py")
    assert hash_code(COMPUTES) != before
