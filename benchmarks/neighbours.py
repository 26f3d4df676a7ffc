"""Tokens a second next to other busy processes: by threads, by neighbours, by kind of step.

python benchmarks/neighbours.py model.gguf --compare "--threads 1" --compare "--threads 2" --compare HEAD~1
python benchmarks/neighbours.py model.gguf --compare "--threads 1" --overload 30

A neighbour is a process that computes without end, held to one core; `--neighbours` says how many there are
at a time, one a core in turn. Every side, the default options first, is a process that stays loaded. They are
measured in turns, A B A B …, so that what else happens on the machine meets all of them. `of_best`: the
default's share of what the fastest side has, the median of the turns' own ratios. `--overload SECONDS` also
runs overload.py, in the same minutes, with the default. JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from plait.bench import machine  # noqa: E402
from plait.bench.model.compare import (  # noqa: E402
    SIDES,
    Contestant,
    Side,
    contestant,
)
from plait.bench.model.measure import round_number  # noqa: E402
from plait.bench.model.run import name_apart, start  # noqa: E402

BUSY = "import os, sys\nif sys.argv[1:]: os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"
DEFAULT = "default"


@contextmanager
def busy(count: int) -> Iterator[None]:
    """So many processes that compute without end, one a core in turn."""
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    with ExitStack() as stack:
        for i in range(count):
            held = [str(cores[i % len(cores)])] if cores else []
            process = stack.enter_context(subprocess.Popen([sys.executable, "-c", BUSY, *held]))
            stack.callback(process.kill)
        yield


def cpu_seconds(pid: int) -> float:
    """CPU time that a process has used; 0 where the system does not say."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(side: Side, kind: str, given: argparse.Namespace, ids: Sequence[int]) -> dict[str, float]:
    """Tokens a second, and CPU milliseconds a token, of one run."""
    used = cpu_seconds(side.pid)
    if kind == "prefill":
        tokens = len(ids)
        seconds = side.ask("prefill", ids=list(ids), level="runner")
    else:
        tokens = given.tokens
        seconds = side.ask("decode", ids=list(ids[:32]), tokens=tokens, level="runner")
    cpu_ms = 1000 * (cpu_seconds(side.pid) - used) / tokens
    return {"tokens_per_s": tokens / seconds, "cpu_ms_per_token": cpu_ms}


def compare(sides: Sequence[Side], kind: str, given: argparse.Namespace) -> dict[str, Any]:
    draw, runs = random.Random(given.seed), {side.name: list[dict[str, float]]() for side in sides}
    for turn in range(given.repeats + 1):
        ids = [draw.randrange(1000, 9000) for _ in range(given.prompt)]
        for side in sides:
            found = measure(side, kind, given, ids)
            if turn:  # the first one warms up
                runs[side.name].append(found)
    rows = {
        name: {key: round_number(median(run[key] for run in found)) for key in found[0]}
        for name, found in runs.items()
    }
    best = max((side.name for side in sides), key=lambda name: rows[name]["tokens_per_s"])
    turns = zip(runs[DEFAULT], runs[best], strict=True)
    of_best = median(ours["tokens_per_s"] / its["tokens_per_s"] for ours, its in turns)
    return {"kind": kind, "sides": rows, "best": best, "of_best": round_number(of_best)}


def overload(given: argparse.Namespace) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "overload.py"), given.model, "--seconds", str(given.overload)]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    whole: dict[str, Any] = json.loads(found)
    return {name: whole[name] for name in ("asked", "peak", "overload", "recovery", "served_of_peak")}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--compare", action="append", default=[], help='"--threads 1", or a git revision')
    parser.add_argument("--neighbours", default="0,1,2", help="how many, one after the other")
    parser.add_argument("--kinds", default="decode,prefill")
    parser.add_argument("--tokens", type=int, default=128, help="of a decode run")
    parser.add_argument("--prompt", type=int, default=512, help="of a prefill run")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overload", type=float, default=0.0, help="seconds of overload.py as well")
    given = parser.parse_args()
    own = Contestant(DEFAULT, SIDES / "plait_engine.py", given.model)
    others = [contestant(what, given.model, {}, threads_of) for what in given.compare]
    room, rows = {"max_model_len": given.prompt + given.tokens + 40, "max_num_seqs": 4}, []
    with ExitStack() as stack:
        sides = [start(who, None, room, stack)[0] for who in name_apart([own, *others])]
        for count in map(int, given.neighbours.split(",")):
            with busy(count):
                rows += [
                    {"neighbours": count, **compare(sides, kind, given)} for kind in given.kinds.split(",")
                ]
                print(rows[-len(given.kinds.split(",")) :], file=sys.stderr)
    found = {"machine": machine.describe(), "rows": rows}
    if given.overload:
        found["overload"] = overload(given)
    print(json.dumps(found, indent=2))


def threads_of(options: str) -> dict[str, int]:
    word, _, number = options.partition(" ")
    if word != "--threads":
        raise SystemExit(f'--compare {options}: give "--threads N" or a git revision')
    return {"threads": int(number)}


if __name__ == "__main__":
    main()
