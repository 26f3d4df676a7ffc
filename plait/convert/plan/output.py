"""Where the result goes: written next to its place, and moved there when it is whole.

Nothing half-written is ever under the requested name, and what was begun is removed when anything
goes wrong. Only a killed process can leave its temporary file, with a name that says what it is.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from plait.checkpoint.find_files import MODULE_FILES, MODULE_FOLDER
from plait.errors import ConfigError, OutOfMemory

MODEL_SUFFIXES = {".safetensors", ".json", ".jinja", ".model", ".txt", ".tiktoken", ".md", ".gguf"}
TEMPLATES = "additional_chat_templates"


def check_place(out: Path, sources: tuple[Path, ...], *, force: bool, is_directory: bool) -> None:
    """Whether `out` may be written. Raises ConfigError."""
    if not out.parent.is_dir():
        raise ConfigError(f"{out}: {out.parent} is no directory; make it first")
    if not out.exists() and not out.is_symlink():
        return
    if any(out.resolve() in (source.resolve(), source.resolve().parent) for source in sources):
        raise ConfigError(f"{out}: that is the model itself; write to another place")
    if not force:
        raise ConfigError(f"{out} exists; --force replaces it")
    if out.is_dir() != is_directory:
        kind = "a directory" if out.is_dir() else "a file"
        raise ConfigError(f"{out} is {kind}, and the result would not be one; choose another place")
    if is_directory:
        strange = [e.name for e in out.iterdir() if _is_strange(e)]
        if strange:
            raise ConfigError(
                f"{out} holds more than a model ({', '.join(sorted(strange)[:4])}); it is not replaced"
            )


def _is_strange(entry: Path) -> bool:
    """Whether this file or folder is no part of a model; named templates and modules are in folders."""
    if entry.name == TEMPLATES and entry.is_dir() and not entry.is_symlink():
        return any(e.suffix != ".jinja" or e.is_dir() for e in entry.iterdir())
    if MODULE_FOLDER.fullmatch(entry.name) and entry.is_dir() and not entry.is_symlink():
        return any(e.name not in MODULE_FILES or e.is_dir() for e in entry.iterdir())
    return entry.is_dir() or entry.suffix not in MODEL_SUFFIXES


def check_space(out: Path, nbytes: int) -> None:
    """Whether so much fits on the disk. Raises OutOfMemory."""
    free = shutil.disk_usage(out.parent).free
    if nbytes > free:
        raise OutOfMemory(
            f"{out}: {nbytes / 2**30:.2f} GiB are to be written, and {free / 2**30:.2f} GiB are free there"
        )


@contextmanager
def place_output(out: Path, check: Callable[[], None], *, is_directory: bool) -> Iterator[Path]:
    """A path to write to, a file or a directory; it becomes `out` if nothing went wrong, else it goes.

    check: raises what `check_place` does. It is called again before `out` is replaced: writing takes minutes,
    and another process may have put something there meanwhile.
    Raises OutOfMemory when the disk is full, or takes no file of that size.
    """
    beside = out.with_name(f".{out.name}.{secrets.token_hex(4)}.partial")
    try:
        if is_directory:
            beside.mkdir()
        yield beside
        _settle(beside)
        check()
        _exchange(beside, out)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise OutOfMemory(f"{out}: the disk is full ({error.strerror}); nothing was written") from error
        if error.errno == errno.EFBIG:
            raise OutOfMemory(
                f"{out}: a file of that size is more than the disk or `ulimit -f` allows; nothing was "
                "written. Safetensors can be cut with --max-shard"
            ) from error
        raise
    finally:
        _remove(beside)


def _settle(path: Path) -> None:
    """Sync the result to the disk before it gets its name."""
    for file in [*(path.rglob("*") if path.is_dir() else []), path]:
        descriptor = os.open(file, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _exchange(beside: Path, out: Path) -> None:
    """Move the result to its name: a file atomically; a directory that is there is renamed first."""
    if not beside.is_dir() or not out.exists():
        beside.replace(out)
    else:
        old = beside.with_suffix(".old")
        out.replace(old)
        try:
            beside.replace(out)
        except BaseException:
            old.replace(out)
            raise
        _remove(old)
    descriptor = os.open(out.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
