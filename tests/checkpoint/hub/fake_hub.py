"""A small HTTP server that speaks the Hub's API: model info, trees, resolve with redirects, ranges, refusals.

It can drop connections in the middle of a file, and remembers every request and byte it served.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

LFS_FROM = 512  # bytes: larger files are answered with a redirect, as large ones are there


@dataclass
class Repo:
    """Commits by their id, each a mapping of file names to bytes; `refs` points into them."""

    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    refs: dict[str, str] = field(default_factory=dict)
    gated: bool = False

    def commit(self, files: Mapping[str, bytes], *refs: str) -> str:
        listed = json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in files.items()})
        commit = hashlib.sha1(listed.encode()).hexdigest()
        self.commits[commit] = dict(files)
        self.refs |= dict.fromkeys(refs or ("main",), commit)
        return commit


@dataclass
class FakeHub:
    """`drops`: so many large answers end after half of it. `broken`: a status for every request."""

    url: str = ""
    repos: dict[str, Repo] = field(default_factory=dict)
    drops: int = 0
    broken: int | None = None
    asked: list[tuple[str, str, str | None]] = field(default_factory=list)  # method, path, Range
    served: int = 0  # bytes of large files

    def fetched(self) -> list[str]:
        """Names of the files that were requested."""
        found = [
            re.search(r"/resolve/[^/]+/(.+)", path) for method, path, _ in self.asked if method == "HEAD"
        ]
        return [unquote(match[1]) for match in found if match]

    def forget(self) -> None:
        self.asked, self.served = [], 0


class _Answer(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: FakeHub

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def log_message(self, *_: Any) -> None:
        pass

    def _answer(self, *, body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path, self.headers.get("Range")))
        if self.hub.broken is not None:
            self._send(self.hub.broken, b"", {})
        elif path.startswith("/cdn/"):
            self._large(path.removeprefix("/cdn/"), body)
        elif match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/(.+))?", path):
            self._api(match[1], match[2], match[3] or "main")
        elif match := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._resolve(match[1], match[2], match[3], body)
        else:
            self._send(404, b"{}", {})

    def _found(self, name: str, revision: str) -> tuple[str, dict[str, bytes]] | None:
        repo = self.hub.repos.get(name)
        if repo is None:
            self._send(401, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
            return None
        if repo.gated and self.headers.get("authorization") != "Bearer hf_good":
            self._send(403, b"", {"X-Error-Code": "GatedRepo", "X-Error-Message": "restricted"})
            return None
        commit = repo.refs.get(revision, revision)
        if commit not in repo.commits:
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return None
        return commit, repo.commits[commit]

    def _api(self, name: str, kind: str | None, revision: str) -> None:
        if (found := self._found(name, revision)) is None:
            return
        commit, files = found
        if kind == "tree":
            entries = [
                {"type": "file", "path": n, "size": len(d), "oid": hashlib.sha1(d).hexdigest(), **_lfs(d)}
                for n, d in files.items()
            ]
            self._send(200, json.dumps(entries).encode(), {"Content-Type": "application/json"})
            return
        siblings = [{"rfilename": n, "size": len(d), "blobId": "0", **_lfs(d)} for n, d in files.items()]
        facts = {
            "id": name,
            "sha": commit,
            "siblings": siblings,
            "private": False,
            "tags": [],
            "downloads": 0,
        }
        self._send(200, json.dumps(facts).encode(), {"Content-Type": "application/json"})

    def _resolve(self, name: str, revision: str, file: str, body: bool) -> None:
        if (found := self._found(name, revision)) is None:
            return
        commit, files = found
        if file not in files:
            self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
            return
        data = files[file]
        sha = hashlib.sha256(data).hexdigest()
        if len(data) < LFS_FROM:
            etag = hashlib.sha1(data).hexdigest()
            self._send(200, data, {"ETag": f'"{etag}"', "X-Repo-Commit": commit}, body=body)
            return
        headers = {
            "X-Repo-Commit": commit,
            "X-Linked-Etag": f'"{sha}"',
            "X-Linked-Size": str(len(data)),
            "Location": f"{self.hub.url.replace('127.0.0.1', 'localhost')}/cdn/{sha}",  # another host
        }
        self._send(302, b"", headers)

    def _large(self, sha: str, body: bool) -> None:
        every = (d for r in self.hub.repos.values() for files in r.commits.values() for d in files.values())
        data = next((d for d in every if hashlib.sha256(d).hexdigest() == sha), None)
        if data is None:
            self._send(404, b"", {})
            return
        start = 0
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or ""):
            start = int(wanted[1])
        part = data[start:]
        headers = {"ETag": f'"{sha}"', "Accept-Ranges": "bytes", "Content-Length": str(len(part))}
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        if body and self.hub.drops > 0:
            self.hub.drops -= 1
            part = part[: len(part) // 2]
            self.close_connection = True
        if body:
            self.hub.served += len(part)
        self._send(206 if start else 200, part, headers, body=body)

    def _send(self, status: int, data: bytes, headers: dict[str, str], *, body: bool = True) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body and self.command == "GET":
            self.wfile.write(data)


def _lfs(data: bytes) -> dict[str, Any]:
    if len(data) < LFS_FROM:
        return {}
    oid = hashlib.sha256(data).hexdigest()
    return {"lfs": {"oid": oid, "sha256": oid, "size": len(data), "pointerSize": 130}}


@contextmanager
def running() -> Iterator[FakeHub]:
    """A hub on a free port of this machine."""
    hub = FakeHub()
    answer = type("Answer", (_Answer,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), answer)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
