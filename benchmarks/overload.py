"""Many times more requests than a server can serve: what it still serves, how it refuses, how it recovers.

python benchmarks/overload.py model.gguf --seconds 60 --factor 10
python benchmarks/overload.py --base-url http://127.0.0.1:8080 --server-pid 1234

First the peak: as many clients as keep it full, each asking again when it has its reply. Then requests
come at `--factor` times the rate that was served, whatever becomes of them. Then the first load again: a
machine's speed moves within minutes, so what overload is compared with is the mean of both peaks. The client
shares the server's cores, and so is a lean one (`flood.py`). JSON.
"""

from __future__ import annotations

import argparse
from typing import Any

from flood import Flood, drive
from serving import Served, Watch, parse, parser, serving, show, tokens_within

from plait.bench import machine
from plait.bench.model.measure import round_number
from plait.bench.serve.load_generator import Run
from plait.bench.serve.run import tokens_per_word
from plait.bench.serve.score import score
from plait.bench.serve.workload import Workload, parse_length

SMALL = ("--max-model-len", "1024")  # so that the whole cache is used before memory is observed
TEXTS = 4096  # of the load that keeps a server full; then they come again
SETTLED = 0.2  # of a run, at its begin, in which the batch fills up: no token of it counts
FACTS = ("completed", "failed", "request_throughput", "median_ttft_ms", "p99_ttft_ms", "p99_itl_ms", "errors")
REFUSED = ("refused", "p50_refusal_ms", "p90_refusal_ms", "p99_refusal_ms", "error_examples")


def rate_of(run: Run, until_s: float) -> float:
    """Tokens a second of replies that came to their end, after the batch had filled up."""
    since = SETTLED * until_s
    return tokens_within(run.outcomes, since, until_s) / (until_s - since)


def phase(run: Run, until_s: float) -> dict[str, Any]:
    facts = score(run.outcomes, run.duration_s)
    return {
        **{name: facts[name] for name in FACTS},
        "tokens_per_s": round_number(rate_of(run, until_s)),
        "client_cpu_share": round_number(run.cpu_s / run.duration_s),
    }


def load_of(given: argparse.Namespace, served: Served, seed: int, count: int) -> Flood:
    workload = Workload(
        seed=given.seed + seed,
        input_len=parse_length(given.input_len),
        output_len=parse_length(given.output_len),
        max_len=served.max_len,
        tokens_per_word=tokens_per_word(served.target) or 1.0,
    )
    return Flood.of(served.target, workload, count)


def full(given: argparse.Namespace, served: Served, seed: int) -> Run:
    """The load that just keeps the server full, with texts that no other load has."""
    flood, seconds = load_of(given, served, seed, TEXTS), given.probe_seconds
    return drive(flood, lambda flood: flood.full(given.clients, seconds))


def measure(given: argparse.Namespace, served: Served) -> dict[str, Any]:
    drive(load_of(given, served, 1, 8), lambda flood: flood.full(4, 2.0))
    before = served.census()
    first = full(given, served, 2)
    peak = phase(first, given.probe_seconds)
    lengths = [one.output_len for one in first.outcomes if one.is_ok]
    rate = given.factor * peak["tokens_per_s"] / (sum(lengths) / len(lengths))
    flood = load_of(given, served, 3, round(1.2 * rate * given.seconds))
    with Watch(served) as watch:
        run = drive(flood, lambda flood: flood.at(rate, given.seconds, given.seed))
    flooded = score(run.outcomes, run.duration_s)
    after = served.census()
    again = phase(full(given, served, 4), given.probe_seconds)
    over = phase(run, given.seconds) | {name: flooded[name] for name in REFUSED}
    return {
        "machine": machine.describe(),
        "asked": {"requests_per_s": round_number(rate), "seconds": given.seconds, "factor": given.factor},
        "peak": peak,
        "overload": over,
        "recovery": again,
        "served_of_peak": round_number(
            over["tokens_per_s"] * 2 / (peak["tokens_per_s"] + again["tokens_per_s"])
        ),
        "served_of_first_peak": round_number(over["tokens_per_s"] / peak["tokens_per_s"]),
        "recovered_of_peak": round_number(again["tokens_per_s"] / peak["tokens_per_s"]),
        "other_errors": {k: n for k, n in flooded["errors"].items() if not k.startswith(("429", "503"))},
        "health_worst_ms": watch.most("health_ms"),
        "health_statuses": sorted({sample["health"] for sample in watch.samples}),
        "server": {
            "before": before,
            "most_rss_mib": watch.most("rss_mib"),
            "after_overload": after,
            "idle": served.idle(),
            "after_recovery": served.census(),
            "engine": served.engine(),
        },
        **({"samples": watch.samples} if given.samples else {}),
    }


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--factor", type=float, default=10.0, help="times the rate that was served")
    arguments.add_argument("--seconds", type=float, default=60.0, help="of overload")
    arguments.add_argument("--probe-seconds", type=float, default=30.0, help="of the loads before and after")
    arguments.add_argument("--clients", type=int, default=24, help="that keep it full")
    arguments.add_argument("--max-waiting", type=int, default=32, help="of the server that is started")
    arguments.add_argument("--input-len", default="32-96")
    arguments.add_argument("--output-len", default="32")
    given = parse(arguments)
    with serving(given, [*SMALL, "--max-waiting", str(given.max_waiting)]) as served:
        show(measure(given, served))


if __name__ == "__main__":
    main()
