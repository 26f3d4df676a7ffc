"""What HTTP and text cost a token: the same load on the bare engine, with text, and through a server.

python benchmarks/overhead.py model.gguf --streams 64 --tokens 64 --repeats 3

engine: requests of token ids, their events counted and thrown away. text: `LLM.generate`, so text and stop
strings too. http: a server of its own and the client of `plait bench serve`, completions, streamed. All in
turns, `--streams` at once, with the same options. JSON on stdout.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from statistics import median
from typing import Any

from serving import Served, parse, parser, say, serving, show

from plait import LLM, SamplingParams
from plait.bench import machine
from plait.bench.model.measure import round_number
from plait.bench.serve.load_generator import Arrivals, drive
from plait.bench.serve.workload import Length, Workload
from plait.cli.bench import parse_options
from plait.request import Event

Numbers = dict[str, float]


def texts(given: argparse.Namespace, turn: int, share: float) -> Workload:
    """Prompts that no turn before had."""
    return Workload(
        seed=given.seed + turn,
        input_len=Length(given.prompt, given.prompt),
        output_len=Length(given.tokens, given.tokens),
        tokens_per_word=share,
    )


def prompts(given: argparse.Namespace, load: Workload) -> list[str]:
    return [load.chat(i).turns[0].text for i in range(given.streams)]


def timed(work: Callable[[], int]) -> Numbers:
    """Tokens a second, and the CPU time of this process for each token."""
    began, cpu = time.perf_counter(), time.process_time()
    tokens = work()
    wall, used = time.perf_counter() - began, time.process_time() - cpu
    return {"tokens": tokens, "tokens_per_s": tokens / wall, "cpu_us_per_token": 1e6 * used / tokens}


def settings(given: argparse.Namespace) -> SamplingParams:
    return SamplingParams(max_tokens=given.tokens, temperature=0.0, ignore_eos=True)


def bare(llm: LLM, asked: list[str], params: SamplingParams) -> int:
    """All requests at once on the engine's loop; nothing above it."""
    requests = [llm.front.prepare(text, params) for text in asked]
    left, count, done = len(requests), 0, threading.Event()

    def note(event: Event) -> None:
        nonlocal left, count
        count += len(event.token_ids)
        if event.finish_reason is not None:
            left -= 1
            if not left:
                done.set()

    for request in requests:
        llm.front.loop.submit(request, note)
    done.wait()
    return count


def with_text(llm: LLM, asked: list[str], params: SamplingParams) -> int:
    return sum(len(one.outputs[0].token_ids) for one in llm.generate(asked, params))


def through_http(given: argparse.Namespace, served: Served, load: Workload) -> Numbers:
    """The server's processes and the client each have CPU time of their own."""
    before = served.census()["cpu_s"]
    target = replace(served.target, chat=False)
    run = drive(target, load, Arrivals(num_prompts=given.streams))
    if failed := [one for one in run.outcomes if not one.is_ok]:
        raise SystemExit(f"{len(failed)} requests failed: {failed[0].error}: {failed[0].message}")
    tokens = sum(one.output_len for one in run.outcomes)
    return {
        "tokens": tokens,
        "tokens_per_s": tokens / run.duration_s,
        "cpu_us_per_token": 1e6 * (served.census()["cpu_s"] - before) / tokens,
        "client_cpu_us_per_token": 1e6 * run.cpu_s / tokens,
    }


def turns(given: argparse.Namespace, llm: LLM, served: Served, share: float) -> dict[str, list[Numbers]]:
    """One turn more than requested, because the first warms up."""
    found: dict[str, list[Numbers]] = {"engine": [], "text": [], "http": []}
    params = settings(given)
    for turn in range(given.repeats + 1):
        say(f"turn {turn} of {given.repeats}")
        # Each side has texts of its own in every turn, or the engine would find them in its cache.
        load = [texts(given, 3 * turn + i, share) for i in range(3)]
        engine = timed(lambda load=load: bare(llm, prompts(given, load[0]), params))
        text = timed(lambda load=load: with_text(llm, prompts(given, load[1]), params))
        http = through_http(given, served, load[2])
        if turn:
            for name, value in (("engine", engine), ("text", text), ("http", http)):
                found[name].append(value)
    return found


def middle(values: list[Numbers]) -> Numbers:
    return {name: round_number(median(one[name] for one in values)) for name in values[0]}


def main() -> None:
    arguments = parser(__doc__ or "")
    arguments.add_argument("--streams", type=int, default=64)
    arguments.add_argument("--tokens", type=int, default=64, help="new ones of each stream")
    arguments.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    arguments.add_argument("--repeats", type=int, default=3)
    given = parse(arguments)
    if not given.model:
        raise SystemExit("name a MODEL: the engine runs in this process too")
    width = ["--max-num-seqs", str(given.streams)]
    options: dict[str, Any] = parse_options(" ".join([*width, *given.options]))
    with LLM(given.model, **options) as llm, serving(given, width) as served:
        share = len(llm.front.prepare(" ".join(["the"] * 100), settings(given)).prompt_token_ids) / 100
        found = turns(given, llm, served, share)
    sides = {name: middle(values) for name, values in found.items()}
    result: dict[str, Any] = {"machine": machine.describe(), "streams": given.streams, "sides": sides}
    for name in ("text", "http"):
        pairs = list(zip(found[name], found["engine"], strict=True))
        result[f"{name}_over_engine"] = {
            "tokens_per_s": round_number(median(a["tokens_per_s"] / b["tokens_per_s"] for a, b in pairs)),
            "more_cpu_us_per_token": round_number(
                median(a["cpu_us_per_token"] - b["cpu_us_per_token"] for a, b in pairs)
            ),
        }
    show(result)


if __name__ == "__main__":
    main()
