"""A `plait serve` of our own to measure, and what its processes hold: memory, files, threads, CPU time."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from plait.bench import machine
from plait.bench.machine import PROC
from plait.errors import EngineError

READY_S, POLL_S, ENDS_S = 1800.0, 0.1, 40.0
LAST_LINES = 15  # of what a server wrote before it died
Say = Callable[[str], None]


def flags(settings: Mapping[str, object]) -> list[str]:
    """Fields of a config as the command line has them."""
    words = []
    for name, value in settings.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, tuple | list):
            words += [word for one in value for word in (flag, str(one))]
        elif value is True:
            words.append(flag)
        elif value is not None and value is not False:
            words += [flag, str(value)]
    return words


class ServerProcess:
    """`plait serve MODEL` on a free port of this machine, until `close()`; its log goes to a file.

    Raises EngineError with the end of its log if it dies before it is ready.
    """

    def __init__(self, model: str, options: Sequence[str] = (), say: Say = lambda text: None) -> None:
        port = free_port()
        self.base_url = f"http://127.0.0.1:{port}"
        with tempfile.NamedTemporaryFile(prefix="plait-serve-", suffix=".log", delete=False) as log:
            self._log = Path(log.name)
            command = [sys.executable, "-m", "plait", "serve", model, "--port", str(port), *options]
            began = time.monotonic()
            self._process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        try:
            self._wait(say)
        except BaseException:
            self.close()
            raise
        self.startup_s = time.monotonic() - began

    @property
    def pid(self) -> int:
        return self._process.pid

    def close(self) -> int | None:
        """Ask it to stop, kill it if it does not; its exit code."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(ENDS_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.unlink(missing_ok=True)
        return self._process.returncode

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, say: Say) -> None:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            if self._process.poll() is not None:
                said = self._log.read_text(errors="replace").strip().splitlines()[-LAST_LINES:]
                code = self._process.returncode
                raise EngineError(
                    f"plait serve ended with code {code} before it was ready: " + "\n".join(said)
                )
            status, health = read_health(self.base_url)
            if status == 200:
                return
            progress = health.get("progress") or {}
            say(f"the server is loading: {progress.get('text', 'starting')}")
            time.sleep(POLL_S)
        raise EngineError(f"plait serve was not ready within {READY_S:g} s")


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
    return port


def read_health(base_url: str) -> tuple[int, dict[str, Any]]:
    """The status and the body of /health; (0, {}) while no server listens."""
    status, raw = read(f"{base_url}/health")
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    return status, found if isinstance(found, dict) else {}


def read(
    url: str, body: bytes | None = None, headers: Mapping[str, str] | None = None, timeout_s: float = 30.0
) -> tuple[int, str]:
    """(status, text) of a GET, or of a POST of `body`; (0, the reason) where no server answers."""
    request = urllib.request.Request(url, body, dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read().decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode(errors="replace")
    except OSError as error:
        return 0, str(error)


def read_metrics(base_url: str) -> dict[str, float]:
    """Every sample of /metrics by its name with labels; empty where there are none."""
    status, text = read(f"{base_url}/metrics")
    found = {}
    for line in text.splitlines() if status == 200 else []:
        name, _, value = line.rpartition(" ")
        if name and not line.startswith("#"):
            found[name] = float(value)
    return found


def family(pid: int) -> list[int]:
    """A process and all processes below it."""
    children: dict[int, list[int]] = {}
    for entry in PROC.iterdir() if PROC.exists() else ():
        if entry.name.isdigit() and (fields := _stat(int(entry.name))):
            children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        one = todo.pop()
        found.append(one)
        todo += children.get(one, [])
    return found


def census(pid: int) -> dict[str, object]:
    """What a server's processes hold together; zeros where the system does not say.

    rss_mib counts pages that several processes share several times; rss_mib_each: the first process, then
    those below it.
    """
    pids = [one for one in family(pid) if _stat(one)]
    ticks = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    stats = [fields for one in pids if (fields := _stat(one))]
    sizes = [round(int(f[21]) * _page() / 2**20, 1) for f in stats]
    return {
        "processes": len(pids),
        "rss_mib": round(sum(sizes), 1),
        "rss_mib_each": sizes,
        "threads": sum(int(f[17]) for f in stats),
        "fds": sum(map(_num_fds, pids)),
        "cpu_s": round(sum(int(f[11]) + int(f[12]) for f in stats) / ticks, 2),
    }


def _page() -> int:
    return os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


def _stat(pid: int) -> list[str]:
    """The fields of a process from its state on; none of one that has ended."""
    fields = machine.process_fields(pid)
    return fields if fields[:1] != ["Z"] else []


def _num_fds(pid: int) -> int:
    try:
        return len(os.listdir(PROC / str(pid) / "fd"))
    except OSError:
        return 0
