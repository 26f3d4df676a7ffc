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

from plait.errors import CheckpointError

log = logging.getLogger("plait")

_PIECE = 1 << 20
_SPARE_NBYTES = 64 << 20  # a disk that is full to the last byte is of no use
_SILENCE_S = 60.0  # a server that sends nothing for so long is given up
_TAG = ".etag"
_START = b"GGUF"


def web_folder() -> Path:
    """Where files of web addresses are kept."""
    return Path.home() / ".cache" / "plait" / "web"


def fetch_file(address: str, folder: Path | None = None, *, offline: bool = False) -> Path:
    """The file at `address`, fetched once into a folder of its own below `folder`.

    A file that is there is used as it is. One that was cut off goes on where it stopped, if the server says
    that it has not changed since. Raises CheckpointError.
    """
    digest = hashlib.sha256(address.encode()).hexdigest()[:16]
    place = (folder or web_folder()) / digest
    target = place / (unquote(urlsplit(address).path.rpartition("/")[2]).replace("/", "_") or "model.gguf")
    if target.is_file():
        return target
    if offline:
        raise CheckpointError(f"{address} is not on this disk, and --offline fetches nothing")
    part = target.with_name(target.name + ".part")
    try:
        place.mkdir(parents=True, exist_ok=True)
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
    """A second process waits here, and then finds the file. Not every system has such locks."""
    with contextlib.suppress(ImportError):
        import fcntl

        fcntl.flock(file, fcntl.LOCK_EX)


def _receive(address: str, file: BinaryIO, part: Path) -> None:
    """All that is missing of the file, appended. Raises OSError, ValueError for what is no GGUF file."""
    tag = part.with_name(part.name + _TAG)
    have = os.fstat(file.fileno()).st_size
    request = urllib.request.Request(address, headers={"User-Agent": "plait", "Accept-Encoding": "identity"})
    if have and tag.is_file():
        request.add_header("Range", f"bytes={have}-")
        request.add_header("If-Range", tag.read_text("utf-8"))
    with urllib.request.urlopen(request, timeout=_SILENCE_S) as answer:
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
        if wanted is not None and have < wanted:
            raise ValueError(f"the connection ended after {have:,} of {wanted:,} bytes")


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    return str(getattr(error, "reason", None) or error) or type(error).__name__
