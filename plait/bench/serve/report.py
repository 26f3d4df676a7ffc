"""Results of `plait bench serve` for a reader: tables in a terminal, and an HTML page or a PNG with bars."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from importlib import import_module
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plait.bench.model.report import STYLE, chart, colour, legend, number, percent
from plait.errors import ConfigError

Facts = Mapping[str, Any]
RATES = {
    "request_throughput": ("requests", "req/s"),
    "request_goodput": ("goodput", "req/s"),
    "output_throughput": ("tokens out", "tok/s"),
    "input_throughput": ("tokens in", "tok/s"),
}
LATENCIES = {
    "ttft": "time to the first token",
    "itl": "gap between tokens",
    "tpot": "mean gap of a reply",
    "e2el": "whole reply",
}
SHOWN = ("p50", "p90", "p95", "p99")


def serve_report(result: Facts, console: Console) -> None:
    """Everything of `plait bench serve`."""
    for line in headline(result):
        console.print(line, highlight=False, soft_wrap=True, markup=False)
    console.print()
    console.print(numbers_table(result))
    for line in remarks(result):
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def headline(result: Facts) -> Iterator[str]:
    """The load, the servers and the machine, in a few lines."""
    machine, load = result["machine"], result["workload"]
    yield f"{machine['cpu']}, {machine['cores']} CPUs; {machine['commit']}; {result['date']}"
    size = f"{load['num_prompts']} requests" if load["num_prompts"] else f"{load['duration_s']:g} s"
    most = f", at most {load['max_concurrency']} at once" if load["max_concurrency"] else ""
    heaps = f", {load['burst']} at a time" if load["burst"] > 1 else ""
    yield (
        f"{size}, {load['request_rate']} a second{heaps}{most}; {load['input_len']} tokens in, "
        f"{load['output_len']} out; {load['turns']} to a chat; seed {load['seed']}"
    )
    yield (
        f"{percent(load['prefix_share'])} of each text shared in {load['prefix_groups']} groups; "
        f"{percent(load['cancel_rate'])} of the clients leave early; measured {load['repeats']} times"
    )


def numbers_table(result: Facts) -> Table:
    """One row a number, one column a side, and how many times better the first side is."""
    sides, table = result["sides"], Table(pad_edge=False, box=None, header_style="bold")
    table.add_column("")
    for side in sides:
        table.add_column(side["name"], justify="right")
    for name in result["ratios"]:
        table.add_column(f"× {name}", justify="right")
    for title, key, unit in rows(result):
        cells = [f"{number(side.get(key))} {unit}" if side.get(key) is not None else "–" for side in sides]
        table.add_row(title, *cells, *(number(r[key]) if key in r else "" for r in result["ratios"].values()))
    return table


def rows(result: Facts) -> Iterator[tuple[str, str, str]]:
    """(title, name in the JSON, unit) of every number worth a row."""
    yield from (("completed", "completed", ""), ("failed", "failed", ""), ("cancelled", "cancelled", ""))
    for key, (title, unit) in RATES.items():
        if any(side.get(key) is not None for side in result["sides"]):
            yield title, key, unit
    yield "cached tokens, of those in", "cached_token_rate", ""
    for key, title in LATENCIES.items():
        for kind in SHOWN:
            yield f"{title}, {kind}", f"{kind}_{key}_ms", "ms"
    if any(side["refused"] for side in result["sides"]):
        for kind in ("p50", "p99"):
            yield f"refusal, {kind}", f"{kind}_refusal_ms", "ms"


def remarks(result: Facts) -> Iterator[str]:
    """Errors by kind, the server's memory, and when the client was what was measured."""
    for side in result["sides"]:
        for kind, count in side["errors"].items():
            yield f"{side['name']}: {count} × {kind}: {side['error_examples'].get(kind, '')}"
        for turn in side.get("turns", [side]):
            if server := turn.get("server"):
                yield (
                    f"{side['name']}: {server['rss_mib']} MiB, {server['threads']} threads, "
                    f"{number(server['cpu_s_of_turn'])} s of CPU time in {number(turn['duration'])} s; "
                    f"processes of others took {percent(turn['foreign_cpu'])} of all CPU time"
                )
        client = side["client"]
        text = (
            f"client: {percent(client['cpu_share'])} of a CPU, {number(client['cpu_us_per_event'])} µs a "
            f"token; late by {number(client['lag_p50_ms'])} ms (p99 {number(client['lag_p99_ms'])})"
        )
        if client["is_bottleneck"]:
            text += ". That is much: these latencies may be the client's own, or of a busy machine"
        yield f"{side['name']}: {text}"


