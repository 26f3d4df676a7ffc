"""What of the Hub is on this disk, and how it goes again: the library's cache, seen as models."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG
from typing import Any, Literal

from plait.checkpoint.hub.client import HubName, cache_folder, library, name_files, quantizations, repo_folder
from plait.errors import CheckpointError

_PREFIX = 7  # letters of a commit id that may stand for it


@dataclass(frozen=True, slots=True)
class CachedModel:
    """One revision of one repository. `commit` is empty if nothing of it arrived whole.

    `files`: name -> bytes. `unfinished`: bytes of this repository that arrived but belong to no whole file.
    `last_used`: seconds since 1970. `kind` is None where there are no weights that Plait reads.
    """

    repo: str
    commit: str
    refs: tuple[str, ...]
    kind: Literal["safetensors", "gguf"] | None
    quantizations: tuple[str, ...]
    files: dict[str, int]
    nbytes: int
    unfinished: int
    last_used: float
    folder: Path


@dataclass(frozen=True, slots=True)
class Removal:
    """What would go, and how many bytes that frees. `execute` does it."""

    what: tuple[str, ...]
    nbytes: int
    execute: Callable[[], None]


def cached_models() -> list[CachedModel]:
    """Every model repository in the cache, one entry for each revision, by name. Raises ConfigError."""
    found: list[CachedModel] = []
    repos = _repos()
    for repo in repos:
        unfinished = _partial_bytes(repo.repo_path)
        for revision in repo.revisions:
            files = {f.file_path.relative_to(revision.snapshot_path).as_posix(): f for f in revision.files}
            sizes = {name: int(files[name].size_on_disk) for name in sorted(files)}
            found.append(
                CachedModel(
                    repo=repo.repo_id,
                    commit=revision.commit_hash,
                    refs=tuple(sorted(revision.refs)),
                    kind=_kind(sizes),
                    quantizations=tuple(quantizations(sizes)),
                    files=sizes,
                    nbytes=int(revision.size_on_disk),
                    unfinished=unfinished,
                    last_used=max((f.blob_last_accessed for f in revision.files), default=repo.last_accessed),
                    folder=revision.snapshot_path,
                )
            )
    whole = {repo.repo_path for repo in repos if repo.revisions}
    found += [_leftover(path) for path in _folders() if path not in whole]
    return sorted(found, key=lambda m: (m.repo.lower(), m.commit))


def plan_removal(name: HubName) -> Removal:
    """What `plait rm` of a name takes away: a repository, one revision of it, or single files.

    Bytes that another revision uses stay, and are not counted. Raises CheckpointError if it is not there.
    """
    folder = repo_folder(name)
    repo = next((r for r in _repos() if r.repo_id == name.repo), None)
    if not os.path.isdir(folder) or (repo is None and (name.revision or name.file or name.quant)):
        raise CheckpointError(f"{name} is not on this disk; `plait list` shows what is")
    if repo is None or not (name.revision or name.file or name.quant):
        return _whole(name, folder)
    revisions = [r for r in repo.revisions if _is_meant(r, name.revision)]
    if not revisions:
        known = ", ".join(sorted({ref for r in repo.revisions for ref in r.refs}))
        raise CheckpointError(f"{name}: no such revision on this disk; it has {known or 'none'}")
    if name.file or name.quant:
        return _single_files(name, repo, revisions)
    if len(revisions) == len(repo.revisions):
        return _whole(name, folder)
    plan = (
        library(str(name)).scan_cache_dir(folder.parent).delete_revisions(*(r.commit_hash for r in revisions))
    )
    what = tuple(f"{name.repo}@{r.commit_hash[:12]}" for r in revisions)
    return Removal(what, int(plan.expected_freed_size), plan.execute)


def _repos() -> list[Any]:
    """The library's view of every model repository; those it cannot read are none of them."""
    hub, folder = library("the Hub's cache"), cache_folder()
    if not os.path.isdir(folder):
        return []
    return [r for r in hub.scan_cache_dir(folder).repos if r.repo_type == "model"]


def _folders() -> Iterable[Path]:
    folder = cache_folder()
    return sorted(p for p in folder.glob("models--*--*") if p.is_dir()) if os.path.isdir(folder) else []


def _leftover(path: Path) -> CachedModel:
    """A repository of which no file has arrived whole."""
    _, owner, repo = path.name.split("--", 2)
    used = path.stat().st_mtime
    return CachedModel(f"{owner}/{repo}", "", (), None, (), {}, 0, _partial_bytes(path), used, path)


def _partial_bytes(repo: Path) -> int:
    return _count_bytes((repo / "blobs").glob("*.incomplete"))


def _count_bytes(paths: Iterable[Path]) -> int:
    """Of regular files. One that is gone meanwhile has none: a fetch that ends gives it another name."""
    found = 0
    for path in paths:
        with suppress(OSError):
            status = path.lstat()
            found += status.st_size if S_ISREG(status.st_mode) else 0
    return found


def _kind(names: Iterable[str]) -> Literal["safetensors", "gguf"] | None:
    endings = {name.rpartition(".")[2] for name in names}
    if "safetensors" in endings:
        return "safetensors"
    return "gguf" if "gguf" in endings else None


def _is_meant(revision: Any, wanted: str | None) -> bool:
    if wanted is None or wanted in revision.refs:
        return True
    return len(wanted) >= _PREFIX and revision.commit_hash.startswith(wanted)


def _whole(name: HubName, folder: Path) -> Removal:
    """Everything under a repository's folder, which nothing outside it uses, and its lock files."""
    nbytes = _count_bytes(folder.rglob("*"))

    def execute() -> None:
        shutil.rmtree(folder)
        shutil.rmtree(folder.parent / ".locks" / folder.name, ignore_errors=True)

    return Removal((name.repo,), nbytes, execute)


def _single_files(name: HubName, repo: Any, revisions: Iterable[Any]) -> Removal:
    """Files of some revisions, and the blobs that no other file of the repository points to."""
    going: dict[Path, Any] = {}
    for revision in revisions:
        files = {f.file_path.relative_to(revision.snapshot_path).as_posix(): f for f in revision.files}
        if name.file is None or name.file in files:
            going |= {files[n].file_path: files[n] for n in name_files(name, files)}
    if not going:
        raise CheckpointError(f"{name} is not on this disk; `plait list` shows what is")
    staying = {f.blob_path for r in repo.revisions for f in r.files if f.file_path not in going}
    blobs = {f.blob_path: int(f.size_on_disk) for f in going.values() if f.blob_path not in staying}

    def execute() -> None:
        for path in (*going, *blobs):
            path.unlink(missing_ok=True)

    what = tuple(sorted({f"{name.repo}/{f.file_name}" for f in going.values()}))
    return Removal(what, sum(blobs.values()), execute)
