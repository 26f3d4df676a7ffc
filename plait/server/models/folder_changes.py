"""Models that clients with the admin key add to the models' folder, copy in it, or take out of it.

Files are linked, not copied, where the file system can: a copy takes no space, and outlives its original.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from plait.checkpoint.find_files import Fetch, fetch_model, plan_fetch
from plait.checkpoint.hub.cache import plan_removal
from plait.checkpoint.hub.client import HubName, ask, is_hub_name, parse_hub_name, repo_folder
from plait.errors import BadFile, InvalidField, ModelNotFound, PlaitError, QueueFull, clip_text
from plait.server.gateway.served_models import PullStep
from plait.server.http.errors import ModelUnavailable
from plait.server.models.catalog import NAME, ModelEntry, files_of_model

logger = logging.getLogger("plait.server")
MAX_PULLS = 2  # at the same time
INDEX_NBYTES = 16 << 20  # of the index of a sharded model, which a plan reads before it counts
LOOK_S = 0.5  # between two steps of a fetch


class RepoFetches:
    """How many fetches of a repository of the Hub go on. Thread-safe."""

    def __init__(self) -> None:
        self._lock, self._num_open = threading.Lock(), Counter[str]()

    @contextmanager
    def open(self, repo: str) -> Iterator[None]:
        """A fetch of the repository goes on inside."""
        with self._lock:
            self._num_open[repo] += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_open[repo] -= 1

    def tidy(self, repo: str, remove: Callable[[], None]) -> None:
        """Call `remove`, of what one fetch of the repository left, unless another one goes on, or begins."""
        with self._lock:
            if self._num_open[repo] == 1:
                remove()


class PullJob:
    """A fetch into a folder, in a thread of its own. It goes on when the client that began it leaves.

    What was cut off goes on where it stopped, because it is fetched into the Hub's cache first.
    """

    def __init__(self, name: HubName, target: Path, fetches: RepoFetches) -> None:
        self.name, self.target, self._fetches = name, target, fetches
        self.error: Exception | None = None
        self._plan: Fetch | None = None
        self._total = self._before = 0
        self._places = False
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pull", daemon=True)

    @property
    def is_done(self) -> bool:
        return self._done.is_set()

    def start(self) -> None:
        self._thread.start()

    async def follow(self) -> AsyncIterator[PullStep]:
        """How far it is, whenever that changes, until it is done. Raises what the fetch has raised."""
        last = None
        while not self.is_done:
            step = await asyncio.to_thread(self._look)
            if step != last:
                yield step
                last = step
            await asyncio.to_thread(self._done.wait, LOOK_S)
        if self.error is not None:
            raise self.error

    def _look(self) -> PullStep:
        plan = self._plan
        if plan is None:
            return PullStep("pulling manifest")
        if self._places:
            return PullStep("writing manifest", plan.commit, self._total, self._total)
        completed = min(max(_count_bytes(self.name) - self._before, 0), self._total)
        return PullStep(f"pulling {plan.commit[:12]}", plan.commit, self._total, completed)

    def _run(self) -> None:
        try:
            with self._fetches.open(self.name.repo):
                self._fetch()
        except (PlaitError, OSError) as error:
            self.error = ModelUnavailable(str(error))
            logger.warning("%s could not be fetched: %s", self.name, error)
        except Exception:
            self.error = ModelUnavailable("the fetch has failed; the server's log has the cause")
            logger.exception("%s could not be fetched", self.name)
        finally:
            self._done.set()

    def _fetch(self) -> None:
        before = _count_bytes(self.name)
        plan = plan_fetch(self.name, ask(self.name))
        names, missing = (*plan.side, *plan.weights), plan.missing
        self._total = sum(plan.sizes[name] or 0 for name in missing)
        self._before = _count_bytes(self.name, whole=True)
        self._plan = plan
        fetch_model(plan)
        self._places = True
        link_files({name: plan.folder / name for name in names}, self.target)
        # Only if nothing but this was fetched there, by whichever program.
        if not before and _count_bytes(self.name) <= self._total + INDEX_NBYTES:
            self._fetches.tidy(self.name.repo, plan_removal(self.name).execute)


class FolderChanges:
    """Changes of one folder of models. Its fetches are begun on the event loop's thread alone.

    `is_taken`: whether a name is a model's already, also of one that is not in the folder.
    """

    def __init__(self, folder: Path, is_taken: Callable[[str], bool], *, offline: bool = False) -> None:
        self._folder, self._is_taken, self._offline = folder, is_taken, offline
        self._pulls: dict[str, PullJob] = {}
        self._fetches, self._deleting = RepoFetches(), threading.Lock()

    def pull(self, asked: str) -> PullJob:
        """Begin to fetch a model of the Hub, or find the fetch that goes on.

        Raises InvalidField and QueueFull.
        """
        if self._offline:
            raise InvalidField("model: the server runs with --offline, and fetches nothing", "model")
        if not is_hub_name(asked):
            text = f"model: {clip_text(asked, 100)!r} is no name on the Hub; name org/name or org/name:Q4_K_M"
            raise InvalidField(text, "model")
        name = parse_hub_name(asked)
        if name.file is not None:
            raise InvalidField("model: no file is pulled by its name; name org/name:QUANTIZATION", "model")
        self._pulls = {key: job for key, job in self._pulls.items() if not job.is_done}
        if str(name) in self._pulls:
            return self._pulls[str(name)]
        if len(self._pulls) >= MAX_PULLS:
            raise QueueFull(f"{MAX_PULLS} models are fetched already; try again later")
        job = self._pulls[str(name)] = PullJob(name, self._place(str(name)), self._fetches)
        job.start()
        return job

    def copy(self, entry: ModelEntry, destination: str) -> None:
        """Have a model under another name, too; blocks. Raises InvalidField and BadFile."""
        entry.check_contained()
        source, target = Path(entry.source), self._place(destination)
        base = source if source.is_dir() else source.parent
        files = {str(path.relative_to(base)): path for path in files_of_model(source) if path.is_file()}
        if not files:
            text = f"source: {entry.name!r} has no files here that could be copied; pull it instead"
            raise InvalidField(text, "source")
        link_files(files, target)

    def delete(self, entry: ModelEntry) -> None:
        """Delete a model's files; blocks.

        Raises InvalidField for one that is not of the folder, and ModelNotFound for one that is gone.
        """
        path = Path(entry.source)
        if entry.folder is None or path.parent not in (self._folder, *_folders_in(self._folder)):
            text = f"model: {entry.name!r} was named when the server was started, and is not in its folder"
            raise InvalidField(text, "model")
        with self._deleting:  # two that delete the same folder would both find files gone, and stop
            if not (path.is_symlink() or path.exists()):
                raise ModelNotFound(f"the model {entry.name!r} was deleted meanwhile", "model")
            _remove(path)
        if path.parent != self._folder:
            with suppress(OSError):  # others are in it
                path.parent.rmdir()

    def _place(self, name: str) -> Path:
        """Where a model of this name is to be. Raises InvalidField for a name that is none, or is taken."""
        parts = name.split("/")
        if not NAME.fullmatch(name) or len(parts) > 2 or any(part in ("", ".", "..") for part in parts):
            text = f"{clip_text(name, 100)!r} is no name of a model; write NAME or ORG/NAME"
            raise InvalidField(f"destination: {text}", "destination")
        target = self._folder / name
        if self._is_taken(name) or target.exists() or target.is_symlink():
            raise InvalidField(
                f"destination: there is a model {name!r} already; delete it first", "destination"
            )
        if not target.parent.resolve().is_relative_to(self._folder):
            raise InvalidField(f"destination: {parts[0]!r} leads out of the models' folder", "destination")
        return target


def link_files(files: Mapping[str, Path], target: Path) -> None:
    """Make a folder with these files, by their names in it, at once: it is there whole or not at all.

    Raises BadFile where it cannot be written.
    """
    try:
        target.parent.mkdir(exist_ok=True)
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=target.parent))  # hidden: no model yet
        try:
            new.chmod(0o755)
            for name, path in files.items():
                if ".." in Path(name).parts or Path(name).is_absolute():
                    raise BadFile(f"{target.name}: {clip_text(name, 100)!r} is no name of a file in it")
                place = new / name
                place.parent.mkdir(parents=True, exist_ok=True)
                _link(path.resolve(), place)
            new.rename(target)
        except BaseException:
            shutil.rmtree(new, ignore_errors=True)
            raise
    except OSError as error:
        raise BadFile(f"{target.name}: it cannot be written to the models' folder: {error}") from error


def _link(source: Path, place: Path) -> None:
    try:
        os.link(source, place)
    except OSError:  # another file system, or one without links
        shutil.copy2(source, place)


def _remove(path: Path) -> None:
    """Remove a link, a folder, or the weights that a file is one part of."""
    if path.is_symlink():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)
    else:
        weights = [one for one in files_of_model(path) if one.suffix == path.suffix]
        for file in weights:
            file.unlink()


def _folders_in(folder: Path) -> list[Path]:
    with os.scandir(folder) as entries:
        return [folder / entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]


def _count_bytes(name: HubName, *, whole: bool = False) -> int:
    """Bytes that the Hub's cache has of a repository; `whole`: without files that are not whole."""
    found = 0
    with suppress(OSError), os.scandir(repo_folder(name) / "blobs") as entries:
        for entry in entries:
            if not (whole and entry.name.endswith(".incomplete")):
                found += entry.stat().st_size
    return found
