"""Of what a startup image is made: where any of it differs, the image is not used."""

from __future__ import annotations

import hashlib
import os
import platform
import site
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import cache
from pathlib import Path

import msgspec

from plait.checkpoint.find_files import ModelFiles, find_model
from plait.checkpoint.identity import identify_file
from plait.checkpoint.list_texts import list_texts
from plait.checkpoint.packed_cache.file_format import as_stem
from plait.config import EngineConfig
from plait.kernels.load import host_target, why_no_tiles
from plait.loading.image.lookup import SUFFIX, folder_of
from plait.resource_limits import default_threads
from plait.version import __version__

WORDS = ("off", "ngram", "mtp")  # of --speculate; what else it says is a head or a model
PACKAGE = Path(__file__).resolve().parents[2]
# Options that change nothing of what is in an image. How much memory there is decides at each startup.
APART = frozenset({
    "max_waiting", "memory_limit", "gpu_memory", "pdl", "prefix_cache", "snapshot_interval", "swap_memory",
    "cache_disk", "cache_disk_limit", "cache_disk_bandwidth",
    "max_step_ms", "canvas_threshold", "canvas_edit_threshold", "canvas_edit_passes",
    "cache_dir", "offline", "open_objects", "json_space", "startup_image",
})  # fmt: skip


def choose_threads(config: EngineConfig) -> tuple[int, str]:
    """How many threads a model gets on a CPU, and why."""
    return (config.threads, "--threads") if config.threads else default_threads()


def key_of(files: ModelFiles, config: EngineConfig) -> dict[str, object]:
    """All that decides what is in an image, as plain values. Raises BadFile for files that cannot be read.

    An option may name a file: of a vocabulary, which decides what is never sampled, or of a template.
    Whether there are tiles of AMX is one of them. The system grants them upon request only, so this is where
    a process requests them: before it has an image, or a thread that runs one.
    """
    named = [Path(value).expanduser() for value in (config.vocab, config.chat_template) if value is not None]
    key = {
        "weights": [[str(path.resolve()), *identify_file(path)] for path in files.weights],
        "texts": [[name, *identify_file(path)] for name, path in list_texts(files)],
        "named": [[str(path), *identify_file(path)] for path in named if path.is_file()],
        "draft": _identify_draft(config),
        "options": {name: value for name, value in asdict(config).items() if name not in APART},
        "threads": choose_threads(config)[0],
        "code": [__version__, _digest_code()],
        "machine": [host_target(), platform.system(), sys.version],
        "tiles": why_no_tiles(config.isa) is None,
        "packages": sorted(
            _read_time(path) for path in (*site.getsitepackages(), site.getusersitepackages())
        ),
    }
    plain: dict[str, object] = msgspec.msgpack.decode(msgspec.msgpack.encode(key))
    return plain


def _identify_draft(config: EngineConfig) -> list[list[object]]:
    """The files of a head in a directory of its own. Raises what `find_model` does."""
    if config.speculate in WORDS:
        return []
    files = find_model(config.speculate, offline=config.offline)
    paths = [*files.weights, *(path for _, path in list_texts(files))]
    return [[str(path.resolve()), *identify_file(path)] for path in paths]


def path_of(name: str, config: EngineConfig, key: dict[str, object]) -> Path | None:
    """The file of an image of a model with that name and key; None: there is no folder for it."""
    folder = folder_of(config)
    if folder is None:
        return None
    digest = hashlib.blake2b(msgspec.msgpack.encode(key), digest_size=8).hexdigest()
    return folder / f"{as_stem(name)}-{digest}{SUFFIX}"


@cache
def _digest_code() -> str:
    """A hash of the names, sizes and times of our modules. Read once: a process goes on with what it imported
    when another version is installed over it, so it neither uses nor writes an image of that version."""
    digest = hashlib.blake2b(digest_size=16)
    for line in sorted(_modules(PACKAGE, "")):
        digest.update(line.encode())
    return digest.hexdigest()


def _modules(folder: Path, name: str) -> Iterator[str]:
    """A line for each module under a folder of that name. Where the package lies is not in it."""
    with os.scandir(folder) as entries:
        for entry in entries:
            path = f"{name}/{entry.name}"
            if entry.is_dir() and entry.name not in ("__pycache__", "page"):
                yield from _modules(Path(entry.path), path)
            elif entry.name.endswith(".py"):
                status = entry.stat()
                yield f"{path} {status.st_size} {status.st_mtime_ns}\n"


def _read_time(path: str) -> int:
    """When a package was last installed or removed there: nanoseconds since 1970."""
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0
