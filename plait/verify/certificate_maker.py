"""What makes a certificate: the revision of the source code, and all else that decides a bit."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import subprocess
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path

from plait.config import EngineConfig
from plait.kernels.load import host_target
from plait.loading.identity.source_code import PACKAGE, hash_code
from plait.version import __version__

LIBRARIES = ("torch", "numpy", "numba", "llvmlite")
# Whatever a token depends on; a change elsewhere leaves a certificate as it is.
ROOMS = (
    *("checkpoint", "engine", "families", "kernels", "loading", "model", "ops", "quant", "runner"),
    *("schedule", "spec", "state", "verify", "worker"),
    *("config.py", "memory.py", "partition.py", "request.py", "sampling_fields.py"),
)
GIT_S = 20.0


@dataclass(frozen=True, slots=True)
class CertificateMaker:
    """`commit`: of git, with `+changes` if the code differs from it; empty outside of a checkout.

    `facts`: plain values; two makers with equal facts give the same bits. `code` is a hash of what may decide
    a token, `matrix` of what decides which cells there are.
    """

    commit: str
    facts: dict[str, object]

    @property
    def revision(self) -> str:
        """How rows name it: the commit where it says all, else with a hash of the code."""
        code = f"code-{str(self.facts.get('code', ''))[:12]}"
        if not self.commit:
            return code
        return f"{self.commit}:{code}" if self.commit.endswith("+changes") else self.commit


def describe_maker(
    config: EngineConfig, usual: EngineConfig, batch: int, max_tokens: int
) -> CertificateMaker:
    """Code, libraries, processor, and those options of `config` that `usual` has not."""
    options = {
        f.name: getattr(config, f.name)
        for f in fields(config)
        if getattr(config, f.name) != getattr(usual, f.name)
    }
    made: dict[str, object] = {
        "plait": __version__,
        "code": hash_code(ROOMS),
        "matrix": hash_code(["verify"]),
        "python": platform.python_version(),
        **{name: version(name) for name in LIBRARIES},
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "target": hashlib.blake2b(host_target().encode(), digest_size=8).hexdigest(),
        "batch": batch,
        "max_tokens": max_tokens,
        "options": options,
    }
    plain: dict[str, object] = json.loads(json.dumps(made))
    return CertificateMaker(find_commit(PACKAGE), plain)


def find_commit(package: Path) -> str:
    """The commit that a package's modules are of: 12 digits, and `+changes` where a module differs.

    Empty where they are in no git repository, or in one that does not have them.
    """
    tracked = _run_git(package, "ls-files", "--error-unmatch", "version.py")
    commit = _run_git(package, "rev-parse", "HEAD")
    changes = _run_git(package, "status", "--porcelain", "--untracked-files=all", "--", "*.py")
    if not tracked or not commit or changes is None:
        return ""
    return commit.strip()[:12] + ("+changes" if changes.strip() else "")


def _run_git(folder: Path, *words: str) -> str | None:
    """What git prints; None where it fails, or is not there."""
    try:
        ran = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True,
            text=True,
            check=False,
            timeout=GIT_S,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return ran.stdout if ran.returncode == 0 else None


def _processor() -> str:
    """The processor's name, where the system has one."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()