def bars_of(result: Facts, key: str, title: str, unit: str) -> Facts:
    """One number of every side, as `plot.chart` has its rows."""
    sides = {s["name"]: {"median": s[key]} for s in result["sides"] if s.get(key) is not None}
    better = [f"{number(found[key])} × {name}" for name, found in result["ratios"].items() if key in found]
    level = "; ".join([key, *better])
    return {"title": title, "level": level, "unit": unit, "sides": sides, "ratios": {}}


def sections(result: Facts) -> Iterator[tuple[str, list[Facts]]]:
    """(heading, rows) of the charts; what has no number is left out."""
    rates = [bars_of(result, key, title, unit) for key, (title, unit) in RATES.items()]
    for row in rates:
        if row["sides"]:
            yield f"{row['title']}, {row['unit']}", [row]
    for key, title in LATENCIES.items():
        found = [bars_of(result, f"{kind}_{key}_ms", kind, "ms") for kind in SHOWN]
        if any(row["sides"] for row in found):
            yield f"{title}, ms (shorter is better)", found


def serve_page(result: Facts) -> str:
    """The HTML text; nothing is loaded from elsewhere, nothing runs."""
    names = [side["name"] for side in result["sides"]]
    title = " and ".join(dict.fromkeys(side["model_id"] for side in result["sides"]))
    lines = "<br>".join(map(escape, [*headline(result), *remarks(result)]))
    charts = "\n".join(f"<h2>{escape(head)}</h2>\n{chart(found, names)}" for head, found in sections(result))
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f"<title>{escape(title)}: plait bench serve</title><style>{STYLE}</style></head>"
        f"<body><h1>{escape(title)}</h1><p>{lines}</p><p>{legend(names)}</p>\n{charts}</body></html>\n"
    )


def write_serve_plot(result: Facts, path: Path) -> None:
    """Write the page, or a picture for a name that ends in .png. Raises ConfigError."""
    try:
        if path.suffix.lower() == ".png":
            _write_png(result, path)
        else:
            path.write_text(serve_page(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: it cannot be written: {error.strerror or error}") from error


def _write_png(result: Facts, path: Path) -> None:
    try:
        figures = import_module("matplotlib.figure")
    except ImportError as error:
        raise ConfigError(
            f"--plot {path}: a PNG needs matplotlib; pip install 'plait-engine[bench]', or name an .html file"
        ) from error
    found = list(sections(result))
    figure = figures.Figure(figsize=(9, 2.2 * len(found)), layout="constrained")
    names = [side["name"] for side in result["sides"]]
    for axes, (head, shown) in zip(figure.subplots(len(found), squeeze=False)[:, 0], found, strict=True):
        _draw(axes, shown, names)
        axes.set_title(head, fontsize=10, loc="left")
        axes.legend(fontsize=8)
    figure.savefig(path, dpi=120)


def _draw(axes: Any, shown: Sequence[Facts], names: Sequence[str]) -> None:
    height = 0.8 / len(names)
    for i, name in enumerate(names):
        values = [row["sides"].get(name, {}).get("median", 0.0) for row in shown]
        places = [at + i * height for at in range(len(shown))]
        axes.barh(places, values, height, color=colour(i), label=name)
    middle = 0.4 - height / 2
    axes.set_yticks([at + middle for at in range(len(shown))], [row["title"] for row in shown])
    axes.invert_yaxis()
