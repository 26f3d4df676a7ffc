"""Models by their Hub name, through `huggingface_hub`, which caches, authenticates and works offline."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import ModuleType

from plait.errors import CheckpointError, ConfigError

_NAME = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*)(?:/(?P<file>[\w][\w./-]*\.(?:gguf|safetensors)))?")
_PART = re.compile(r"(.+)-\d{5}-of-\d{5}\.(?:gguf|safetensors)")
_SIDE_FILES = ("*.json", "*.jinja", "*.tiktoken", "tokenizer.model", "merges.txt", "vocab.txt")


def is_hub_name(text: str) -> bool:
    """Does it look like org/name, or org/name/file.gguf?"""
    return _NAME.fullmatch(text) is not None and ".." not in text


def download(model: str, choose: Callable[[Sequence[str], str], Sequence[str]]) -> tuple[Path, str | None]:
    """(the folder of a Hub model on this disk, the file that was asked for), fetched if it is not there.

    `model`: org/name, or org/name/file.gguf. `choose(names, where)` picks the weight files out of the names
    in the repository; only these and the small files beside them are fetched. Without a network the cached
    copy is used. Raises ConfigError without the library, CheckpointError when the Hub cannot be asked.
    """
    match = _NAME.fullmatch(model)
    if match is None:
        raise ConfigError(f"{model!r} is not a name on the Hub; wanted org/name")
    repo, file = match["repo"], match["file"]
    hub = _library(model)
    try:
        names = hub.list_repo_files(repo)
    except Exception as error:  # the library's own, its HTTP client's and the system's
        return _cached(hub, repo, error), file
    if file is not None and file not in names:
        raise ConfigError(f"{repo} on the Hub has no file {file!r}; it has: {', '.join(sorted(names)[:12])}")
    root = [name for name in names if "/" not in name]
    beside = [name for name in root if any(fnmatch(name, pattern) for pattern in _SIDE_FILES)]
    weights = _with_parts(file, names) if file else list(choose(root, f"{repo} on the Hub"))
    try:
        folder = hub.snapshot_download(repo, allow_patterns=[*weights, *beside])
    except Exception as error:
        raise CheckpointError(f"cannot fetch {repo} from the Hub: {_one_line(error)}") from error
    return Path(folder), file


def _with_parts(file: str, names: Sequence[str]) -> list[str]:
    """A file and, if its name says that it is one of several, the others."""
    match = _PART.fullmatch(file)
    return (
        [file] if match is None else [n for n in names if n.startswith(f"{match[1]}-") and _PART.fullmatch(n)]
    )


def _cached(hub: ModuleType, repo: str, error: Exception) -> Path:
    try:
        return Path(hub.snapshot_download(repo, local_files_only=True))
    except Exception:
        raise CheckpointError(
            f"cannot fetch {repo} from the Hub: {_one_line(error)}; and this disk has no copy of it. "
            "Check the name and the network, log in if the model is gated, or pass a directory."
        ) from error


def _library(model: str) -> ModuleType:
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"{model!r} is not a path here. To fetch it from the Hub: pip install 'plait[hub]'; "
            "or pass the directory or file of a model."
        ) from error
    module: ModuleType = huggingface_hub
    return module


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
