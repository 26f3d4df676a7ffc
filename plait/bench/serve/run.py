"""`plait bench serve`: one load on one or several servers, in turns, from one seed."""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any
from urllib.parse import urlsplit

from plait.bench import machine
from plait.bench.model.measure import round_number
from plait.bench.serve.client import RequestOutcome, ServerTarget
from plait.bench.serve.load_generator import Arrivals, Run, drive
from plait.bench.serve.score import details, score
from plait.bench.serve.server_process import ServerProcess, census, family, read
from plait.bench.serve.workload import WORDS, Workload
from plait.errors import ConfigError, EngineError

WARM_UP_SEED = 1 << 40  # so far from every --seed that no text is that of a measured turn
ASK_S = 60.0
Say = Callable[[str], None]
Facts = dict[str, Any]
LESS_IS_BETTER = "_ms"
RATES = ("request_throughput", "request_goodput", "output_throughput", "total_token_throughput")
TIMES = ("ttft", "tpot", "itl", "e2el")
RATIOS = (*RATES, *(f"{kind}_{name}_ms" for name in TIMES for kind in ("p50", "p90", "p95", "p99")))


@dataclass(frozen=True, slots=True)
class Started:
    """A server for this measurement only: `plait serve MODEL` with options of the command line."""

    name: str
    model: str
    options: Sequence[str] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeJob:
    """What is requested. Every side is a server that runs, or one to start."""

    sides: Sequence[ServerTarget | Started]
    target: ServerTarget  # how requests reach each of them; its address and model are the side's
    workload: Workload
    arrivals: Arrivals
    repeats: int = 1
    warm_up: int = 2
    limits: Mapping[str, float] = field(default_factory=dict)
    is_detailed: bool = False


@dataclass(slots=True)
class ServeSide:
    """A server that answers, and the numbers of its turns."""

    target: ServerTarget
    max_len: int | None
    process: ServerProcess | None = None
    turns: list[Facts] = field(default_factory=list)


def bench_serve(job: ServeJob, say: Say = lambda text: None) -> Facts:
    """Everything `plait bench serve` says, as plain values; `say` gets messages about progress.

    Turn t has the texts and moments of seed + t, the same on every side. Raises ConfigError, EngineError.
    """
    with ExitStack() as stack:
        sides = [_open(job, side, stack, say) for side in job.sides]
        workload = _measure_lengths(job.workload, sides)
        for side in sides:
            _warm_up(job, side, workload, say)
        for turn in range(job.repeats):
            for side in sides:
                shown = _show_progress(side.target.name, job, turn, say)
                side.turns.append(_one(job, side, replace(workload, seed=workload.seed + turn), shown))
        return {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine.describe(),
            "workload": {**workload.plain(), **_plain(job)},
            "sides": [_summary(side) for side in sides],
            "ratios": ratios(sides),
        }


def ratios(sides: Sequence[ServeSide]) -> dict[str, dict[str, float]]:
    """How many times better the first side is than each other: the median over turns; above 1 is better."""
    found: dict[str, dict[str, float]] = {}
    first = sides[0]
    for other in sides[1:]:
        mine = found.setdefault(other.target.name, {})
        for name in RATIOS:
            pairs = [(a[name], b[name]) for a, b in zip(first.turns, other.turns, strict=True)]
            good = [(b / a if name.endswith(LESS_IS_BETTER) else a / b) for a, b in pairs if a and b]
            if len(good) == len(pairs):
                mine[name] = round_number(median(good))
    return found


def reach(target: ServerTarget) -> tuple[ServerTarget, int | None]:
    """The target with the name of its model and an address without /v1, and its context if it says it.

    Raises ConfigError if no server answers there, or if it serves several models and none was named.
    """
    target = replace(target, base_url=target.base_url.rstrip("/").removesuffix("/v1"))
    listed = ask_json(target, "/v1/models").get("data") or []
    cards = {card["id"]: card for card in listed if isinstance(card, dict) and "id" in card}
    model = target.model or next(iter(cards), "")
    if not model:
        raise ConfigError(f"{target.base_url}/v1/models names no model; give one with --model")
    longest = cards.get(model, {}).get("max_model_len")
    return replace(target, model=model), longest if isinstance(longest, int) else None


def ask_json(target: ServerTarget, path: str, body: Mapping[str, object] | None = None) -> Facts:
    """GET, or POST of `body`, and its JSON object. Raises ConfigError with the server's reply."""
    url = target.base_url + path
    if urlsplit(url).scheme not in ("http", "https"):
        raise ConfigError(f"--base-url {target.base_url}: it must begin with http:// or https://")
    raw = None if body is None else json.dumps(body).encode()
    try:
        status, said = read(url, raw, {**target.headers, "Content-Type": "application/json"}, ASK_S)
        if status >= 300:
            raise ConfigError(f"{url} answers {status}: {' '.join(said.split())[:500]}")
        found = json.loads(said)
    except ValueError as error:
        why = said if status == 0 else error
        raise ConfigError(f"{url}: {why}; is it the address of an OpenAI server?") from error
    return found if isinstance(found, dict) else {}


def tokens_per_word(target: ServerTarget) -> float | None:
    """Of our words in the server's vocabulary; None where it has no /tokenize."""
    text = " ".join([*WORDS, *WORDS])
    asked = {"model": target.model, "prompt": text, "add_special_tokens": False}
    try:
        count = ask_json(target, "/tokenize", asked).get("count")
    except ConfigError:
        return None
    return count / (2 * len(WORDS)) if isinstance(count, int) and count > 0 else None


