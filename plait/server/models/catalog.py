"""Which models a server has: those that its operator named, and those of a folder, found again as it changes.

A client's `model` is only ever looked up among these names. It never becomes a path.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from plait.config import EngineConfig
from plait.errors import BadFile, ConfigError, InvalidField, ModelNotFound, clip_text
from plait.server.api.validate import DEFAULT_MODEL, LATEST, MAX_MODEL_NAME

logger = logging.getLogger("plait.server")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/+-]{0,199}")
NAME_RULE = "a name has up to 200 letters of A-Z and a-z, digits and ._:@+-, a letter or digit first"
MAX_FOUND = 1000  # models of a folder
MAX_ENTRIES = 10_000  # files of a folder, and of a model in it
LOOK_EVERY_S = 2.0  # between two looks at the folder, however many requests come
_WEIGHTS = (".safetensors", ".gguf")
_HUB = ("hf.co/", "huggingface.co/")  # clients of Ollama name models of the Hub by their address
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-\d{5}")
Clock = Callable[[], float]
FilesStamp = tuple[int, int, int]  # of a model's files: bytes, the latest change in ns, the sum of inodes
LeaveOut = Callable[[str, str], None]  # gets the name of a model that is not served, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelEntry:
    """A model by the name that clients use. `source`: a path or a Hub name.

    `keep_alive_s`: how long it stays when idle; None: the server's time. `folder`: of `--models-dir`, which
    holds all of its files. `stamp`: of these files; another one means that they have changed.
    """

    name: str
    source: str
    engine: EngineConfig
    aliases: tuple[str, ...] = ()
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    keep_alive_s: float | None = None
    folder: Path | None = None
    stamp: FilesStamp | None = None

    def check_contained(self) -> None:
        """Raises BadFile for files that a link leads out of the folder, as it is now."""
        if self.folder is None:
            return
        path = Path(self.source)
        if not path.exists():
            raise BadFile(f"{self.name}: it is no longer in the models' folder")
        if outside := find_outside(path, self.folder):
            raise BadFile(f"{self.name}: {outside!r} leads out of the models' folder, and is not read")


class ModelCatalog:
    """All models of a server. `refresh` may run in another thread than the rest."""

    def __init__(
        self,
        named: Iterable[ModelEntry],
        folder: str | None = None,
        template: ModelEntry | None = None,
        special: Mapping[str, ModelEntry] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        """`template`: what models of `folder` are like; `special`: those of them with options of their own.

        Raises ConfigError for a name that two models have, and for a folder that is none.
        """
        self._named, self._special, self.template = [*named], dict(special or {}), template
        self._folder, self._clock, self._looked_s = None, clock, -LOOK_EVERY_S
        self._found: dict[str, ModelEntry] = {}
        self._left_out = set[str]()  # names that the log has
        if folder is not None:
            self._folder = Path(folder).expanduser().resolve()
            if not self._folder.is_dir():
                raise ConfigError(f"models_dir: {folder} is not a folder")
        self._names: dict[str, ModelEntry] = {}
        for entry in self._named:
            for name in (entry.name, *entry.aliases):
                if name in self._names:
                    raise ConfigError(f"models: two of them have the name {name!r}; give each its own")
                self._names[name] = entry
        self.refresh()

    @property
    def entries(self) -> list[ModelEntry]:
        """Those with names of the operator's first, in order."""
        return [*self._named, *self._found.values()]

    @property
    def folder(self) -> Path | None:
        """The models' folder, resolved."""
        return self._folder

    @property
    def is_offline(self) -> bool:
        """Whether models of the folder may not be fetched."""
        return self.template is not None and self.template.engine.offline

    @property
    def num_named(self) -> int:
        return len(self._named)

    def find(self, asked: object) -> ModelEntry:
        """The model that a request names; null and "default": the first. Raises InvalidField, ModelNotFound.

        Ollama's tag ":latest" is the same as none.
        """
        if asked is None or asked == DEFAULT_MODEL:
            entries = self.entries
            if not entries:
                raise ModelNotFound("no model is served here: --models-dir is empty", "model")
            return entries[0]
        if not isinstance(asked, str) or len(asked) > MAX_MODEL_NAME:
            raise InvalidField(f"model: it must be a string of at most {MAX_MODEL_NAME} characters", "model")
        found = self._find(asked)
        if found is None:
            shown = ", ".join(repr(entry.name) for entry in self.entries[:8])
            text = f"the model {clip_text(asked, 100)!r} is not served here; there are {shown}"
            raise ModelNotFound(text + (" and more" if len(self.entries) > 8 else ""), "model")
        return found

    def has_name(self, name: str) -> bool:
        """Whether requests with this name have a model, also by an alias or without Ollama's tag."""
        return name == DEFAULT_MODEL or self._find(name) is not None

    def refresh(self) -> bool:
        """Look for models that came or went; reads the folder. Returns whether it looked."""
        now = self._clock()
        if self._folder is None or not self.is_due(LOOK_EVERY_S):
            return False
        self._looked_s = now
        found: dict[str, ModelEntry] = {}
        left_out: dict[str, str] = {}
        for name, path in scan_folder(self._folder, left_out.__setitem__):
            if outside := find_outside(path, self._folder):
                left_out[name] = f"{outside!a} leads out of the folder"
            elif (mine := self._names.get(name)) is not None:
                if Path(mine.source).expanduser().resolve() != path.resolve():
                    left_out[name] = "the operator named another model so"
            elif name in found:
                left_out[path.name] = f"{Path(found[name].source).name!a} is the model {name!r} already"
            elif (base := self._special.get(name, self.template)) is not None:
                stamp = _stamp_files(path)
                found[name] = replace(base, name=name, source=str(path), folder=self._folder, stamp=stamp)
        for name, why in left_out.items():
            if name not in self._left_out:
                logger.warning("models_dir: %s is left out: %s", name, why)
        self._found, self._left_out = found, {*left_out}
        return True

    def forget_look(self) -> None:
        """Have the folder looked at again, however short ago that was."""
        self._looked_s = -LOOK_EVERY_S

    def is_due(self, seconds: float) -> bool:
        """Whether there is a folder, and the last look at it was so long ago."""
        return self._folder is not None and self._clock() - self._looked_s >= seconds

    def _find(self, asked: str) -> ModelEntry | None:
        for prefix in _HUB:
            asked = asked.removeprefix(prefix)
        for name in (asked, asked.removesuffix(LATEST), asked + LATEST):
            if (entry := self._names.get(name) or self._found.get(name)) is not None:
                return entry
        return next((one for one in self._found.values() if asked in one.aliases), None)


