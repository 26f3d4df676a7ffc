"""What trials of GPU kernels found, kept by chip, driver, versions and kernel sources.

A file is `{"kind", "version", "site", "verdicts"}` under the cache folder; a verdict is "" for a kernel that
was right, else why it is not bound. What a file says is believed only if no other user could have written
it, because a kernel that is called right there is not tried again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from plait.cache_folder import cache_base, make_folder
from plait.errors import clip_text

try:
    import fcntl
except ImportError:  # Windows: processes that try the same kernels at the same time all do
    fcntl = None  # type: ignore[assignment]

KIND, VERSION = "plait-gpu-trials", 1
FOLDER = "gpu_trials"
MAX_BYTES = 1 << 20
MAX_VERDICTS, MAX_KEY, MAX_REASON = 4096, 200, 300
PATIENCE_S = 900.0  # for a process that tries kernels: one that was stopped must not stop all others
ASK_AGAIN_S = 0.5
ACCELERATORS = ("fla-core", "flash-attn-3", "flash-attn-4")
DRIVER = Path("/proc/driver/nvidia/version")
SOURCES = ("kernels/triton", "kernels/torch", "ops", "quant")  # what the result of a trial may depend on
log = logging.getLogger("plait")
Verdicts = Mapping[str, str]  # key of a trial -> "", or why the kernel is not bound


@dataclass(frozen=True, slots=True)
class TrialSite:
    """What the verdicts hold for: another chip, driver, version or kernel source begins anew.

    others: names and versions of `ACCELERATORS` that are installed, and "PDL" if kernels may begin early.
    """

    chip: str
    driver: str
    torch: str
    triton: str
    sources: str
    others: str = ""

    @property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


def list_accelerators() -> str:
    """Names and versions of the installed packages with kernels that may serve our ops."""
    found = []
    for name in ACCELERATORS:
        with suppress(PackageNotFoundError):
            found.append(f"{name} {version(name)}")
    return ", ".join(found)


def hash_sources(root: Path | None = None) -> str:
    """The hash of every source that a GPU kernel, its reference or its case is made of."""
    top, total = root or Path(__file__).resolve().parents[2], hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((top / folder).rglob("*.py")):
            total.update(f"{path.relative_to(top).as_posix()}\0".encode())
            total.update(hashlib.sha256(path.read_bytes()).digest())
    return total.hexdigest()


def driver_version(path: Path = DRIVER) -> str:
    """The version of the NVIDIA kernel module; empty where the system does not say."""
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r"\b\d{3,}\.\d+(\.\d+)?\b", text)
    return found[0] if found else ""


def find_folder(cache_dir: str | None) -> Path | None:
    """Where verdicts are kept; None without a cache folder."""
    base = cache_base(cache_dir)
    return None if base is None else base / FOLDER


def read_verdicts(folder: Path | None, site: TrialSite) -> dict[str, str]:
    """What is kept for this site; empty, with a note in the log, for a file that cannot be believed."""
    if folder is None:
        return {}
    path = folder / f"{site.digest}.json"
    try:
        found = _read(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        log.warning("%s is not read, and GPU kernels are tried again: %s", path, clip_text(error))
        return {}
    return dict(found[1]) if found[0] == site else {}


def list_verdicts(folder: Path | None) -> Iterator[tuple[TrialSite, dict[str, str]]]:
    """Every site and its verdicts that are kept and can be believed."""
    for path in sorted(folder.glob("*.json")) if folder is not None and os.path.isdir(folder) else ():
        try:
            yield _read(path)
        except (OSError, ValueError):
            continue


def keep_verdicts(folder: Path | None, site: TrialSite, verdicts: Verdicts) -> None:
    """Add verdicts to those that are kept. Where they cannot be, the next startup tries the kernels again."""
    if folder is None or not verdicts:
        return
    path = folder / f"{site.digest}.json"
    part = path.with_name(f".{os.urandom(8).hex()}.part")  # containers have the same process ids
    kept: dict[str, str] = {}
    with suppress(OSError, ValueError):  # what cannot be believed is replaced
        kept = _read(path)[1]
    record = {"kind": KIND, "version": VERSION, "site": asdict(site), "verdicts": {**kept, **verdicts}}
    try:
        make_folder(folder)
        try:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            with os.fdopen(descriptor, "w", encoding="utf-8") as file:
                file.write(json.dumps(record))
            part.chmod(0o644)  # whatever the umask: a file that others may write is not read
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        log.info("what trials of GPU kernels found is not kept: %s: %s", path, error.strerror)


@contextmanager
def hold_site(
    folder: Path | None, site: TrialSite, on_wait: Callable[[], None], patience_s: float = PATIENCE_S
) -> Iterator[bool]:
    """Whether another process had the trials of this site until now; inside, this one has them.

    The system ends a lock with its holder. A holder that was stopped does not stop others: after `patience_s`
    they go on without it, as they do where there are no locks. on_wait: called every `ASK_AGAIN_S` meanwhile.
    """
    has_waited, file = False, None if fcntl is None or folder is None else _open_lock(folder, site)
    try:
        until = time.monotonic() + patience_s
        while file is not None and not _is_taken(file) and time.monotonic() < until:
            if not has_waited:
                log.info("another process tries kernels on %s: this one waits for what it finds", site.chip)
            has_waited = True
            on_wait()
            time.sleep(ASK_AGAIN_S)
        yield has_waited
    finally:
        if file is not None:
            os.close(file)


def _open_lock(folder: Path, site: TrialSite) -> int | None:
    """The lock file of a site: empty, and never removed, because a process may wait for it."""
    try:
        make_folder(folder)
        return os.open(folder / f".{site.digest}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError:
        return None


def _is_taken(file: int) -> bool:
    """Take the lock, if no other process has it. A file system without locks gives it to all."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        log.info("trials of GPU kernels have no lock: %s", error.strerror)
    return True


def _read(path: Path) -> tuple[TrialSite, dict[str, str]]:
    """Raises OSError, and ValueError for anything that `keep_verdicts` would not have written."""
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0))
    with os.fdopen(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise ValueError("it is no regular file")
        if _is_foreign(status) or _is_foreign(path.parent.stat()):
            raise ValueError("another user may have written it")
        raw = file.read(MAX_BYTES + 1)
    if len(raw) > MAX_BYTES:
        raise ValueError(f"it has more than {MAX_BYTES} bytes")
    try:
        record = json.loads(raw)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(record, dict) or (record.get("kind"), record.get("version")) != (KIND, VERSION):
        raise ValueError("it holds no verdicts of this version")
    site, verdicts = record.get("site"), record.get("verdicts")
    names = TrialSite.__dataclass_fields__.keys()
    if not isinstance(site, dict) or site.keys() != names or not _are_texts(site.values(), MAX_REASON):
        raise ValueError("it does not say what the verdicts hold for")
    if not isinstance(verdicts, dict) or len(verdicts) > MAX_VERDICTS:
        raise ValueError("its verdicts are no table")
    if not _are_texts(verdicts, MAX_KEY) or not _are_texts(verdicts.values(), MAX_REASON):
        raise ValueError("its verdicts are no short texts")
    return TrialSite(**site), verdicts


def _are_texts(values: object, most: int) -> bool:
    return all(isinstance(v, str) and len(v) <= most for v in values)  # type: ignore[attr-defined]


def _is_foreign(status: os.stat_result) -> bool:
    if not hasattr(os, "geteuid"):
        return False
    return status.st_uid not in (0, os.geteuid()) or bool(status.st_mode & 0o022)
