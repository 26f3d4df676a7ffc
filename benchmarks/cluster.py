"""A cluster on this machine next to `plait serve`: what dies under streams, and what a token costs.

    python benchmarks/cluster.py MODEL [--kills 100] [--streams 32] [--phases kill,stop,cost]

Needs the extra [cluster]. Prints one JSON object. Texts are compared with those of `plait serve`. A gap is
the longest time between two events of a stream. Processor time is of all processes but the engines, in
microseconds for a token, and Ray's HTTP proxy is shown alone.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

PROXY = ("RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S", "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S")
MARKS = {
    "gateway": "ServeReplica:plait:gateway",
    "replicas": "ServeReplica:plait:engine",
    "proxy": "ProxyActor",
}
Body = dict[str, object]


@dataclass
class StreamedReply:
    """A streamed reply: its text, when each event came, and what went wrong."""

    text: str = ""
    times: list[float] = field(default_factory=list)
    error: str = ""

    @property
    def longest_gap_s(self) -> float:
        """Between two events."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)


def make_body(i: int, num_tokens: int) -> Body:
    prompt = f"And it came to pass in the days of {i}"
    return {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0.8, "seed": i, "ignore_eos": True}


def read_stream(port: int, body: Body, on_event: Callable[[int], None] = lambda count: None) -> StreamedReply:
    """One streamed completion."""
    reply = StreamedReply()
    try:
        link = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
        headers = {"Content-Type": "application/json"}
        link.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
        answer = link.getresponse()
        if answer.status != 200:
            reply.error = f"{answer.status} {answer.read()[:200]!r}"
            return reply
        while line := answer.readline():
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            reply.error = reply.error or str(event.get("error", ""))
            for choice in event.get("choices", ()):
                reply.text += choice["text"]
                reply.times.append(time.perf_counter())
                on_event(len(reply.times))
    except (OSError, http.client.HTTPException) as error:
        reply.error = f"{type(error).__name__}: {error}"
    return reply


def read_streams(
    port: int, bodies: list[Body], on_event: Callable[[int], None] = lambda count: None
) -> list[StreamedReply]:
    """All of them at once."""
    replies = [StreamedReply()] * len(bodies)

    def read(i: int) -> None:
        replies[i] = read_stream(port, bodies[i], on_event)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return replies


