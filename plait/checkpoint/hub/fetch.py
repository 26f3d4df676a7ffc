"""Files of the Hub onto this disk: into the library's cache, each taken up where it was cut off."""

from __future__ import annotations

import hashlib
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from glob import escape
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

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

_SPARE_NBYTES = 64 << 20  # a disk that is full to the last byte is of no use
_SHA256_DIGITS = 64  # an etag of so many is the hash of the file
_MAX_NBYTES = 50 * 10**9  # of a file over plain HTTP; the library fetches larger ones in its own way
_PIECE = 1 << 20
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
    there = next(p for p in (folder, *folder.parents) if p.is_dir())
    free = shutil.disk_usage(there).free
    if nbytes + _SPARE_NBYTES > free:
        raise CheckpointError(
            f"{name} needs {nbytes / 1e9:.2f} GB more, and {there} has {free / 1e9:.2f} GB free: "
            "make room (`plait list`, `plait rm`), or set HF_HUB_CACHE to a folder on another disk"
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