def _open(job: ServeJob, side: ServerTarget | Started, stack: ExitStack, say: Say) -> ServeSide:
    process = None
    if isinstance(side, Started):
        say(f"{side.name}: the server starts")
        process = stack.enter_context(ServerProcess(side.model, side.options, say))
        side = replace(job.target, name=side.name, base_url=process.base_url, model="")
    target, max_len = reach(side)
    return ServeSide(target, max_len, process)


def _measure_lengths(workload: Workload, sides: Sequence[ServeSide]) -> Workload:
    """The load in numbers: lengths in tokens of the first server, and within every server's context."""
    known = [n for n in (workload.max_len, *(side.max_len for side in sides)) if n is not None]
    share = tokens_per_word(sides[0].target) or workload.tokens_per_word
    measured = replace(workload, max_len=min(known, default=None), tokens_per_word=share)
    measured.chat(0)  # raises for a load that cannot be sent, before anything is
    return measured


def _warm_up(job: ServeJob, side: ServeSide, workload: Workload, say: Say) -> None:
    """Some requests that do not count. Raises EngineError if all of them fail: the load means nothing."""
    if not job.warm_up:
        return
    say(f"{side.target.name}: warming up")
    first = replace(workload, seed=workload.seed + WARM_UP_SEED, cancel_rate=0.0, turns=1)
    run = drive(side.target, first, Arrivals(num_prompts=job.warm_up, concurrency=job.warm_up))
    if not any(one.is_ok for one in run.outcomes):
        one = run.outcomes[0]
        raise EngineError(f"{side.target.name}: no warm-up request succeeded; {one.error}: {one.message}")


def _one(
    job: ServeJob, side: ServeSide, workload: Workload, on_done: Callable[[RequestOutcome], None]
) -> Facts:
    pids = [side.process.pid] if side.process else []
    everyone = [one for pid in pids for one in family(pid)]
    foreign, before = machine.Foreign([os.getpid(), *everyone]), _census(side)
    run: Run = drive(side.target, workload, job.arrivals, on_done)
    facts = score(run.outcomes, run.duration_s, job.limits) | {"client": run.client()}
    if pids:
        facts["foreign_cpu"] = foreign.share()
        after = _census(side)
        after["cpu_s_of_turn"] = round_number(after["cpu_s"] - before["cpu_s"])
        facts["server"] = after
    return facts | (details(run.outcomes) if job.is_detailed else {})


def _census(side: ServeSide) -> Facts:
    return census(side.process.pid) if side.process else {}


def _summary(side: ServeSide) -> Facts:
    """The side's numbers: those of its only turn, else medians over turns, with the turns themselves."""
    target = side.target
    facts: Facts = {
        "name": target.name,
        "backend": "openai-chat" if target.chat else "openai",
        "base_url": target.base_url,
        "model_id": target.model,
        "max_model_len": side.max_len,
        "startup_s": round_number(side.process.startup_s) if side.process else None,
    }
    if len(side.turns) == 1:
        return facts | side.turns[0]
    return facts | medians(side.turns) | {"turns": side.turns}


def medians(turns: Sequence[Facts]) -> Facts:
    """The median of every number that all turns have; counts of errors are added up."""
    found: Facts = {"errors": {}, "error_examples": {}}
    for name, value in turns[0].items():
        values = [turn[name] for turn in turns]
        if isinstance(value, int | float) and all(one is not None for one in values):
            found[name] = round_number(median(values))
        elif value is None:
            found[name] = None
    for turn in turns:
        for kind, count in turn["errors"].items():
            found["errors"][kind] = found["errors"].get(kind, 0) + count
        found["error_examples"] = turn["error_examples"] | found["error_examples"]
    found["client"] = max((turn["client"] for turn in turns), key=lambda one: float(one["lag_p99_ms"]))
    return found


def _plain(job: ServeJob) -> Facts:
    arrivals, rate = job.arrivals, job.arrivals.rate
    return {
        "num_prompts": arrivals.num_prompts,
        "duration_s": arrivals.duration_s,
        "request_rate": "inf" if math.isinf(rate) else rate,
        "burstiness": arrivals.burstiness,
        "burst": arrivals.burst,
        "max_concurrency": arrivals.concurrency,
        "stream": job.target.stream,
        "ignore_eos": job.target.ignore_eos,
        "temperature": job.target.temperature,
        "warm_up": job.warm_up,
        "repeats": job.repeats,
    }


def _show_progress(name: str, job: ServeJob, turn: int, say: Say) -> Callable[[RequestOutcome], None]:
    """A function that shows a bar, the rate and the errors so far, some times a second."""
    done = failed = tokens = 0
    began, next_at = time.monotonic(), 0.0
    total = job.arrivals.num_prompts

    def show(one: RequestOutcome) -> None:
        nonlocal done, failed, tokens, next_at
        done, failed, tokens = done + 1, failed + bool(one.error), tokens + one.output_len
        now = time.monotonic()
        if now < next_at:
            return
        next_at, passed = now + 0.2, max(now - began, 1e-9)
        part = done / total if total else passed / (job.arrivals.duration_s or passed)
        bar = "█" * min(20, int(20 * part))
        errors = f", {failed} errors" if failed else ""
        at = f"{name}, turn {turn + 1} of {job.repeats}" if job.repeats > 1 else name
        say(f"{at} [{bar:<20}] {done} requests, {tokens / passed:.0f} tok/s{errors}")

    return show
