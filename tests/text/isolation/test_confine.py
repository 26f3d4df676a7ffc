"""What a confined process can still do, and what it cannot: each thing is tried in one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
import datetime, json, os, resource, signal, socket, sys, threading
sys.path.insert(0, sys.argv[1])
from plait.text.isolation.confine import confine
walls = confine(256 << 20, threads=sys.argv[2] == "threads")

def in_thread():
    made = []
    thread = threading.Thread(target=made.append, args=(1,))
    thread.start()
    thread.join()
    return made

tries = {
    "read a file": lambda: open(sys.argv[3]).read(),
    "write a file": lambda: open(sys.argv[3], "a"),
    "list a folder": lambda: os.listdir("/"),
    "delete a file": lambda: os.unlink(sys.argv[3]),
    "open a socket": socket.socket,
    "open a pipe": os.pipe,
    "fork": os.fork,
    "run a program": lambda: os.execv("/bin/sh", ["sh", "-c", "exit 0"]),
    "signal the parent": lambda: os.kill(os.getppid(), 0),
    "raise a limit": lambda: resource.setrlimit(resource.RLIMIT_CPU, (9, 9)),
    "take memory": lambda: bytes(300 << 20),
    "import": lambda: __import__("wave"),
    "start a thread": in_thread,
    "tell the time": lambda: datetime.datetime.now().strftime("%Y"),
    "take some memory": lambda: len(bytes(64 << 20)),
}
found = {}
for name, attempt in tries.items():
    try:
        attempt()
    except (OSError, ValueError, MemoryError, ImportError, RuntimeError) as error:
        found[name] = type(error).__name__
    else:
        found[name] = "done"
sys.stdout.write(json.dumps({"walls": walls, "found": found}) + "\\n")
"""
FREE = {"tell the time", "take some memory"}


def confined(tmp_path: Path, threads: str) -> dict[str, Any]:
    secret = tmp_path / "secret"
    secret.write_text("kept")
    command = [sys.executable, "-I", "-c", CHILD, str(ROOT), threads, str(secret)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert secret.read_text() == "kept"
    found: dict[str, Any] = json.loads(run.stdout)
    return found


@pytest.mark.parametrize("threads", ["threads", "alone"])
def test_a_confined_process_reaches_nothing_outside_itself(tmp_path: Path, threads: str) -> None:
    answer = confined(tmp_path, threads)
    if "seccomp" not in answer["walls"]:
        pytest.skip("this system has no seccomp filter")
    done = {name for name, outcome in answer["found"].items() if outcome == "done"}
    assert done == FREE | ({"start a thread"} if threads == "threads" else set())


def test_without_help_of_the_system_limits_are_left(tmp_path: Path) -> None:
    """Files and sockets need a descriptor, and none is to be had."""
    without = CHILD.replace("walls = confine", "sys.platform = 'other'\nwalls = confine")
    command = [sys.executable, "-I", "-c", without, str(ROOT), "threads", str(tmp_path / "none")]
    tries = ("fork", "run a program", "signal the parent", "delete a file", "raise a limit")
    for name in tries:
        command[3] = command[3].replace(f'"{name}":', f'# "{name}":')
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    answer = json.loads(run.stdout)
    assert not {"seccomp"} & set(answer["walls"])
    assert {"limit of open files", "limit of memory"} <= set(answer["walls"])
    done = {name for name, outcome in answer["found"].items() if outcome == "done"}
    assert done == FREE | {"start a thread"}
