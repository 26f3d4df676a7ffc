"""What an engine in a process of its own costs, and how soon it is replaced: one JSON object on stdout.

python benchmarks/supervision.py --model examples/nano-hybrid --streams 64 --tokens 200

Three servers, one after the other: the engine on a thread of the server's process, as a child of it, and as
a child that is killed half-way. Seconds of CPU are those of the server and its children, not of the client.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVE = """
import sys
from plait.config import EngineConfig, ServerConfig
from plait.server.run import serve_front
kind, model, seqs, port = sys.argv[1:]
config = EngineConfig(device="cpu", max_num_seqs=int(seqs))
if kind == "thread":
    from plait.loading.build import load
    make = lambda report: load(model, config, report).front
else:
    from plait.worker.client import load_process
    make = lambda report: load_process(model, config, report)
serve_front(make, ServerConfig(port=int(port)))
"""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default=str(ROOT / "examples" / "nano-hybrid"))
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--runs", type=int, default=3, help="of each kind; the median is shown")
    asked = parser.parse_args()
    found = {kind: measured(kind, asked) for kind in ("thread", "process")}
    found["killed"] = killed(asked)
    print(
        json.dumps(
            {"model": asked.model, "streams": asked.streams, "tokens": asked.tokens, **found}, indent=1
        )
    )


def measured(kind: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second and seconds of CPU per token of a server of this kind, after a round to warm up."""
    with serving(kind, asked) as (port, pid, listen_s, ready_s):
        asyncio.run(load(port, asked))
        runs = []
        for _ in range(asked.runs):
            cpu, began = cpu_s(pid), time.perf_counter()
            count = sum(reply.tokens for reply in asyncio.run(load(port, asked)))
            took, used = time.perf_counter() - began, cpu_s(pid) - cpu
            runs.append((count / took, 1e6 * used / count))
        return {
            "listen_s": round(listen_s, 2),
            "ready_s": round(ready_s, 2),
            "tokens_per_s": round(statistics.median(r[0] for r in runs), 1),
            "cpu_us_per_token": round(statistics.median(r[1] for r in runs), 1),
            "runs": [[round(x, 1) for x in run] for run in runs],
        }


def killed(asked: argparse.Namespace) -> dict[str, Any]:
    """Seconds from the engine's end by SIGKILL to the next token of the first, median and last stream.

    same: streams with the text of a run that nothing disturbed. Without an open stream there is a note alone.
    """
    with serving("process", asked) as (port, pid, _, _):
        whole = asyncio.run(load(port, asked))
        replies, at = asyncio.run(load_and_kill(port, pid, asked))
    later = [[t for t in reply.times if t > at + 0.05] for reply in replies]
    waits = sorted(times[0] - at for times in later if times)
    if not waits:
        return {
            "streams_open": 0,
            "note": "every stream had ended before the engine was killed: give more --tokens",
        }
    return {
        "streams_open": len(waits),
        "same": sum(a.text == b.text and a.tokens == b.tokens for a, b in zip(whole, replies, strict=True)),
        "tokens_after": sum(map(len, later)),
        "first_s": round(waits[0], 2),
        "median_s": round(statistics.median(waits), 2),
        "last_s": round(waits[-1], 2),
    }


async def load_and_kill(port: int, pid: int, asked: argparse.Namespace) -> tuple[list[Reply], float]:
    work = asyncio.ensure_future(load(port, asked))
    before = totals(port)
    half = asked.streams * asked.tokens // 2
    while await asyncio.to_thread(totals, port) - before < half:
        await asyncio.sleep(0.02)
    os.kill(max(children(pid), key=cpu_s), signal.SIGKILL)
    at = time.perf_counter()
    return await work, at


@dataclass(slots=True)
class Reply:
    """What one stream brought. `times`: when each event with text came; `tokens`: the server's own count."""

    text: str = ""
    tokens: int = 0
    times: list[float] = field(default_factory=list)

    def take(self, line: bytes) -> None:
        event = json.loads(line)
        assert "error" not in event, event
        self.tokens = (event.get("usage") or {}).get("completion_tokens", self.tokens)
        for choice in event["choices"]:
            self.text += choice["text"]
            self.times.append(time.perf_counter())


async def load(port: int, asked: argparse.Namespace) -> list[Reply]:
    """Greedy and seeded streams by turns."""
    return await asyncio.gather(*(stream(port, i, asked.tokens) for i in range(asked.streams)))


async def stream(port: int, i: int, tokens: int) -> Reply:
    body = json.dumps(
        {
            "prompt": [10 + i, 20, 30, 40],
            "max_tokens": tokens,
            "temperature": i % 2,
            "seed": i,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
    reply = Reply()
    async for line in reader:
        if line.startswith(b"data: {"):
            reply.take(line[6:])
    writer.close()
    return reply


@contextlib.contextmanager
def serving(kind: str, asked: argparse.Namespace) -> Iterator[tuple[int, int, float, float]]:
    """(port, process id, seconds until HTTP answered, seconds until the model was there)."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    began, listen_s = time.perf_counter(), 0.0
    server = subprocess.Popen(
        [sys.executable, "-c", SERVE, kind, asked.model, str(asked.streams), str(port)], cwd=ROOT
    )
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/version", timeout=10).close()
                listen_s = listen_s or time.perf_counter() - began
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10).close()
                break
            assert server.poll() is None, "the server has ended"
            time.sleep(0.02)
        yield port, server.pid, listen_s, time.perf_counter() - began
    finally:
        server.terminate()
        server.wait()


def totals(port: int) -> int:
    """Tokens generated so far."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=10) as answer:
        found: int = json.load(answer)["totals"]["num_output_tokens"]
    return found


def children(pid: int) -> list[int]:
    """Processes that any thread of this one has started."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(i) for task in tasks for i in (task / "children").read_text().split()]


def cpu_s(pid: int) -> float:
    """Seconds of CPU of a process and of all below it that run."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    own = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return own + sum(map(cpu_s, children(pid)))


if __name__ == "__main__":
    main()
