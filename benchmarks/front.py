"""What HTTP and text cost a token where the engine is not the limit: streams of one that computes nothing.

python benchmarks/front.py --streams 64 --step-ms 5 --tokens 200 --kind chat
python benchmarks/front.py --before REVISION|FOLDER --turns 9

A server over `paced_engine.py` gives every stream a token each step. All streams begin at one moment, and
each must be its prompt's bytes, again and again, or no number is printed. With --before a server of that tree
takes turns with this one's, A B, B A, …; `before_over_this` is the median of the turns' ratios of CPU time.
JSON, medians of turns: CPU time of the server's threads for each token, events for each token (fewer than one
where tokens wait for each other), and how long streams took, of the time that the engine took.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from flood import Flood, drive
from revisions import cpu_seconds, root_of
from serving import say, show

from plait.bench import machine
from plait.bench.model.measure import round_number
from plait.bench.serve.client import RequestOutcome, ServerTarget
from plait.bench.serve.server_process import free_port, read_health
from plait.bench.serve.workload import Length, Workload

HERE = Path(__file__).resolve().parent
WORDS = 16  # of each prompt
STARTS_S, ENDS_S = 60.0, 20.0
Numbers = dict[str, float]


@contextmanager
def serving(root: Path, step_ms: float) -> Iterator[tuple[str, int]]:
    """The address and the process of a server of the tree `root`, until the context ends."""
    port = free_port()
    command = [sys.executable, str(HERE / "paced_engine.py"), str(port), str(step_ms)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"PYTHONPATH": str(root)})
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + STARTS_S
        while read_health(url)[0] != 200:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the server of {root} does not start: {' '.join(command)}")
            time.sleep(0.05)
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def check(outcomes: Sequence[RequestOutcome], workload: Workload, tokens: int) -> None:
    """Every stream is whole and in order. Exits otherwise."""
    for one in outcomes:
        if one.error:
            raise SystemExit(f"stream {one.index} failed: {one.error}: {one.message}")
        prompt = workload.chat(one.index).turns[0].text
        if one.text != (prompt * (tokens // len(prompt) + 1))[:tokens]:
            raise SystemExit(f"stream {one.index} is not its prompt again: {one.text!r} of {prompt!r}")


def measure(given: argparse.Namespace, url: str, pid: int, seed: int, tokens: int) -> Numbers:
    """One load on one server, checked."""
    workload = Workload(seed=seed, input_len=Length(WORDS, WORDS), output_len=Length(tokens, tokens))
    target = ServerTarget(name="front", base_url=url, model="fake", chat=given.kind == "chat")
    flood = Flood.of(target, workload, given.streams)
    before = cpu_seconds(pid)
    outcomes = drive(flood, Flood.once).outcomes
    used = cpu_seconds(pid) - before
    check(outcomes, workload, tokens)
    ideal_s = (tokens - 1) * given.step_ms / 1000
    return {
        "cpu_us_per_token": 1e6 * used / (given.streams * tokens),
        "events_per_token": sum(1 + len(one.gaps_s) for one in outcomes) / (given.streams * tokens),
        "time_of_engine": median(sum(one.gaps_s) for one in outcomes) / ideal_s,
    }


def turns(given: argparse.Namespace, roots: dict[str, Path]) -> dict[str, list[Numbers]]:
    """Numbers of every side and turn."""
    found: dict[str, list[Numbers]] = {name: [] for name in roots}
    with ExitStack() as stack:
        sides = {name: stack.enter_context(serving(root, given.step_ms)) for name, root in roots.items()}
        for side in sides.values():
            measure(given, *side, seed=0, tokens=min(20, given.tokens))  # it warms up
        for turn in range(1, given.turns + 1):
            say(f"turn {turn} of {given.turns}")
            for name in list(sides)[:: 1 if turn % 2 else -1]:
                found[name].append(measure(given, *sides[name], seed=turn, tokens=given.tokens))
    return found


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--step-ms", type=float, default=5.0, help="from one token of a stream to its next")
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--kind", choices=("completions", "chat"), default="completions")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--before", help="a revision, or a folder with plait/ in it, to compare with")
    given = parser.parse_args()
    if given.tokens < 2 or given.step_ms <= 0 or given.streams < 1 or given.turns < 1:
        parser.error("--tokens must be 2 at least, --step-ms above 0, --streams and --turns 1 at least")
    return given


def main() -> None:
    given = parse()
    roots = {"before": root_of(given.before)} if given.before else {}
    found = turns(given, roots | {"this": HERE.parent})
    result: dict[str, Any] = {"machine": machine.describe(), **vars(given)}
    result["sides"] = {
        name: {key: round_number(median(one[key] for one in numbers)) for key in numbers[0]}
        for name, numbers in found.items()
    }
    if given.before:
        pairs = zip(found["before"], found["this"], strict=True)
        ratios = (a["cpu_us_per_token"] / b["cpu_us_per_token"] for a, b in pairs)
        result["before_over_this"] = round_number(median(ratios))
    show(result)


if __name__ == "__main__":
    main()
