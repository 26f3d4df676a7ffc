"""Files of the Hub and of other web addresses onto this disk, each taken up where it was cut off.

Those of the Hub lie in its library's cache; a GGUF file from elsewhere lies in a folder of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import shutil
import sys
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import unquote, urlsplit

from plait.cache_folder import NO_HOME, cache_base, make_folder, nearest_folder
from plait.checkpoint.hub.client import (
    HubName,
    Listing,
    advice,
    cache_folder,
    cached_folder,
    library,
    repo_folder,
)
from plait.errors import CheckpointError

log = logging.getLogger("plait")
_PIECE = 1 << 20
_SPARE_NBYTES = 64 << 20  # a disk that is full to the last byte is of no use
_SILENCE_S = 60.0  # a server that sends nothing for so long is given up
_TAG = ".etag"
_START = b"GGUF"
_SHA256_DIGITS = 64  # an etag of so many is the hash of the file
_MAX_NBYTES = 50 * 10**9  # of a file over plain HTTP; the library fetches larger ones in its own way
_TRIES = 5  # that bring nothing, one after the other


def fetch(name: HubName, listing: Listing, side: Sequence[str], weights: Sequence[str]) -> Path:
    """The folder of this revision with these files in it; what is there already is not fetched again.

    Weights come last, so a folder that has them all is whole. A fetch that is cut off goes on where it
    stopped when it is called again. Raises CheckpointError.
    """
    folder = repo_folder(name) / "snapshots" / listing.commit
    missing = [n for n in (*side, *weights) if not (folder / n).is_file()]
    if not missing and (name.is_pinned or cached_folder(name) == folder):
        return folder
    _check_space(name, sum(listing.sizes[n] or 0 for n in missing))
    hub = library(str(name))
    try:
        if side:
            with _bars(shown=False):
                _into_snapshot(hub, name, side)
        with _bars(shown=sys.stderr.isatty()):
            for file in weights:
                if file in missing:
                    _fetch_blob(hub, name, listing.commit, file)
        large = any((listing.sizes[n] or 0) > _MAX_NBYTES for n in missing)
        with _bars(shown=large and sys.stderr.isatty()):
            folder = _into_snapshot(hub, name, (*side, *weights))
    except Exception as error:
        raise CheckpointError(
            f"cannot fetch {name} from the Hub: {advice(error, name)}; "
            f"what has arrived is kept: `plait pull {name}` goes on from there"
        ) from error
    if gone := [n for n in (*side, *weights) if not (folder / n).is_file()]:
        raise CheckpointError(f"{name} changed while it was fetched, {gone[0]} is gone; try again")
    return folder


def _into_snapshot(hub: Any, name: HubName, files: Sequence[str]) -> Path:
    """The library's own fetch: it finds blobs that are there, and knows how revisions are laid out."""
    wanted = [escape(n) for n in files]
    return Path(hub.snapshot_download(name.repo, revision=name.revision, allow_patterns=wanted))


def _fetch_blob(hub: Any, name: HubName, commit: str, file: str) -> None:
    """One large file into the cache, from the byte on that an earlier try reached.

    The library takes a broken connection up again, but newer versions forget what a process that ended had
    fetched. What is written here is the blob that they look for before they fetch one.
    """
    downloads, utils = import_module("huggingface_hub.file_download"), import_module("huggingface_hub.utils")
    url = hub.hf_hub_url(name.repo, file, revision=commit)
    found = hub.get_hf_file_metadata(url)
    etag, nbytes = found.etag, found.size
    blobs = repo_folder(name) / "blobs"
    if etag is None or "/" in etag or nbytes is None or nbytes > _MAX_NBYTES or (blobs / etag).exists():
        return
    headers = utils.build_hf_headers()
    if urlsplit(found.location).netloc != urlsplit(url).netloc:
        headers.pop("authorization", None)  # the address is signed, so another host needs no token
    locks = blobs.parents[1] / ".locks" / blobs.parent.name
    for folder in (blobs, locks):
        folder.mkdir(parents=True, exist_ok=True)
    partial = blobs / f"{etag}.incomplete"
    with utils.WeakFileLock(locks / f"{etag}.lock"):
        if (blobs / etag).exists():
            return
        if partial.exists() and partial.stat().st_size > nbytes:
            partial.unlink()

        def more() -> None:
            with partial.open("ab") as out:
                downloads.http_get(
                    found.location,
                    out,
                    resume_size=out.tell(),
                    headers=headers,
                    expected_size=nbytes,
                    displayed_filename=file,
                )

        _until_done(more, partial)
        if len(etag) == _SHA256_DIGITS and _sha256(partial) != etag:
            partial.unlink()
            raise CheckpointError(f"{file} is not what the Hub has: its SHA-256 differs; it was removed")
        partial.replace(blobs / etag)