def list_pids(mark: str) -> list[int]:
    """Processes with this text in their title."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:
            continue
    return sorted(found)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    row = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(row[11]) + int(row[12])) / os.sysconf("SC_CLK_TCK")


def wait_ready(port: int, num_replicas: int = 0, server: subprocess.Popen[bytes] | None = None) -> None:
    """Until requests are taken, and so many replicas are ready; no longer than `server` runs."""
    until = time.monotonic() + 240
    while time.monotonic() < until and (server is None or server.poll() is None):
        try:
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            link.request("GET", "/metrics")
            answer = link.getresponse()
            text = answer.read().decode()
            is_there = re.search(rf'plait_cluster_replicas\{{[^}}]*state="ready"\}} {num_replicas}\.0', text)
            if answer.status == 200 and (is_there or not num_replicas):
                return
        except (OSError, http.client.HTTPException):
            pass
        time.sleep(0.2)
    raise SystemExit(f"port {port} is not ready")


def measure_kills(ports: tuple[int, int], num_streams: int, sign: int) -> dict[str, object]:
    """Kill or stop a replica under six streams at a time until so many streams have been read."""
    plain, clustered = ports
    same, errors, gaps, rounds = 0, [], list[float](), 0
    while rounds * 6 < num_streams:
        width = min(6, num_streams - rounds * 6)
        bodies = [make_body(1000 + rounds * 6 + i, 400) for i in range(width)]
        expected = [reply.text for reply in read_streams(plain, bodies)]
        wait_ready(clustered, 2)
        victim, once = list_pids(MARKS["replicas"])[rounds % 2], threading.Event()

        def act(count: int, victim: int = victim, once: threading.Event = once) -> None:
            if count >= 30 and not once.is_set():
                once.set()
                os.kill(victim, sign)

        replies = read_streams(clustered, bodies, act)
        if sign == signal.SIGSTOP:
            os.kill(victim, signal.SIGKILL)
        same += sum(a.text == b for a, b in zip(replies, expected, strict=True))
        errors += [reply.error for reply in replies if reply.error]
        gaps += [reply.longest_gap_s for reply in replies]
        rounds += 1
    longest = {"longest_gap_s": round(max(gaps), 2), "median_gap_s": round(statistics.median(gaps), 3)}
    return {"streams": num_streams, "same_text": same, "errors": errors, **longest}


def measure_cost(ports: tuple[int, int], plain_pid: int, width: int, rounds: int) -> dict[str, object]:
    """Processor time for a token, in turns; and the time to the first token of one stream."""
    used: dict[str, float] = {}
    num_tokens, first = 0, {"plain": list[float](), "cluster": list[float]()}
    for r in range(rounds):
        bodies = [make_body(5000 + 40 * r + i, 128) for i in range(width)]
        num_tokens += 128 * width
        groups = {name: list_pids(mark) for name, mark in MARKS.items()} | {"plain": [plain_pid]}
        for name, port in (("plain", ports[0]), ("cluster", ports[1])):
            before = {group: sum(map(cpu_s, found)) for group, found in groups.items()}
            began = time.perf_counter()
            replies = read_streams(port, bodies)
            assert not any(reply.error for reply in replies), [reply.error for reply in replies]
            first[name] += [reply.times[0] - began for reply in replies]
            for group, found in groups.items():
                if (group == "plain") == (name == "plain"):
                    used[group] = used.get(group, 0.0) + sum(map(cpu_s, found)) - before[group]
    costs = {group: round(seconds / num_tokens * 1e6) for group, seconds in used.items()}
    ms = {f"first_token_ms_{name}": round(statistics.median(s) * 1e3, 1) for name, s in first.items()}
    return {"streams": width, "cpu_us_per_token": costs, **ms}


def measure_memory() -> list[dict[str, object]]:
    """Of each gateway: resident megabytes, and whether torch is mapped."""
    found = []
    for pid in list_pids(MARKS["gateway"]):
        status = Path(f"/proc/{pid}/status").read_text()
        (rss,) = (line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        has_torch = "torch" in Path(f"/proc/{pid}/maps").read_text()
        found.append({"rss_mb": round(int(rss) / 1024), "maps_torch": has_torch})
    return found


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--kills", type=int, default=100, help="streams under which replicas are killed")
    parser.add_argument("--streams", type=int, default=32, help="streams at a time, for the cost of a token")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--phases", default="memory,cost,kill,stop")
    given = parser.parse_args()
    ports = free_port(), free_port()
    serve = [sys.executable, "-m", "plait", "serve", given.model, "--port", str(ports[0]), "--threads", "1"]
    spread = ["--replicas", "2", "--gateways", "1", "--threads", "1", "--port", str(ports[1])]
    clustered = [sys.executable, "-m", "plait", "cluster", "serve", given.model, *spread]
    environment = os.environ | dict.fromkeys(PROXY, "60")
    quiet = {"stdout": subprocess.DEVNULL, "env": environment}
    started = [subprocess.Popen(command, **quiet) for command in (serve, clustered)]  # type: ignore[call-overload]
    found: dict[str, object] = {"cores": os.cpu_count(), "load": os.getloadavg()[0]}
    try:
        wait_ready(ports[0], server=started[0])
        wait_ready(ports[1], 2, started[1])
        phases = given.phases.split(",")
        read_streams(ports[1], [make_body(i, 32) for i in range(8)])
        if "memory" in phases:
            found["gateways"] = measure_memory()
        if "cost" in phases:
            widths = (1, given.streams)
            found["cost"] = [measure_cost(ports, started[0].pid, w, given.rounds) for w in widths]
        if "kill" in phases:
            found["kill"] = measure_kills(ports, given.kills, signal.SIGKILL)
        if "stop" in phases:
            found["stop"] = measure_kills(ports, 6, signal.SIGSTOP)
        found["load_at_end"] = os.getloadavg()[0]
        print(json.dumps(found, indent=2))
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


if __name__ == "__main__":
    main()
