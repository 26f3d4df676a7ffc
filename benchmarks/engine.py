"""What the engine costs and saves on this machine: JSON in benchmarks/results/, and tables.

python benchmarks/engine.py                                all measures on the demo models
python benchmarks/engine.py --measure scheduler --dry      one measure, no file
python benchmarks/engine.py --llama-cpp PYTHON             compared with llama-cpp-python
python benchmarks/engine.py --model NAME=FILE              one more model
python benchmarks/engine.py --draft smollm2=FILE           a draft model for one of them

scheduler    plans per second with 10, 100 and 1,000 running sequences, no model behind them
memory       bytes of state of one sequence by its length, for kinds of models
turns        time to the first token in ten turns of a chat, with and without the prefix cache
speculation  tokens per second of one stream: no drafts, prompt lookup, a draft model
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import engine_memory  # noqa: E402
import engine_scheduler  # noqa: E402
import engine_speculation  # noqa: E402
import engine_turns  # noqa: E402
from merge_results import merge_file  # noqa: E402
from run import MODELS  # noqa: E402

from plait.bench import machine  # noqa: E402

Rows = list[dict[str, Any]]


def models(given: argparse.Namespace) -> dict[str, Path]:
    """What is installed, and what was named."""
    found = {name: path for name, (_, find) in MODELS.items() if (path := find()) is not None}
    named = dict(text.split("=", 1) for text in given.model)
    chosen = {**found, **{name: Path(path) for name, path in named.items()}}
    return {name: path for name, path in chosen.items() if not given.only or name in given.only}


def measured(name: str, measure: Callable[[], Rows]) -> dict[str, Any]:
    """The rows of a measure, how long it took, and what others did meanwhile."""
    print(f"{name} …", file=sys.stderr, flush=True)
    began, others = time.perf_counter(), machine.Foreign([os.getpid()])
    rows = measure()
    return {"rows": rows, "seconds": round(time.perf_counter() - began, 1), "others_cpu": others.share()}


def show(name: str, rows: Rows, console: Console) -> None:
    """A table; what a row does not have stays empty."""
    if not rows:
        return
    table, keys = Table(title=name), list(dict.fromkeys(key for row in rows for key in row))
    for key in keys:
        table.add_column(key, justify="left" if isinstance(rows[0].get(key), str) else "right")
    for row in rows:
        table.add_row(*(_shown(row.get(key)) for key in keys))
    console.print(table)


def _shown(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = ("scheduler", "memory", "turns", "speculation")
    parser.add_argument("--measure", choices=kinds, action="append", help="this one; may be repeated")
    parser.add_argument("--only", action="append", help="this model; may be repeated")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=FILE", help="one more model")
    parser.add_argument(
        "--draft", action="append", default=[], metavar="NAME=FILE", help="what drafts for it"
    )
    parser.add_argument("--llama-cpp", metavar="PYTHON", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--threads", type=int, default=machine.cores())
    parser.add_argument("--repeats", type=int, default=3, help="turns that count, after one that does not")
    parser.add_argument("--small", action="store_true", help="a trial: fewer steps, shorter texts")
    parser.add_argument("--dry", action="store_true", help="write no file")
    given = parser.parse_args()
    given.measure = given.measure or list(kinds)
    return given


def main() -> None:
    given = arguments()
    repeats, small = given.repeats, given.small
    drafts = dict(text.split("=", 1) for text in given.draft)
    measures: dict[str, Callable[[], Rows]] = {
        "scheduler": lambda: engine_scheduler.rows(100 if small else 1000),
        "memory": lambda: engine_memory.rows(models(given)),
        "turns": lambda: engine_turns.rows(
            models(given), threads=given.threads, repeats=repeats, small=small, peer=given.llama_cpp
        ),
        "speculation": lambda: engine_speculation.rows(
            models(given), drafts, threads=given.threads, repeats=repeats, max_tokens=48 if small else 192
        ),
    }
    results, console = {}, Console(width=160)
    for name in given.measure:
        results[name] = measured(name, measures[name])
        show(name, results[name]["rows"], console)
    here = machine.describe()
    date = datetime.datetime.now(datetime.UTC).date().isoformat()
    if not given.dry:
        target = HERE / "results" / f"engine-{date}-{machine.slug(here)}.json"
        target.parent.mkdir(exist_ok=True)
        settings = {"threads": given.threads, "repeats": repeats, "small": small}
        found = {"date": date, "machine": here, "settings": settings, "results": results}
        target.write_text(json.dumps(found, indent=2) + "\n")
        is_part = small or given.only or len(given.measure) < len(measures)
        kept = target if is_part else merge_file(target)  # a part does not replace the whole
        print(f"\nwritten to {kept.relative_to(HERE.parent)}", file=sys.stderr)


if __name__ == "__main__":
    main()
