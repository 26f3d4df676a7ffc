"""How long a startup takes and how much memory it holds, from a startup image and without one, in turns.

python benchmarks/startup.py MODEL [MODEL ...] [--runs 9] [--llama-cli PATH]

Of each model, the medians of so many runs: `generate`, one token of `plait generate` in seconds and MiB at
most; `ready`, `plait serve` until /ready; `replaced`, an engine after kill -9 until it is back; `engine_mib`,
its resident memory when loaded. The text of both sides is compared first. `--llama-cli` is a peer for a GGUF
model: llama.cpp's `llama-cli` or `llama-completion`. Kernels are compiled before anything is timed. JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from plait.bench import machine  # noqa: E402

PLAIT = (sys.executable, "-m", "plait")
SIDES = {"image": "auto", "without": "off"}
PROMPT = "The sea is"


def run_process(command: Sequence[str]) -> tuple[float, float, str]:
    """(seconds, most resident MiB, what it wrote) of a process from its start to its end."""
    with tempfile.TemporaryFile() as out:
        began = time.perf_counter()
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.DEVNULL)
        _, status, used = os.wait4(process.pid, 0)
        took = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
        out.seek(0)
        return took, used.ru_maxrss / 1024, out.read().decode(errors="replace")


def generate(model: str, image: str, cache: str, tokens: int = 1) -> tuple[float, float, str]:
    """One run of `plait generate`."""
    options = ["--model", model, "--cpu", "--cache-dir", cache, "--startup-image", image, "--quiet"]
    ask = ["--ids", "1,2,3", "--temperature", "0", "--max-tokens", str(tokens)]
    return run_process([*PLAIT, "generate", *options, *ask])


def ask_ready(port: int) -> bool:
    """Whether the server is ready."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=2) as answer:
            return bool(answer.status == 200)
    except (OSError, urllib.error.URLError):
        return False


def wait_until(port: int, wanted: bool) -> float:
    """Seconds until `/ready` says so, looked at every 3 ms."""
    began = time.perf_counter()
    while ask_ready(port) is not wanted:
        time.sleep(0.003)
        if time.perf_counter() - began > 300:
            raise SystemExit("the server is not ready after 300 s")
    return time.perf_counter() - began


def find_engine(front: int) -> int:
    """The process of a front that runs its engine."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, IndexError):
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[1]) == front and b"worker.child" in (process / "cmdline").read_bytes():
                return int(process.name)
    raise SystemExit("the engine's process is not found")


def resident_mib(pid: int) -> float:
    """Resident memory of a process."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize() / (1 << 20)


@contextlib.contextmanager
def serve(model: str, image: str, cache: str) -> Iterator[tuple[int, int, float]]:
    """A server: its process, its port, and the seconds until it was ready."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    options = ["--cpu", "--port", str(port), "--cache-dir", cache, "--startup-image", image]
    process = subprocess.Popen([*PLAIT, "serve", model, *options], stderr=subprocess.DEVNULL)
    try:
        yield process.pid, port, wait_until(port, True)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def measure_server(model: str, image: str, cache: str) -> dict[str, float]:
    """Until it is ready, the memory of its engine, and until that is replaced."""
    with serve(model, image, cache) as (front, port, ready_s):
        engine = find_engine(front)
        held = resident_mib(engine)
        os.kill(engine, signal.SIGKILL)
        began = time.perf_counter()
        wait_until(port, False)
        wait_until(port, True)
        return {
            "ready_s": ready_s,
            "engine_mib": held,
            "replaced_s": time.perf_counter() - began,
        }


def measure(model: str, runs: int, peer: str | None) -> dict[str, Any]:
    """All numbers of one model."""
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as cache:
        generate(model, "auto", cache)  # compiles, packs and keeps the image
        texts = {side: generate(model, image, cache, 24)[2] for side, image in SIDES.items()}
        if len(set(texts.values())) != 1:
            raise SystemExit(f"{model}: the texts differ: {texts}")

        def add(side: str, name: str, value: float) -> None:
            found.setdefault(side, {}).setdefault(name, []).append(value)

        for _ in range(runs):
            for side, image in SIDES.items():
                seconds, mib, _ = generate(model, image, cache)
                add(side, "generate_s", seconds)
                add(side, "generate_mib", mib)
                for name, value in measure_server(model, image, cache).items():
                    add(side, name, value)
            if peer:
                threads = str(len(os.sched_getaffinity(0)))
                seconds, mib, _ = run_process(
                    [peer, "-m", model, "-p", PROMPT, "-n", "1", "-t", threads, "-no-cnv", "--no-warmup"]
                )
                add("llama.cpp", "generate_s", seconds)
                add("llama.cpp", "generate_mib", mib)
    return {
        side: {name: round(median(values), 3) for name, values in names.items()}
        for side, names in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("models", nargs="+")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--llama-cli")
    given = parser.parse_args()
    report = {
        "machine": machine.describe(),
        "runs": given.runs,
        "models": {Path(m).name: measure(m, given.runs, given.llama_cli) for m in given.models},
    }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