def scan_folder(folder: Path, leave_out: LeaveOut = lambda name, why: None) -> Iterator[tuple[str, Path]]:
    """(name, path) of each model in a folder, by name: files, folders with weights, and folders of those.

    What is no plain file or folder is passed over. `leave_out` gets models that no client could name, and the
    first of those that are too many. A link may still lead out of the folder: see `find_outside`.
    """
    num_found = 0
    for name, path in _candidates(folder):
        if not _is_model(path):
            continue
        if not NAME.fullmatch(name):
            leave_out(f"{name!a:.200}", f"no client can send this name; {NAME_RULE}")
            continue
        num_found += 1
        if num_found > MAX_FOUND:
            leave_out(name, f"there are more than {MAX_FOUND} models; so is what comes after it")
            return
        yield name, path


def find_outside(path: Path, folder: Path) -> str:
    """The name of a file that a model may read, and that is not in `folder` where its links lead; "": none.

    A folder with too many files to look at counts, too.
    """
    for number, entry in enumerate(files_of_model(path)):
        if number >= MAX_ENTRIES or not entry.resolve().is_relative_to(folder):
            return entry.name
    return ""


def _stamp_files(path: Path) -> FilesStamp:
    """What shows that a model's files are others than before; files that cannot be seen do not count."""
    nbytes = latest_ns = inodes = 0
    for file in files_of_model(path):
        with suppress(OSError):
            found = file.stat()
            if stat.S_ISREG(found.st_mode):
                nbytes, inodes = nbytes + found.st_size, inodes + found.st_ino
                latest_ns = max(latest_ns, found.st_mtime_ns)
    return nbytes, latest_ns, inodes


def files_of_model(path: Path) -> Iterator[Path]:
    """A model's files and folders: all parts, all in its folder, and texts beside a file of safetensors."""
    yield path
    if path.is_dir():
        for root, folders, names in os.walk(path):
            yield from (Path(root) / name for name in (*folders, *names))
        return
    part = _PART.fullmatch(path.stem)
    for other in _list_folder(path.parent) if path.suffix in _WEIGHTS else ():
        is_part = part is not None and other.name.startswith(f"{part['stem']}-")
        is_text = path.suffix == ".safetensors" and other.suffix not in _WEIGHTS and not other.is_dir()
        if other != path and (is_part or is_text):
            yield other


def _candidates(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in _list_folder(folder):
        if path.suffix in _WEIGHTS:
            part = _PART.fullmatch(path.stem)
            if part is None or int(part["number"]) == 1:
                yield (part["stem"] if part else path.stem), path
        elif path.is_dir():
            if _is_model(path):
                yield path.name, path
            elif path.resolve().is_relative_to(folder):
                yield from ((f"{path.name}/{inner.name}", inner) for inner in _list_folder(path))


def _is_model(path: Path) -> bool:
    """Whether it is a plain file of weights, or a folder with one."""
    files = _list_folder(path) if path.is_dir() else [path]
    return any(file.suffix in _WEIGHTS and _is_plain(file) for file in files)


def _is_plain(path: Path) -> bool:
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError:
        return False


def _list_folder(path: Path) -> list[Path]:
    """What is in a folder, sorted and without hidden names; nothing if it cannot be read."""
    try:
        with os.scandir(path) as entries:
            names = [entry.name for _, entry in zip(range(MAX_ENTRIES), entries, strict=False)]
    except OSError:
        return []
    return [path / name for name in sorted(names) if not name.startswith(".")]
