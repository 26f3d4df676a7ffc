"""`plait bench serve`: a load on a server that runs, or on one that is started for it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from plait.cli.common.options import (
    Decorator,
    common_options,
    engine_options,
    engine_settings,
    find_changes,
    json_option,
    options,
    parse_options,
    write_json,
)
from plait.cli.common.progress import Status, console
from plait.cli.common.unread_flags import refuse_unread
from plait.config import EngineConfig, option_names
from plait.errors import ConfigError

if TYPE_CHECKING:
    from plait.bench.serve.client import ServerTarget
    from plait.bench.serve.run import ServeJob, Started
    from plait.bench.serve.workload import Workload

SIZE, COUNT = click.IntRange(1), click.IntRange(0)
CHATS = click.Path(path_type=Path, dir_okay=False)


def _option(
    names: str, kind: type | click.ParamType[Any], text: str, default: object = None, **more: object
) -> Decorator:
    """An option; its default is shown where it has one."""
    shown: dict[str, Any] = {"default": default, "show_default": default not in (None, math.inf), **more}
    return click.option(*names.split(), type=kind, help=text, **shown)


WHO = options(
    [
        click.option(
            "--base-url",
            "base_urls",
            multiple=True,
            metavar="URL",
            help="an OpenAI server that runs, with or without /v1; several are measured in turns",
        ),
        click.option(
            "--compare",
            multiple=True,
            metavar="OPTIONS",
            help='compare MODEL, in turns, with another server of it with these options, like "--threads 1"',
        ),
        click.option("--model", metavar="NAME", help="the model's name there [default: the first it lists]"),
        click.option("--api-key", help="sent as a bearer token"),
    ]
)
LOAD = options(
    [
        _option("--num-prompts", SIZE, "requests [default: 100, or till --duration-s]"),
        _option("--duration-s", float, "begin no request after so many seconds"),
        _option("--request-rate", float, "a second, Poisson [default: all at once]", math.inf),
        _option("--burstiness", float, "below 1: heaps; above 1: more even", 1.0),
        _option("--burst", SIZE, "so many come at the same moment", 1),
        _option(
            "--concurrency --max-concurrency",
            SIZE,
            "the most at once; without a rate, one begins when another ends",
        ),
        _option("--repeats", SIZE, "turns; numbers are medians", 1),
        _option("--warm-up", COUNT, "requests that do not count", 2),
    ]
)
TEXTS = options(
    [
        _option("--input-len", str, "tokens: 128, 16-512 or sharegpt", "128", metavar="LEN"),
        _option(
            "--output-len",
            str,
            "tokens: 64, 16-512 or sharegpt [default: 64, or the dataset's]",
            metavar="LEN",
        ),
        _option(
            "--dataset",
            CHATS,
            "chats as JSON lines or a list, in ShareGPT's or OpenAI's form, instead of made texts",
        ),
        _option("--prefix-share", float, "part of a text its group shares", 0.0),
        _option("--prefix-groups", int, "groups of shared prefixes", 1),
        _option("--turns", int, "requests of one chat, each with all before it", 1),
        _option("--cancel-rate", float, "part of the clients that leave early", 0.0),
        _option("--max-len", int, "the context to stay within [default: what the server says]"),
        _option("--seed", int, "of texts, lengths, moments and cancels", 0),
    ]
)
ASKED = options(
    [
        _option("--endpoint", click.Choice(("chat", "completions")), "where requests go", "chat"),
        _option("--stream/--no-stream", bool, "whole replies have only an end to time", True),
        _option("--ignore-eos/--stop-at-eos", bool, "write all tokens that are requested", True),
        _option("--temperature", float, "of every request", 0.0),
        _option("--extra-body", str, "fields to add to every request", metavar="JSON"),
        _option("--timeout-s", float, "of one request", 600.0),
        click.option(
            "--goodput",
            multiple=True,
            metavar="NAME:MS",
            help='count requests within limits: ttft:500, tpot:50, e2el:9000; "ttft:500 tpot:50" for both',
        ),
    ]
)


@click.command()
@click.argument("model_path", metavar="[MODEL]", required=False)
@WHO
@LOAD
@TEXTS
@ASKED
@json_option()
@click.option("--detailed", is_flag=True, help="in the JSON: also every request")
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="also a page (.html) or a .png")
@engine_options()
@common_options()
def serve(as_json: bool, plot: Path | None, **given: object) -> None:
    """Latencies, throughput and goodput of a server under load, and what it refused.

    \b
    plait bench serve model.gguf --concurrency 16
    plait bench serve model.gguf --compare "--speculate ngram" --turns 5 --input-len 64
    plait bench serve --base-url http://host:8080 --request-rate 4 --input-len sharegpt --output-len sharegpt
    plait bench serve --base-url http://a:8080 --base-url http://b:8000 --goodput "ttft:500 tpot:50"

    MODEL starts `plait serve` with the engine's options; otherwise name servers. Texts, lengths, moments and
    cancels depend on --seed alone; turn t has those of seed + t, the same on all sides. Lengths are in tokens
    of the first server, about. Names in the JSON are those of `vllm bench serve` where it has one.
    """
    from plait.bench.serve.report import serve_report, write_serve_plot
    from plait.bench.serve.run import bench_serve

    has_rate = given["request_rate"] != math.inf
    refuse_unread(
        (
            bool(given["base_urls"]),
            ("cpu", *option_names(EngineConfig)),
            "--base-url names a server that runs",
        ),
        (not has_rate, ("burst", "burstiness"), "without --request-rate all requests come at once"),
        (bool(given["dataset"]), ("input_len", "prefix_share", "prefix_groups"), "--dataset has the texts"),
        (not given["prefix_share"], ("prefix_groups",), "no text is shared without --prefix-share"),
    )
    with Status("measuring") as status:
        result = bench_serve(_job(given), status.say)
    if plot is not None:
        write_serve_plot(result, plot)
    if as_json:
        write_json(result)
    else:
        serve_report(result, console())


def _job(given: dict[str, Any]) -> ServeJob:
    from plait.bench.serve.load_generator import Arrivals
    from plait.bench.serve.run import ServeJob
    from plait.bench.serve.score import parse_goodput

    target = _target(given)
    if bool(given["model_path"]) == bool(given["base_urls"]):
        raise ConfigError("name either a MODEL to serve, or servers that run with --base-url")
    if given["compare"] and not given["model_path"]:
        raise ConfigError("--compare starts another server of MODEL; with --base-url give another --base-url")
    number = given["num_prompts"]
    return ServeJob(
        sides=_started_servers(given) if given["model_path"] else _running(given["base_urls"], target),
        target=target,
        workload=_workload(given),
        arrivals=Arrivals(
            rate=given["request_rate"],
            concurrency=given["concurrency"],
            burst=given["burst"],
            burstiness=given["burstiness"],
            num_prompts=100 if number is None and given["duration_s"] is None else number,
            duration_s=given["duration_s"],
        ),
        repeats=given["repeats"],
        warm_up=given["warm_up"],
        limits=parse_goodput(given["goodput"]),
        is_detailed=given["detailed"],
    )


def _workload(given: dict[str, Any]) -> Workload:
    from plait.bench.serve.workload import Workload, parse_length, read_records

    records = read_records(given["dataset"]) if given["dataset"] else None
    wanted = given["output_len"] or (None if records else "64")
    same = ("seed", "prefix_share", "prefix_groups", "turns", "cancel_rate", "max_len")
    return Workload(
        input_len=parse_length(given["input_len"]),
        output_len=parse_length(wanted) if wanted else None,
        records=records,
        **{name: given[name] for name in same},
    )


def _target(given: dict[str, Any]) -> ServerTarget:
    from plait.bench.serve.client import ServerTarget

    try:
        extra = json.loads(given["extra_body"] or "{}")
    except ValueError as error:
        raise ConfigError(f"--extra-body: it is not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise ConfigError("--extra-body: it must be a JSON object")
    return ServerTarget(
        name="",
        base_url="",
        model=given["model"] or "",
        api_key=given["api_key"] or "",
        chat=given["endpoint"] == "chat",
        stream=given["stream"],
        ignore_eos=given["ignore_eos"],
        temperature=given["temperature"],
        timeout_s=given["timeout_s"],
        extra=extra,
    )


def _running(urls: Sequence[str], target: ServerTarget) -> list[ServerTarget]:
    from dataclasses import replace

    names = _unique([url.removeprefix("http://").removesuffix("/").removesuffix("/v1") for url in urls])
    return [replace(target, name=name, base_url=url) for name, url in zip(names, urls, strict=True)]


def _started_servers(given: dict[str, Any]) -> list[Started]:
    from plait.bench.serve.run import Started
    from plait.bench.serve.server_process import flags

    settings = find_changes(engine_settings(given))
    words = [("plait", settings)] + [(text, settings | parse_options(text)) for text in given["compare"]]
    names = _unique([name for name, _ in words])
    return [
        Started(name, given["model_path"], flags(found))
        for name, (_, found) in zip(names, words, strict=True)
    ]


def _unique(names: Sequence[str]) -> list[str]:
    """The same name twice gets a number."""
    seen: Counter[str] = Counter()
    found = []
    for name in names:
        seen[name] += 1
        found.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return found
