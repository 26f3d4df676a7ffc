"""What `--compare WHAT` means: other options, another model, another revision of Plait, another engine.

Each side is an engine in a child process that loads once and measures on command.
"""

from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

from plait.cache_folder import make_folder
from plait.errors import ConfigError, EngineError

SIDES = Path(__file__).resolve().parents[1] / "engines"
CHILD = SIDES / "child.py"
SOURCE = Path(__file__).resolve().parents[3]  # of this Plait, where it is a checkout
PEERS = {
    "llama.cpp": "llama_cpp_engine.py",
    "ik_llama.cpp": "ik_llama_cpp_engine.py",
    "ik_llama.cpp-rtr": "ik_llama_cpp_engine.py",
    "transformers": "transformers_engine.py",
    "openvino": "openvino_engine.py",
    "onnxruntime-genai": "onnxruntime_engine.py",
    "ctranslate2": "ctranslate2_engine.py",
    "vllm": "vllm_engine.py",
    "sglang": "sglang_engine.py",
}
PROGRAMS: dict[str, dict[str, object]] = {  # engines that are programs in a folder, and their options
    "ik_llama.cpp": {"repack": False},
    "ik_llama.cpp-rtr": {"repack": True},  # `-rtr 1`: weights are repacked while loading
}
PEER = re.compile(rf"({'|'.join(map(re.escape, PEERS))}|[^@=\s]+_side\.py)(?:@([^=]+))?(?:=(.+))?")
KINDS = (
    'a model\'s path; options of the engine in quotes, like "--ops reference"; a git revision of Plait; or '
    f"an engine: {', '.join(PEERS)}, or FILE_side.py of your own, each with @PYTHON if it is installed for "
    "another interpreter (of ik_llama.cpp: @FOLDER of its programs) and =MODEL if it needs files of its own"
)
ParseOptions = Callable[[str], Mapping[str, object]]  # "--ops reference" -> {"ops": "reference"}


@dataclass(frozen=True, slots=True)
class Contestant:
    """One side before it runs. `revision`: a commit; `is_plait`: it takes the engine's options."""

    name: str
    script: Path
    model: str
    options: Mapping[str, Any] = field(default_factory=dict)
    python: str = ""
    revision: str = ""
    is_plait: bool = True


def contestant(
    what: str, model: str, settings: Mapping[str, object], parse_options: ParseOptions
) -> Contestant:
    """The side that `what` names, next to `model` with `settings`. Raises ConfigError with the choices."""
    what = what.strip()
    own = SIDES / "plait_engine.py"
    if what.startswith("-"):
        return Contestant(what, own, model, {**settings, **parse_options(what)})
    if match := PEER.fullmatch(what):
        return _peer(match[1], match[2] or "", match[3] or model)
    if Path(what).exists():
        return Contestant(Path(what).name, own, what, dict(settings))
    if commit := find_commit(what):
        return Contestant(f"plait {what}", own, model, dict(settings), revision=commit)
    raise ConfigError(f"--compare {what}: there is no such file, option or revision; give {KINDS}")


def _peer(name: str, python: str, model: str) -> Contestant:
    if name in PROGRAMS:
        if not python or not Path(python).is_dir():
            raise ConfigError(f"--compare {name}: name the folder of its programs: {name}@FOLDER")
        options = {**PROGRAMS[name], "programs": python}
        return Contestant(name, SIDES / PEERS[name], model, options, is_plait=False)
    if python and shutil.which(python) is None:
        raise ConfigError(f"--compare {name}@{python}: there is no interpreter {python}")
    script = SIDES / PEERS[name] if name in PEERS else Path(name)
    if not script.exists():
        raise ConfigError(f"--compare {name}: there is no such file; give {KINDS}")
    title = name if name in PEERS else script.name.removesuffix("_side.py")
    return Contestant(title, script, model, python=python, is_plait=False)


def find_commit(what: str) -> str:
    """The full id of a revision of our own source, or nothing."""
    command = ["git", "-C", str(SOURCE), "rev-parse", "--verify", "--quiet", "--end-of-options"]
    try:
        found = subprocess.run([*command, f"{what}^{{commit}}"], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return found.stdout.strip()


@contextmanager
def source_of(commit: str) -> Iterator[Path]:
    """The folder of `plait/` as it was at a commit; of our own source, for no commit."""
    yield check_out(commit) if commit else SOURCE


def check_out(commit: str) -> Path:
    """A copy of `plait/` as it was at a commit, in the user's cache. Raises ConfigError: git has no such one.

    It stays there: some revisions find compiled kernels by the path and the time of their files, and would
    compile at every startup.
    """
    kept = Path.home() / ".cache" / "plait" / "revisions" / commit
    if kept.exists():
        return kept
    command = ["git", "-C", str(SOURCE), "archive", "--format=tar", commit, "plait"]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        raise ConfigError(
            f"git cannot take out {commit[:12]}: {done.stderr.decode(errors='replace').strip()}"
        )
    make_folder(kept.parent)
    with TemporaryDirectory(dir=kept.parent) as folder:
        whole = Path(folder) / "whole"
        with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
            archive.extraction_filter = getattr(tarfile, "data_filter", None)  # from Python 3.11.4 on
            archive.extractall(whole)
        if not kept.exists():
            whole.rename(kept)
    return kept


class Cannot(EngineError):
    """What a side says it cannot measure or read, and why."""


class Side:
    """One side of a comparison, running. Use as a context manager, or call `close()`."""

    def __init__(self, name: str, script: Path, python: str = "", root: Path | None = None) -> None:
        self.name = name
        command = [python or sys.executable, str(CHILD), str(script), *([str(root)] if root else [])]
        self._started = time.time()
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
            )
        except OSError as error:
            raise EngineError(f"{name}: {command[0]} cannot be run: {error.strerror or error}") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def load(self, **given: object) -> dict[str, Any]:
        """Load its model; what it says about itself, with `startup_s` since the process began."""
        facts: dict[str, Any] = self.ask("load", started=self._started, **given)
        return facts

    def ask(self, do: str, **given: object) -> Any:
        """Run one command and wait for its answer. Raises Cannot, or EngineError if it fails or dies."""
        try:
            self._pipe(self._process.stdin).write(json.dumps({"do": do, **given}) + "\n")
            self._pipe(self._process.stdin).flush()
            line = self._pipe(self._process.stdout).readline()
        except BrokenPipeError:
            line = ""
        if not line:
            code = self._process.wait()
            raise EngineError(f"{self.name}: its process ended with code {code} during {do!r}; see above")
        answer = json.loads(line)
        if "cannot" in answer:
            raise Cannot(f"{self.name}: {answer['cannot']}")
        if "error" in answer:
            raise EngineError(f"{self.name}: {answer['type']} during {do!r}: {answer['error']}")
        return answer["value"]

    def greedy(self, prompts: Sequence[Sequence[int]], tokens: int) -> list[list[int]]:
        found: list[list[int]] = self.ask("greedy", prompts=[list(p) for p in prompts], tokens=tokens)
        return found

    def close(self) -> None:
        """End the process; kill it if it does not go by itself."""
        if self._process.poll() is None:
            try:
                self._pipe(self._process.stdin).write('{"do": "quit"}\n')
                self._pipe(self._process.stdin).close()
                self._process.wait(timeout=20)
            except (BrokenPipeError, subprocess.TimeoutExpired):
                self._process.kill()
                self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None and not stream.closed:
                stream.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @staticmethod
    def _pipe(stream: IO[str] | None) -> IO[str]:
        if stream is None:
            raise EngineError("a side of a comparison has no pipe")
        return stream
