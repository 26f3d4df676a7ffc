"""A GGUF file from any web address onto this disk, taken up where it was cut off."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import logging
import os
import shutil
import urllib.error
import urllib.request
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from plait.cache_folder import NO_HOME, cache_base, make_folder
from plait.errors import CheckpointError

log = logging.getLogger("plait")

_PIECE = 1 << 20
_SPARE_NBYTES = 64 << 20  # a disk that is full to the last byte is of no use
_SILENCE_S = 60.0  # a server that sends nothing for so long is given up
_TAG = ".etag"
_START = b"GGUF"


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
