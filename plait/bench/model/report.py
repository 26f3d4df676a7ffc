"""Results for a reader: tables in a terminal, or an HTML page of bars in SVG, which loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from plait.errors import ConfigError

Facts = Mapping[str, Any]
OURS = "plait"
COLOURS = ("#2f6f8f", "#c2703d", "#6b8e4e", "#8a5a83", "#b09a3c", "#5f6b76")
BAR, GAP, LEFT, WIDTH = 16, 5, 190, 460  # of a chart, in pixels
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 920px; margin: 2em auto; padding: 0 1em;
  color: #222; }
h1 { font-size: 1.3em; overflow-wrap: anywhere; } h2 { font-size: 1.05em; margin: 1.6em 0 .4em; }
svg { display: block; max-width: 100%; height: auto; } svg text { font: 12px system-ui, sans-serif; }
small, p { color: #555; } .key { display: inline-block; width: 11px; height: 11px; margin: 0 .35em 0 1em; }
@media (prefers-color-scheme: dark) {
  body { background: #181a1b; color: #ddd; } small, p { color: #aaa; } svg text { fill: #ddd; }
}
"""
HEADINGS = {
    "decode": "Decode, one sequence",
    "batch": "Decode, several sequences",
    "requests": "Requests at once, prompts included",
    "prefill": "Prefill",
    "ttft": "Time to the first token (shorter is better)",
}


def number(value: float | None) -> str:
    """Four digits at most: 1234, 123.4, 12.34, 0.1234."""
    if value is None:
        return "–"
    size = abs(value)
    return f"{value:,.0f}" if size >= 1000 else f"{value:.1f}" if size >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.0f} %"


def model_report(result: Facts, console: Console) -> None:
    """Everything of `plait bench model`, best first for the eye."""
    console.print(f"[bold]{result['model']['path']}[/]", highlight=False, soft_wrap=True)
    for line in summary(result):
        console.print(f"  {line}", highlight=False, soft_wrap=True)
    console.print()
    console.print(rows_table(result))
    console.print()
    console.print(sides_table(result))
    for line in [*notes(result), *texts(result)]:
        console.print(line, highlight=False, soft_wrap=True, markup=False)


def summary(result: Facts) -> Iterator[str]:
    machine, probe, model = result["machine"], result["probe"], result["model"]
    mega = model["read_per_token"] / 1e6
    formats = " + ".join(f"{nbytes / 1e6:.1f} MB {name}" for name, nbytes in model["formats"].items())
    yield f"{machine['cpu']}, {machine['cores']} CPUs, {result['threads']} threads; {machine['commit']}"
    yield f"{formats}; {mega:.1f} MB of weights are read per token"
    best = probe["all_threads_gb_s"]
    per_second = number(best * 1e9 / model["read_per_token"])
    what = f"passes/s, each over {model['canvas']} tokens" if model["canvas"] else "tok/s for one sequence"
    roof = f"at most {per_second} {what}"
    yield (
        f"reading {probe['nbytes'] / 1e6:.0f} MB: {probe['one_thread_gb_s']} GB/s with one thread, {best} "
        f"with all: {roof}"
    )
    checks, of = result["checks"], f"of {result['checks']['tokens']} greedy tokens"
    yield (
        f"checked: {checks['batch_size']} requests at once write what each writes alone for "
        f"{checks['batch_equals_single_for']} {of}; the reference ops write the same for "
        f"{checks['equals_reference_for']}" + ("" if model["canvas"] else describe_gap(checks))
    )


def describe_gap(checks: Facts) -> str:
    return (
        f", and find none of the first {checks['wanted']} further than {checks['largest_gap']:.2g} "
        "(in logits) below their own choice"
    )


def rows_table(result: Facts) -> Table:
    """One row a measure, one column a side; the share of the roof is of the bandwidth measured with it."""
    names = list(result["sides"])
    table = Table(pad_edge=False, box=None, header_style="bold")
    table.add_column("measure")
    table.add_column("level")
    for name in names:
        table.add_column(name, justify="right")
    table.add_column("of roof", justify="right")
    for name in names[1:]:
        table.add_column(f"× {name}", justify="right")
    table.add_column("GB/s meanwhile", justify="right")
    table.add_column("others' CPU", justify="right")
    for row in result["rows"]:
        table.add_row(*row_cells(row, names))
    return table


def row_cells(row: Facts, names: Sequence[str]) -> list[str]:
    sides = row["sides"]
    values = [
        f"{number(sides[n]['median'])} {row['unit']}" if n in sides else row["cannot"].get(n, "–")[:28]
        for n in names
    ]
    share = percent(sides.get(OURS, {}).get("roof_share"))
    ratios = [number(row["ratios"].get(name)) for name in names[1:]]
    meanwhile = [number(row["probe_gb_s"]), percent(row["foreign_cpu"])]
    return [row["title"], row["level"], *values, share, *ratios, *meanwhile]


def sides_table(result: Facts) -> Table:
    table = Table(pad_edge=False, box=None, header_style="bold")
    for title in ("side", "engine", "version", "threads", "start-up s", "loaded MiB", "peak MiB"):
        table.add_column(title, justify="left" if title in ("side", "engine", "version") else "right")
    for name, side in result["sides"].items():
        columns = [side.get(key) for key in ("engine", "version", "threads")]
        costs = [number(side.get(key)) for key in ("startup_s", "loaded_mib", "peak_mib")]
        table.add_row(name, *(str(c) if c is not None else "–" for c in columns), *costs)
    return table


