"""What a gateway and a replica cost for a token without Ray, next to `plait serve`.

    python benchmarks/cluster_road.py MODEL [--streams 32] [--rounds 5]

A gateway process with HTTP of its own is connected with one replica process, in turns with `plait serve`;
both get the same streams, and their texts must be the same. Prints one JSON object: microseconds of processor
time a token (user and system, all threads), without the engines' own processes, by median over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from cluster import free_port, make_body, read_streams, wait_ready

NUM_TOKENS = 128  # of each stream


def run_replica(model: str, memory: int | None) -> None:
    """Until its standard input ends. `memory`: bytes of state; None: by need."""
    from plait.cluster.card import make_card
    from plait.cluster.replica_server import ReplicaServer
    from plait.cluster.resume_points import ResumePoints
    from plait.config import EngineConfig
    from plait.worker.client import EngineProcess

    config, points = EngineConfig(threads=1, memory_limit=memory), ResumePoints()
    process = EngineProcess(model, config)
    card = make_card(process, config)
    process.follow_prefixes(points.apply)
    server = ReplicaServer(process, card, points=points)
    process.on_charged = server.report_charged
    host, port, token = server.address
    print(json.dumps([host, port, token.hex()]), flush=True)
    sys.stdin.read()
    server.close()
    process.close(drain=False)


def run_gateway(addresses: list[str], port: int) -> None:
    """Until a signal. `addresses`: as replicas print them."""
    from plait.cluster.card import make_front
    from plait.cluster.loop import ClusterLoop
    from plait.cluster.replica_server import ReplicaAddress
    from plait.config import EngineConfig, ServerConfig
    from plait.frontend.frontend import Parsers
    from plait.server.run import serve_front

    known = [json.loads(address) for address in addresses]
    loop = ClusterLoop()
    loop.set_members(
        {
            f"replica {i}": ReplicaAddress(host, at, bytes.fromhex(token))
            for i, (host, at, token) in enumerate(known)
        }
    )
    parsers = Parsers(ServerConfig().tool_call_parser, ServerConfig().reasoning_parser)
    front = make_front(loop.first_card(), loop, EngineConfig(threads=1), parsers)
    serve_front(lambda report: front, ServerConfig(port=port))


def start_replica(model: str, memory: int | None = None) -> tuple[subprocess.Popen[str], str]:
    """A replica process, and what it prints of its address."""
    command = [sys.executable, __file__, model, "--role", "replica"]
    command += [] if memory is None else ["--memory", str(memory)]
    process = subprocess.Popen(command, stdin=-1, stdout=-1, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline()


def start_gateway(model: str, addresses: list[str], port: int) -> subprocess.Popen[bytes]:
    """A gateway process over these replicas."""
    command = [sys.executable, __file__, model, "--role", "gateway", "--port", str(port)]
    command += [word for address in addresses for word in ("--address", address)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def cpu_us(pid: int) -> float:
    """Processor time of a process so far, all threads that still run."""
    rows = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(row.read_text().split()[0]) for row in rows) / 1e3


def measure(
    ports: dict[str, int], pids: dict[str, dict[str, int]], width: int, rounds: int
) -> dict[str, object]:
    """Microseconds a token of each process; `more`: of gateway and replica, than `plait serve`."""
    used: dict[str, list[float]] = {name: [] for group in pids.values() for name in group}
    for number in range(rounds):
        bodies = [make_body(5000 + 40 * number + i, NUM_TOKENS) for i in range(width)]
        texts = []
        for side in sorted(ports, reverse=bool(number % 2)):
            before = {name: cpu_us(pid) for name, pid in pids[side].items()}
            replies = read_streams(ports[side], bodies)
            assert not any(reply.error for reply in replies), [reply.error for reply in replies]
            time.sleep(0.05)  # what follows the last event
            for name, pid in pids[side].items():
                used[name].append((cpu_us(pid) - before[name]) / (NUM_TOKENS * width))
            texts.append([reply.text for reply in replies])
        assert texts[0] == texts[1], "the texts differ"
    rows = zip(used["gateway"], used["replica"], used["serve"], strict=True)
    more = [gateway + replica - serve for gateway, replica, serve in rows]
    medians = {name: round(statistics.median(values), 1) for name, values in used.items()}
    return {
        "streams": width,
        **medians,
        "more": round(statistics.median(more), 1),
        "all": list(map(round, more)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", choices=("replica", "gateway"), help=argparse.SUPPRESS)
    parser.add_argument("--address", action="append", help=argparse.SUPPRESS)
    parser.add_argument("--memory", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.role == "replica":
        return run_replica(given.model, given.memory)
    if given.role == "gateway":
        return run_gateway(given.address, given.port)
    ports = {"serve": free_port(), "cluster": free_port()}
    serve = [sys.executable, "-m", "plait", "serve", given.model, "--threads", "1", "--port"]
    plain = subprocess.Popen([*serve, str(ports["serve"])], stdout=subprocess.DEVNULL)
    replica, address = start_replica(given.model)
    gateway = start_gateway(given.model, [address], ports["cluster"])
    try:
        for port in ports.values():
            wait_ready(port)
            read_streams(port, [make_body(i, 32) for i in range(8)])
        pids = {"serve": {"serve": plain.pid}, "cluster": {"gateway": gateway.pid, "replica": replica.pid}}
        found = measure(ports, pids, given.streams, given.rounds)
        print(json.dumps({"cores": os.cpu_count(), "load": os.getloadavg()[0], **found}))
    finally:
        for process in (plain, gateway, replica):
            process.terminate()
        for process in (plain, gateway, replica):
            process.wait(30)


if __name__ == "__main__":
    main()
