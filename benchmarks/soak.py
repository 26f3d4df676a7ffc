"""Minutes of clients that leave, hang up and misbehave: what a server holds when all of them have gone.

python benchmarks/soak.py model.gguf --minutes 10
python benchmarks/soak.py --base-url http://127.0.0.1:8080 --server-pid 1234 --minutes 60

Each round has half a minute of load: chats and completions, streamed and whole, shared prefixes, several
turns. A third of the clients leaves early, and some hang up in the middle of a request. Then comes silence,
then a look at blocks, slots, files, threads, memory. The first round warms up; the second is what the last is
held against. JSON. The server that is started is small: memory grows until every block of its cache has been
used once, and that must be over soon.
"""

from __future__ import annotations

import argparse
import json
import socket
import threading
import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any
from urllib.parse import urlsplit

from serving import Served, parse, parser, say, serving, show

from plait.bench import machine
from plait.bench.serve.client import RequestOutcome
from plait.bench.serve.load_generator import Arrivals, drive
from plait.bench.serve.run import tokens_per_word
from plait.bench.serve.server_process import read_metrics
from plait.bench.serve.workload import Length, Workload

KINDS = ({}, {"chat": False}, {"stream": False}, {"chat": False, "stream": False})
SMALL = ("--max-model-len", "1024", "--max-num-seqs", "8")  # so that all its memory is used soon
HELD = ("rss_mib", "fds", "threads", "processes")
RUDE_S = 0.25  # between two of them


def hang_up(served: Served, random: Random, counts: Counter[str]) -> None:
    """One client that breaks off: somewhere in its request, or before or while it is answered."""
    address = urlsplit(served.target.base_url)
    raw = json.dumps(
        {"model": served.target.model, "prompt": "Once", "max_tokens": 64, "stream": True}
    ).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {address.netloc}\r\nContent-Type: application/json\r\n"
    head += f"Authorization: Bearer {served.target.api_key}\r\n" if served.target.api_key else ""
    whole = f"{head}Content-Length: {len(raw)}\r\n\r\n".encode() + raw
    kind = random.choice(
        ("silent", "half a head", "half a body", "no reader", "reader of a line", "nonsense")
    )
    counts[kind] += 1
    sent = {
        "silent": b"",
        "half a head": whole[: len(head) // 2],
        "half a body": whole[: -len(raw) // 2],
        "nonsense": bytes(random.randrange(256) for _ in range(200)) + b"\r\n\r\n",
    }.get(kind, whole)
    try:
        with socket.create_connection((address.hostname or "", address.port or 80), timeout=5) as one:
            one.sendall(sent)
            if kind == "reader of a line":
                one.recv(200)
            else:
                time.sleep(random.random() * 0.2)
    except OSError:
        counts["refused by the server"] += 1


def rudely(served: Served, seed: int, ends: threading.Event, counts: Counter[str]) -> None:
    random = Random(f"{seed}/rude")
    while not ends.wait(RUDE_S * 2 * random.random()):
        hang_up(served, random, counts)


def one_round(given: argparse.Namespace, served: Served, number: int, share: float) -> dict[str, Any]:
    """Load, silence, and what the server holds then."""
    load = Workload(
        seed=given.seed + number,
        input_len=Length(8, 192),
        output_len=Length(1, 48),
        prefix_share=0.5,
        prefix_groups=4,
        turns=1 + number % 3,
        cancel_rate=0.34,
        max_len=served.max_len,
        tokens_per_word=share,
    )
    kinds: Counter[str] = Counter()
    rude: Counter[str] = Counter()

    def note(one: RequestOutcome) -> None:
        kinds[one.error or ("left early" if one.is_cancelled else "completed")] += 1

    ends = threading.Event()
    thread = threading.Thread(target=rudely, args=(served, load.seed, ends, rude), daemon=True)
    thread.start()
    for i, kind in enumerate(KINDS):
        target = replace(served.target, **kind)
        part = replace(load, seed=len(KINDS) * load.seed + i)
        seconds = given.round_seconds / len(KINDS)
        drive(target, part, Arrivals(concurrency=given.clients, num_prompts=None, duration_s=seconds), note)
    ends.set()
    thread.join(30)
    idle = served.idle()
    return {
        "round": number,
        "requests": dict(kinds),
        "hung_up": dict(rude),
        "idle": idle,
        **served.census(),
        "engine": served.engine(),
    }


def compared(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """[held after the second round, held at the end] of everything, and what differs of what must not."""
    first, last = rounds[min(1, len(rounds) - 1)], rounds[-1]
    found = {name: [first.get(name), last.get(name)] for name in HELD}
    found |= {name: [value, last["engine"].get(name)] for name, value in first["engine"].items()}
    return found


def books(engine: dict[str, Any]) -> dict[str, bool | None]:
    """Whether every block and slot is free or kept for reuse; None where the server does not say."""

    def balanced(total: str, *parts: str) -> bool | None:
        known = [engine.get(name) for name in (total, *parts)]
        return None if None in known else known[0] == sum(known[1:])

    return {
        "blocks": balanced("num_blocks", "num_free_blocks", "num_cached_blocks"),
        "slots": balanced("num_slots", "num_free_slots", "num_snapshots"),
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--minutes", type=float, default=10.0)
    arguments.add_argument("--round-seconds", type=float, default=30.0)
    arguments.add_argument("--clients", type=int, default=12)
    given = parse(arguments)
    with serving(given, SMALL) as served:
        share, rounds = tokens_per_word(served.target) or 1.0, list[dict[str, Any]]()
        metrics = read_metrics(served.target.base_url)
        ends = time.monotonic() + 60 * given.minutes
        while time.monotonic() < ends or len(rounds) < 2:
            rounds.append(one_round(given, served, len(rounds), share))
            say(f"round {len(rounds)}: {rounds[-1]['requests']}")
        last = read_metrics(served.target.base_url)
        total: Counter[str] = Counter()
        for one in rounds:
            total.update(one["requests"])
        show(
            {
                "machine": machine.describe(),
                "minutes": given.minutes,
                "rounds": len(rounds),
                "requests": dict(total),
                "held": compared(rounds),
                "rss_mib_each_by_round": [one.get("rss_mib_each") for one in rounds],
                "books_balance": books(rounds[-1]["engine"]),
                "was_idle_after_every_round": all(one["idle"] for one in rounds),
                "metrics": {
                    name: [metrics.get(name), value]
                    for name, value in last.items()
                    if "_bucket" not in name and "_created" not in name
                },
                **({"every_round": rounds} if given.samples else {}),
            }
        )


if __name__ == "__main__":
    main()