def notes(result: Facts) -> Iterator[str]:
    """Why a side has no number, once for each reason; and which Plait was started without a startup image.

    Of models that fill canvases how many tokens each pass wrote.
    """
    for name, side in result["sides"].items():
        if per_pass := side.get("tokens_per_pass"):
            yield f"{name}: a pass of a decode wrote {per_pass:g} tokens"
        if side.get("startup_image", "used") != "used":
            yield f"{name}: start-up and memory are without a startup image: {side['startup_image']}"
    reasons = {f"{name}: {why}" for row in result["rows"] for name, why in row["cannot"].items()}
    yield from sorted(reasons)


def texts(result: Facts) -> Iterator[str]:
    """What every side writes to the same prompt, and for how long it is what we write."""
    for name, side in result["sides"].items():
        written = side["greedy"]
        if written is None:
            continue
        same = written["agrees_with_ours_for"]
        agree = "" if name == OURS else f" (ours for the first {same} of {written['tokens']} tokens)"
        yield f"{name} writes{agree}: {' '.join(written['text'].split())}"


def ops_report(result: Facts, console: Console) -> None:
    """Everything of `plait bench op`."""
    machine, roofs = result["machine"], result["roofs"]
    console.print(
        f"{machine['cpu']}, {result['threads']} threads; roofs: {roofs['gb_s']} GB/s read from memory, "
        f"{roofs['cache_gb_s']} from cache, {roofs['tflop_s']} TFLOP/s in float32 (torch)",
        highlight=False,
        soft_wrap=True,
    )
    table = Table(pad_edge=False, box=None, header_style="bold")
    for title in ("op", "case", "dtype", "variant", "time", "rate", "of roof", "× reference", "error"):
        left = title in ("op", "case", "dtype", "variant")
        table.add_column(title, justify="left" if left else "right", overflow="fold")
    for row in result["rows"]:
        table.add_row(*op_cells(row))
    console.print(table)


def op_cells(row: Facts) -> list[str]:
    if row["refusal"]:
        return [row["op"], row["case"], row["dtype"], row["variant"], row["refusal"], "", "", "", ""]
    rate = f"{number(row['rate'])} {row['rate_unit']}" if row["rate"] else ""
    share = percent(row["roof_share"]) if row["roof_share"] else ""
    speedup = number(row["speedup"]) if row["speedup"] else ""
    error = f"{row['error']:.1g}" if row["error"] is not None else ""
    return [
        *(row["op"], row["case"], row["dtype"], row["variant"]),
        *(duration(row["seconds"]), rate, share, speedup, error),
    ]


def duration(seconds: float) -> str:
    return f"{number(1e6 * seconds)} µs" if seconds < 1e-2 else f"{number(1e3 * seconds)} ms"


def write_plot(result: Facts, path: Path) -> None:
    """Write the page. Raises ConfigError if the place cannot be written to."""
    try:
        path.write_text(page(result), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--plot {path}: it cannot be written: {error.strerror or error}") from error


def page(result: Facts) -> str:
    """The whole HTML text."""
    title = Path(str(result["model"]["path"])).name
    head = '<!doctype html><html lang="en"><head><meta charset="utf-8">'
    head += f"<title>{escape(title)}: plait bench</title>"
    lines = "<br>".join(escape(line) for line in summary(result))
    body = "\n".join(section(result, kind, heading) for kind, heading in HEADINGS.items())
    written = "".join(f"<p><small>{escape(line)}</small></p>" for line in texts(result))
    return (
        f"{head}<style>{STYLE}</style></head><body><h1>{escape(title)}</h1>"
        f"<p>{lines}<br>{escape(result['date'])}</p><p>{legend(list(result['sides']))}</p>\n"
        f"{body}\n<h2>What each side writes</h2>{written}</body></html>\n"
    )


def legend(names: Sequence[str]) -> str:
    return "".join(
        f'<span class="key" style="background:{colour(i)}"></span>{escape(name)}'
        for i, name in enumerate(names)
    )


def colour(i: int) -> str:
    return COLOURS[i % len(COLOURS)]


def section(result: Facts, kind: str, heading: str) -> str:
    """One chart for the measures of one kind, nothing if there are none."""
    rows = [row for row in result["rows"] if row["measure"] == kind and row["sides"]]
    return f"<h2>{escape(heading)}</h2>\n{chart(rows, list(result['sides']))}" if rows else ""


def chart(rows: Sequence[Facts], names: Sequence[str]) -> str:
    """Horizontal bars, grouped by measure, all on one scale."""
    most = max(side["median"] for row in rows for side in row["sides"].values()) or 1.0
    parts, y = [], 0
    for row in rows:
        label = f"{row['title']} ({row['level']})"
        parts.append(f'<text x="0" y="{y + 12}" fill="currentColor">{escape(label)}</text>')
        y += 18
        for text, width, fill in bars(row, names, most):
            parts.append(f'<rect x="0" y="{y}" width="{width:.1f}" height="{BAR - 3}" fill="{fill}"/>')
            parts.append(f'<text x="{width + 6:.1f}" y="{y + 11}" fill="currentColor">{escape(text)}</text>')
            y += BAR
        y += GAP
    size = f'viewBox="0 0 {LEFT + WIDTH} {y}" width="{LEFT + WIDTH}" height="{y}"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>{"".join(parts)}</svg>'


def bars(row: Facts, names: Sequence[str], most: float) -> Iterator[tuple[str, float, str]]:
    """(its label, width, colour) of every side that has a number."""
    for i, name in enumerate(names):
        side = row["sides"].get(name)
        if side is None:
            continue
        text = f"{number(side['median'])} {row['unit']}"
        if "roof_share" in side:
            text += f", {percent(side['roof_share'])} of the roof"
        if name in row["ratios"]:
            text += f" (ours is {number(row['ratios'][name])} times as fast)"
        yield text, WIDTH * side["median"] / most, colour(i)
