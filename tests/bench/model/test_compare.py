"""Another revision of Plait: taken out of git once, and whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from plait.bench.model.compare import SOURCE, contestant, source_of
from plait.cli.bench import parse_options
from plait.errors import ConfigError

pytestmark = pytest.mark.skipif(not (SOURCE / ".git").exists(), reason="not a checkout")


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    return tmp_path


def test_a_revision_is_taken_out_once_and_keeps_its_place() -> None:
    commit = contestant("HEAD", "m.gguf", {}, parse_options).revision
    with source_of(commit) as first:
        assert (first / "plait" / "__init__.py").exists()
        assert first != SOURCE
        written = (first / "plait" / "__init__.py").stat()
    with source_of(commit) as second:
        again = (second / "plait" / "__init__.py").stat()
    assert second == first  # compiled kernels are found by the path and the time of their files
    assert (again.st_ino, again.st_mtime) == (written.st_ino, written.st_mtime)
    assert [path.name for path in first.parent.iterdir()] == [commit]


def test_no_revision_is_our_own_source() -> None:
    with source_of("") as root:
        assert root == SOURCE


def test_a_revision_that_git_lacks_is_a_typed_error_and_leaves_nothing(home: Path) -> None:
    with pytest.raises(ConfigError, match="git cannot take out 000000000000"), source_of("0" * 40):
        pass
    assert not list(home.rglob("plait/revisions/*"))
