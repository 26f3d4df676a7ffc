"""Results for a reader: tables in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

Facts = Mapping[str, Any]
OURS = "plait"


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
    roof = f"at most {number(best * 1e9 / model['read_per_token'])} tok/s for one sequence"
    yield (
        f"reading {probe['nbytes'] / 1e6:.0f} MB: {probe['one_thread_gb_s']} GB/s with one thread, {best} "
        f"with all: {roof}"
    )
    checks, of = result["checks"], f"of {result['checks']['tokens']} greedy tokens"
    yield (
        f"checked: {checks['batch_size']} requests at once write what each writes alone for "
        f"{checks['batch_equals_single_for']} {of}; the reference ops write the same for "
        f"{checks['equals_reference_for']}, and find none of the first {checks['wanted']} further than "
        f"{checks['largest_gap']:.2g} (in logits) below their own choice"
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
    table.add_column("GB/s beside", justify="right")
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
    beside = [number(row["probe_gb_s"]), percent(row["foreign_cpu"])]
    return [row["title"], row["level"], *values, share, *ratios, *beside]


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
    """Why a side has no number, once for each reason."""
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
