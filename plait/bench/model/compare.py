"""What `--compare WHAT` means: other options, another model, another revision of Plait, another engine."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from plait.cache_folder import make_folder
from plait.errors import ConfigError

SIDES = Path(__file__).resolve().parents[1] / "engines"
SOURCE = Path(__file__).resolve().parents[3]  # of this Plait, where it is a checkout
PEERS = {
    "llama.cpp": "llama_cpp_engine.py",
    "transformers": "transformers_engine.py",
    "openvino": "openvino_engine.py",
    "onnxruntime-genai": "onnxruntime_engine.py",
    "ctranslate2": "ctranslate2_engine.py",
    "vllm": "vllm_engine.py",
}
PEER = re.compile(rf"({'|'.join(map(re.escape, PEERS))}|[^@=\s]+_side\.py)(?:@([^=]+))?(?:=(.+))?")
KINDS = (
    'a model\'s path; options of the engine in quotes, like "--ops reference"; a git revision of Plait; or '
    f"an engine: {', '.join(PEERS)}, or FILE_side.py of your own, each with @PYTHON if it is installed for "
    "another interpreter and =MODEL if it needs files of its own"
)
ParseOptions = Callable[[str], Mapping[str, Any]]  # "--ops reference" -> {"ops": "reference"}


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


def contestant(what: str, model: str, settings: Mapping[str, Any], parse_options: ParseOptions) -> Contestant:
    """The side that `what` names, next to `model` with `settings`. Raises ConfigError with the choices."""
    what = what.strip()
    own = SIDES / "plait_engine.py"
    if what.startswith("-"):
        return Contestant(what, own, model, {**settings, **parse_options(what)})
    if match := PEER.fullmatch(what):
        return _peer(match[1], match[2] or "", match[3] or model)
    if Path(what).exists():
        return Contestant(Path(what).name, own, what, dict(settings))
    if commit := _commit(what):
        return Contestant(f"plait {what}", own, model, dict(settings), revision=commit)
    raise ConfigError(f"--compare {what}: there is no such file, option or revision; give {KINDS}")


def _peer(name: str, python: str, model: str) -> Contestant:
    if python and shutil.which(python) is None:
        raise ConfigError(f"--compare {name}@{python}: there is no interpreter {python}")
    script = SIDES / PEERS[name] if name in PEERS else Path(name)
    if not script.exists():
        raise ConfigError(f"--compare {name}: there is no such file; give {KINDS}")
    title = name if name in PEERS else script.name.removesuffix("_side.py")
    return Contestant(title, script, model, python=python, is_plait=False)


def _commit(what: str) -> str:
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
            archive.extractall(whole, filter="data")
        if not kept.exists():
            whole.rename(kept)
    return kept
