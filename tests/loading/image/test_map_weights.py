"""Files of weights that change while a startup image maps them."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from plait.errors import BadFile
from plait.loading.image import restore
from plait.loading.image.file_format import FilePart
from plait.loading.image.restore import map_weights


@pytest.mark.parametrize("suffix", [".gguf", ".packed"])
def test_weights_that_are_replaced_while_they_are_mapped_are_refused(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launches have addresses in the old file: in a new one they would read other numbers."""
    weights, new = tmp_path / f"a{suffix}", tmp_path / "new"
    weights.write_bytes(b"old" * 1000)
    new.write_bytes(b"other" * 1000)
    status = weights.stat()
    name = "map_in_large_pages" if suffix == ".packed" else "map_file"
    plain = getattr(restore, name)

    def map_later(path: Path) -> mmap.mmap | memoryview:
        """As the reader's, but another process puts a new file in its place before."""
        new.replace(path)
        found: mmap.mmap | memoryview = plain(path)
        return found

    files = [FilePart(str(weights), status.st_size, status.st_mtime_ns)]
    assert map_weights(files)[0].tobytes() == b"old" * 1000
    monkeypatch.setattr(restore, name, map_later)
    with pytest.raises(BadFile, match="has changed"):
        map_weights(files)
