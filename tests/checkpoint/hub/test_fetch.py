"""GGUF files of any web address, from a small server on this machine."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from plait.checkpoint.hub.client import is_file_address
from plait.checkpoint.hub.fetch import fetch_file
from plait.errors import CheckpointError

DATA = b"GGUF" + bytes(range(256)) * 40


@dataclass
class Site:
    """`drops`: so many answers end in the middle. `asked`: the Range header of every request."""

    data: bytes = DATA
    etag: str = '"1"'
    drops: int = 0
    says_length: bool = True
    asked: list[str | None] = field(default_factory=list)
    url: str = ""


@pytest.fixture
def site() -> Iterator[Site]:
    found = Site()

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            found.asked.append(wanted)
            if "missing" in self.path:
                self.send_error(404)
                return
            start = 0
            if wanted and self.headers.get("If-Range") == found.etag:
                start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(found.data):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(found.data)}")
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            self.send_response(206 if start else 200)
            if found.says_length:
                self.send_header("Content-Length", str(len(found.data) - start))
            self.send_header("ETag", found.etag)
            self.end_headers()
            stop = len(found.data) // 2 if found.drops else len(found.data)
            found.drops = max(found.drops - 1, 0)
            self.wfile.write(found.data[start:stop])

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        found.url = f"http://127.0.0.1:{server.server_port}/models/tiny%20one.gguf?download=1"
        yield found
        server.shutdown()
        thread.join()


def test_a_file_is_fetched_once_under_its_own_name(site: Site, tmp_path: Path) -> None:
    path = fetch_file(site.url, tmp_path)
    assert (path.name, path.read_bytes()) == ("tiny one.gguf", DATA)
    assert fetch_file(site.url, tmp_path) == path
    assert fetch_file(site.url, tmp_path, offline=True) == path
    assert site.asked == [None]
    assert [p.name for p in path.parent.iterdir()] == ["tiny one.gguf"]


def test_what_was_cut_off_goes_on_where_it_stopped(site: Site, tmp_path: Path) -> None:
    site.drops = 1
    with pytest.raises(CheckpointError, match=re.compile("kept for the next try", re.DOTALL)):
        fetch_file(site.url, tmp_path)
    assert fetch_file(site.url, tmp_path).read_bytes() == DATA
    assert site.asked == [None, f"bytes={len(DATA) // 2}-"]


def test_a_file_that_changed_meanwhile_begins_anew(site: Site, tmp_path: Path) -> None:
    site.drops = 1
    with pytest.raises(CheckpointError):
        fetch_file(site.url, tmp_path)
    site.data, site.etag = b"GGUF" + b"new" * 99, '"2"'
    assert fetch_file(site.url, tmp_path).read_bytes() == site.data


def test_a_file_that_arrived_whole_before_the_process_ended_is_taken(site: Site, tmp_path: Path) -> None:
    path = fetch_file(site.url, tmp_path)
    path.rename(path.with_name(path.name + ".part"))
    (path.parent / f"{path.name}.part.etag").write_text(site.etag)
    assert fetch_file(site.url, tmp_path).read_bytes() == DATA
    assert site.asked == [None, f"bytes={len(DATA)}-"]


def test_what_is_longer_than_the_file_has_become_begins_anew(site: Site, tmp_path: Path) -> None:
    path = fetch_file(site.url, tmp_path)
    path.rename(path.with_name(path.name + ".part"))
    (path.parent / f"{path.name}.part.etag").write_text(site.etag)
    site.data = b"GGUF short"
    assert fetch_file(site.url, tmp_path).read_bytes() == site.data


def test_a_file_of_unknown_length_is_not_taken_for_whole(site: Site, tmp_path: Path) -> None:
    site.says_length = False
    with pytest.raises(CheckpointError, match="does not say how long it is"):
        fetch_file(site.url, tmp_path)


def test_its_folder_is_one_that_others_may_not_write(site: Site, tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        path = fetch_file(site.url, tmp_path / "new")
    finally:
        os.umask(before)
    for folder in (path.parent, path.parent.parent, tmp_path / "new"):
        assert folder.stat().st_mode & 0o022 == 0


def test_what_is_no_gguf_file_is_refused(site: Site, tmp_path: Path) -> None:
    site.data = b"<html>please log in</html>"
    with pytest.raises(CheckpointError, match="no GGUF file"):
        fetch_file(site.url, tmp_path)


def test_a_refusal_of_the_server_is_reported(site: Site, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the server answers 404"):
        fetch_file(site.url.replace("tiny", "missing"), tmp_path)


def test_offline_fetches_nothing(site: Site, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="--offline fetches nothing"):
        fetch_file(site.url, tmp_path, offline=True)
    assert site.asked == []


def test_addresses_of_gguf_files_are_known_by_their_paths() -> None:
    assert is_file_address("https://host/a/model.GGUF?x=1")
    assert not is_file_address("https://host/a/page.html")
    assert not is_file_address("models/https/model.gguf")
