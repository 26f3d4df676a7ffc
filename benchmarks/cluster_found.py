"""Prompt tokens that several small caches find, next to one large cache, in chats of `plait bench serve`.

    python benchmarks/cluster_found.py MODEL [--replicas 4] [--gateways 2] [--memory 12000000] [--chats 40]

Replica and gateway processes without Ray, as in `cluster_road.py`; each connection goes to the next gateway.
`--memory`: bytes of state of a replica; the one `plait serve` next to them has as much as all replicas.
Prints one JSON object: the share of prompt tokens that each side found, and their ratio; what lookups found
on each side (`docs/caching.md` has the causes), and why replicas were chosen.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from urllib.request import urlopen

from cluster import free_port, wait_ready
from cluster_road import start_gateway, start_replica

QUIET = {"stdout": subprocess.DEVNULL}


@contextmanager
def take_turns(ports: list[int]) -> Iterator[int]:
    """A port of which each connection goes to the next of these."""
    listener, turns = socket.create_server(("127.0.0.1", 0)), itertools.cycle(ports)

    def copy(source: socket.socket, to: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        with suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", next(turns)))
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=copy, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield int(listener.getsockname()[1])


def measure(port: int, given: argparse.Namespace) -> float:
    """The share of prompt tokens that were cached, in the same chats for each side."""
    command = [sys.executable, "-m", "plait", "bench", "serve", "--base-url", f"http://127.0.0.1:{port}"]
    load = {"turns": given.turns, "num-prompts": given.chats * given.turns, "concurrency": given.width}
    load |= {"input-len": given.input, "output-len": given.output, "warm-up": 0, "endpoint": "completions"}
    command += [word for name, value in load.items() for word in (f"--{name}", str(value))]
    answer = subprocess.run([*command, "--json"], stdout=subprocess.PIPE, text=True, check=True)
    found = json.loads(answer.stdout)
    return float(found["sides"][0]["cached_token_rate"])


def count_samples(ports: list[int], name: str, label: str) -> dict[str, float]:
    """A counter's sums by one label, over what these servers show."""
    found: Counter[str] = Counter()
    for port in ports:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        for labels, value in re.findall(rf"^{name}\{{(.*)\}} (\S+)$", text, re.MULTILINE):
            found[dict(re.findall(r'(\w+)="([^"]*)"', labels))[label]] += float(value)
    return {key: value for key, value in sorted(found.items()) if value}


def end(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    process.terminate()
    process.wait(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--replicas", type=int, default=4)
    parser.add_argument("--gateways", type=int, default=2)
    parser.add_argument("--memory", type=int, default=12_000_000, help="bytes of state of one replica")
    parser.add_argument("--chats", type=int, default=40)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--width", type=int, default=4, help="chats at a time")
    parser.add_argument("--input", type=int, default=40, help="tokens of a turn's prompt")
    parser.add_argument("--output", type=int, default=8, help="tokens of a reply")
    given = parser.parse_args()
    with ExitStack() as stack:
        replicas = [start_replica(given.model, given.memory) for _ in range(given.replicas)]
        addresses = [address for _, address in replicas]
        ports = [free_port() for _ in range(given.gateways)]
        gateways = [start_gateway(given.model, addresses, port) for port in ports]
        for process in (*(process for process, _ in replicas), *gateways):
            stack.callback(end, process)
        large = free_port()
        total = ["--memory-limit", str(given.memory * given.replicas), "--threads", "1", "--port", str(large)]
        alone = subprocess.Popen([sys.executable, "-m", "plait", "serve", given.model, *total], **QUIET)
        stack.callback(end, alone)
        for port in (*ports, large):
            wait_ready(port)
        one = measure(large, given)
        found = measure(stack.enter_context(take_turns(ports)), given)
        lookups = "plait_prefix_cache_lookups_total"
        causes = {
            "lookups_of_one": count_samples([large], lookups, "cause"),
            "lookups": count_samples(ports[:1], lookups, "cause"),  # a gateway has those of all replicas
            "routed": count_samples(ports, "plait_cluster_routed_total", "why"),
        }
    shares = {"found_by_one": one, "found": found, "ratio": round(found / one, 3)}
    print(json.dumps({**vars(given), **shares, **causes, "load": os.getloadavg()[0]}))


if __name__ == "__main__":
    main()
