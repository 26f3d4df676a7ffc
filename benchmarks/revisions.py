"""Whether this tree is slower than another: every row of `plait bench model` in pairs, by wall and CPU time.

python benchmarks/revisions.py MODEL [MODEL ...] --before REVISION|FOLDER [--minutes 8] [--limit 1.02]
python benchmarks/revisions.py MODEL [MODEL ...] --before REVISION|FOLDER --warm     compile, no numbers

Both sides are loaded once for each model and measure in turns, A B, B A, …; a pair is two turns next to each
other with the same prompt. A row's ratios are medians over its pairs, of seconds and of processor seconds of
all threads: above 1 this tree is slower. It counts as slower if both are above the limit, and three quarters
of the pairs are slower, so that an hour with neighbours does not fail it. Exit code 1: some row is slower.
--only TEXT: rows with this in their titles. --cache-dirs: a folder for each side, instead of one for both.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from plait.bench.model.compare import SIDES, SOURCE, Side, check_out, find_commit  # noqa: E402
from plait.bench.model.measure import SETTLE_S, Measure, MeasureSizes, Prompts, one  # noqa: E402
from plait.bench.model.memory import footprint  # noqa: E402

LEAST_PAIRS = 3
MOST_PAIRS = 41


@dataclass(slots=True)
class Pairs:
    """(before, after) of one row: seconds, and seconds of processors."""

    model: str
    title: str
    wall: list[tuple[float, float]] = field(default_factory=list)
    cpu: list[tuple[float, float]] = field(default_factory=list)

    def judge(self, limit: float) -> dict[str, Any]:
        """Ratios, how many pairs are slower, and whether the row is."""
        wall, cpu = (median(b / a for a, b in found) for found in (self.wall, self.cpu))
        slower = sum(b > a for a, b in self.wall) / len(self.wall)
        return {
            "model": self.model, "row": self.title, "pairs": len(self.wall),
            "wall": round(wall, 4), "cpu": round(cpu, 4), "slower_pairs": round(slower, 2),
            "before_ms": round(1000 * median(a for a, _ in self.wall), 3),
            "is_slower": min(wall, cpu) > limit and slower >= 0.75,
        }  # fmt: skip


def cpu_seconds(pid: int) -> float:
    """What all threads of a process have run, those that ended excepted."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total += int((task / "schedstat").read_text().split()[0])
        except (OSError, IndexError):  # it has just ended
            continue
    return total / 1e9


def cost(measure: Measure, value: float) -> float:
    """Something like seconds, whatever the unit: the ratio of two is that of their times."""
    return value if measure.unit == "ms" else 1.0 / value


def take_pair(
    measure: Measure, sides: Sequence[Side], prompts: Prompts, turn: int, row: Pairs | None
) -> None:
    """One turn of each side; the first of a pair is now this one, now that one. `row` None: a warm-up."""
    wall, cpu = dict[str, float](), dict[str, float]()
    for side in sides if turn % 2 else sides[::-1]:
        time.sleep(SETTLE_S)
        before = cpu_seconds(side.pid)
        wall[side.name] = cost(measure, one(measure, side, prompts, turn))
        cpu[side.name] = max(cpu_seconds(side.pid) - before, 1e-6)
    if row is not None:
        names = [side.name for side in sides]
        row.wall.append((wall[names[0]], wall[names[1]]))
        row.cpu.append((cpu[names[0]], cpu[names[1]]))


def root_of(what: str) -> Path:
    """The folder of a tree: a folder that has `plait/`, or a revision, taken out once."""
    folder = Path(what).resolve()
    if (folder / "plait" / "__init__.py").exists():
        return folder
    commit = find_commit(what)
    if not commit:
        raise SystemExit(f"--before {what}: neither a folder with plait/ in it nor a revision")
    return check_out(commit)


def measure_model(given: argparse.Namespace, model: str, seconds: float) -> Iterator[Pairs]:
    """All rows of a model, within so many seconds."""
    about = footprint(model, {})
    measures = [m for m in MeasureSizes().measures(about.max_len) if given.only in m.title]
    if not measures:
        raise SystemExit(f"--only {given.only}: no row of {model} has this in its title")
    room = {
        "max_model_len": min(about.max_len, max(m.length for m in measures) + 1),
        "max_num_seqs": max(m.size if m.kind in ("batch", "requests") else 1 for m in measures),
    }
    caches = given.cache_dirs.split(",") if given.cache_dirs else (None, None)
    with ExitStack() as stack:
        sides = []
        for name, root, cache in zip(
            ("before", "after"), (root_of(given.before), SOURCE), caches, strict=True
        ):
            options = {"device": "cpu", **({"cache_dir": cache} if cache else {})}
            for is_again in (False, True):  # the second finds the startup image that the first has kept
                side = stack.enter_context(Side(name, SIDES / "plait_engine.py", root=root))
                facts = side.load(model=model, threads=given.threads, options=options, **room)
                if is_again or facts.get("startup_image") != "kept":
                    break
                side.close()
            sides.append(side)
        if given.warm:
            return
        prompts, end = Prompts(about.tokenizer, about.vocab_size), time.monotonic() + seconds
        for number, measure in enumerate(measures):
            share = (end - time.monotonic()) / (len(measures) - number)
            row, until = (
                Pairs(Path(model).name, f"{measure.title} ({measure.level})"),
                time.monotonic() + share,
            )
            take_pair(measure, sides, prompts, 0, None)
            for turn in range(1, MOST_PAIRS + 1):
                if turn > LEAST_PAIRS and time.monotonic() > until:
                    break
                take_pair(measure, sides, prompts, turn, row)
            yield row


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+")
    parser.add_argument("--before", required=True, help="a revision, or a folder with plait/ in it")
    parser.add_argument("--minutes", type=float, default=8.0, help="of all models together, without loading")
    parser.add_argument("--limit", type=float, default=1.02, help="the largest ratio that is not slower")
    parser.add_argument("--threads", type=int, help="of both sides; default: Plait's own")
    parser.add_argument("--only", default="", help="rows with this text in their titles")
    parser.add_argument("--cache-dirs", help="two folders with a comma between them: before's and after's")
    parser.add_argument(
        "--warm", action="store_true", help="only load both sides once, for a run that counts"
    )
    parser.add_argument("--json", type=Path, help="write all pairs there")
    given = parser.parse_args()
    each, found, rows = 60 * given.minutes / len(given.models), [], []
    for model in given.models:
        for row in measure_model(given, model, each):
            verdict = row.judge(given.limit)
            found.append(verdict)
            rows.append(verdict | {"wall_pairs": row.wall, "cpu_pairs": row.cpu})
            mark = "SLOWER" if verdict["is_slower"] else ""
            print(
                f"{verdict['model']:32} {verdict['row']:44} wall {verdict['wall']:.3f}  cpu "
                f"{verdict['cpu']:.3f}  {verdict['pairs']:3} pairs  {mark}".rstrip(),
                flush=True,
            )
    if given.json:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    slower = [row for row in found if row["is_slower"]]
    if found:
        print(f"{len(found)} rows, {len(slower)} slower by more than {100 * (given.limit - 1):.0f} %")
    return int(bool(slower))


if __name__ == "__main__":
    sys.exit(main())