def _until_done(more: Callable[[], None], partial: Path) -> None:
    """Retry after a broken connection, because not all versions of the library do so by themselves."""
    failures, before = 0, 0
    while True:
        try:
            return more()
        except Exception as error:  # the HTTP client's own, which differ from version to version
            if getattr(error, "response", None) is not None or getattr(error, "errno", None):
                raise  # refused, or this disk's fault: trying again does not help
            reached = partial.stat().st_size
            failures, before = (0 if reached > before else failures + 1), reached
            if failures >= _TRIES:
                raise


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _check_space(name: HubName, nbytes: int) -> None:
    folder = cache_folder(str(name))
    there = nearest_folder(folder)
    free = shutil.disk_usage(there).free
    if nbytes + _SPARE_NBYTES > free:
        raise CheckpointError(
            f"{name} needs {nbytes / 1e9:.2f} GB more, and {there} has {free / 1e9:.2f} GB free: "
            "free some (`plait list`, `plait rm`), or set HF_HUB_CACHE to a folder on another disk"
        )


@contextmanager
def _bars(*, shown: bool) -> Iterator[None]:
    """The library's progress bars, or none: not in logs and pipes, and not for what takes no time."""
    bars = import_module("huggingface_hub.utils")
    if shown or bars.are_progress_bars_disabled():
        yield
        return
    bars.disable_progress_bars()
    try:
        yield
    finally:
        bars.enable_progress_bars()


def fetch_file(address: str, folder: Path | None = None, *, offline: bool = False) -> Path:
    """The file at `address`, fetched once into a folder of its own below `folder`.

    A file that is there is used as it is. One that was cut off goes on where it stopped, if the server says
    that it has not changed since. Raises CheckpointError.
    """
    base = folder or cache_base(None)
    if base is None:
        raise CheckpointError(f"cannot fetch {address}: {NO_HOME}")
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    place = base / "web" / digest
    target = place / (unquote(urlsplit(address).path.rpartition("/")[2]).replace("/", "_") or "model.gguf")
    if target.is_file():
        return target
    if offline:
        raise CheckpointError(f"{address} is not on this disk, and --offline fetches nothing")
    part = target.with_name(target.name + ".part")
    try:
        make_folder(place)
        with open(part, "ab") as file:
            _lock(file)
            if not target.is_file():
                _receive(address, file, part)
                part.rename(target)
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise CheckpointError(
            f"cannot fetch {address}: {_reason(error)}; what has arrived is kept for the next try"
        ) from error
    part.with_name(part.name + _TAG).unlink(missing_ok=True)
    return target


def _lock(file: BinaryIO) -> None:
    """Lock the file: a second process waits here, and then finds it whole. Not every system has locks."""
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def _receive(address: str, file: BinaryIO, part: Path) -> None:
    """All that is missing of the file, appended. Raises OSError, ValueError for what is no GGUF file."""
    tag = part.with_name(part.name + _TAG)
    have = os.fstat(file.fileno()).st_size
    with _request_rest(address, have, tag) as answer:
        if answer.status == 416:  # nothing is left to send
            return
        if answer.status != 206:
            file.truncate(0)
            have = 0
        length = answer.headers.get("Content-Length")
        wanted = have + int(length) if length else None
        if wanted is not None and shutil.disk_usage(part.parent).free < wanted - have + _SPARE_NBYTES:
            raise ValueError(f"it has {wanted:,} bytes, and the disk of {part.parent} has not that many free")
        if (etag := answer.headers.get("ETag")) and not etag.startswith("W/"):
            tag.write_text(etag, "utf-8")
        log.info("fetching %s: %s bytes, %d are here", address, wanted if wanted else "some", have)
        while piece := answer.read(_PIECE):
            if not have and not piece.startswith(_START):
                raise ValueError("what the server sends is no GGUF file")
            have += len(piece)
            file.write(piece)
        file.flush()
        if wanted is None and not answer.chunked:
            raise ValueError(
                "the server does not say how long it is, so that a file that was cut would look whole"
            )
        if wanted is not None and have < wanted:
            raise ValueError(f"the connection ended after {have:,} of {wanted:,} bytes")


def _request_rest(address: str, have: int, tag: Path) -> http.client.HTTPResponse:
    """The answer to a request for what follows the first `have` bytes; status 416 if that is nothing."""
    request = urllib.request.Request(address, headers={"User-Agent": "plait", "Accept-Encoding": "identity"})
    if have and tag.is_file():
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", tag.read_text("utf-8"))
    try:
        return urllib.request.urlopen(request, timeout=_SILENCE_S)  # type: ignore[no-any-return]
    except urllib.error.HTTPError as error:
        if error.code == 416 and error.headers.get("Content-Range") == f"bytes */{have}":
            return error  # type: ignore[return-value]
        if error.code == 416:  # it is shorter than what is here: another file
            error.close()
            tag.unlink()
            return _request_rest(address, have, tag)
        raise


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    return str(getattr(error, "reason", None) or error) or type(error).__name__
