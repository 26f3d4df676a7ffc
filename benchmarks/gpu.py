"""What a GPU makes of Plait's kernels: are they right, how fast, and how near to what the chip can do.

python benchmarks/gpu.py [--full] [--phases 0,1,2] [--minutes 9] [--out DIR] [--baseline FILE] [--dry]

Rows go to DIR/rows.jsonl as they are found; a call goes on where the last one ended, and one that crashed is
resumed behind the row it crashed in. Without options everything runs in its short form in under nine minutes.
--full: the long form, in parts, to be called again until nothing is left. --dry: on a machine without a GPU,
in Triton's interpreter, in tiny shapes: right or wrong, no speed.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

if TYPE_CHECKING:
    from gpu_phases.results import Bench, Item

NAMES = (
    "machine",
    "build",
    "right",
    "speed",
    "one sequence",
    "many",
    "peers",
    "tensor parallelism",
    "profile",
)
SHORT = (0.5, 1.5, 1.5, 1.5, 1.5, 1.0, 1.0, 0.1, 0.4)  # shares of the minutes, of each requested phase
DRY = (0.5, 0.5, 5.0, 0.5, 1.0, 0.6, 0.3, 0.1, 0.5)
MINUTES = 9.0
INSTALL = "this needs what Plait needs: `pip install -e '.[cuda]'` in the checkout, or the packages alone"


def list_phases() -> list[Callable[[Bench], Iterator[Item]]]:
    """The items of each phase; nothing is imported that only another phase needs."""
    from gpu_phases import machine, models, parallel, peers, right, speed

    return [
        machine.list_machine,
        machine.list_builds,
        right.list_checks,
        speed.list_speeds,
        models.list_single,
        models.list_many,
        peers.list_peers,
        parallel.list_parallel,
        models.list_profiles,
    ]


def run(given: argparse.Namespace) -> int:
    """All requested phases. 1: something is wrong; 3: the device was lost, and a call goes on."""
    from gpu_phases.machine import can_begin_early
    from gpu_phases.results import Bench, DeviceLost, compare_rows, describe_row

    from plait.kernels.load import load_for_gpu
    from plait.ops.launch import permit_dependent

    load_for_gpu()
    bench = Bench.at(given.out, is_full=given.full, is_dry=given.dry, only=given.only)
    begun, end = len(bench.rows), time.monotonic() + 60 * given.minutes
    if lost := bench.recover():
        print(describe_row(lost), flush=True)
    left, shares = Counter[str](), DRY if given.dry else SHORT
    for phase, items in enumerate(list_phases()):
        if phase not in given.phases:
            continue
        share = 1.0 if given.full else shares[phase] / sum(shares[n] for n in given.phases if n >= phase)
        now = time.monotonic()  # what a phase leaves of its time is for those behind it
        bench.deadline = now + share * max(end - now, 0.0)
        permit_dependent(bench.device, can_begin_early(bench))
        try:
            left[NAMES[phase]] += bench.run_phase(phase, items(bench), lambda text: print(text, flush=True))
        except DeviceLost as error:
            print(f"the device is lost ({error}): call again to go on behind that row")
            return 3
    show_table(bench, begun)
    if given.baseline:
        print("\n".join(compare_rows(bench.rows[begun:], given.baseline) or ["as the baseline, within 3 %"]))
    for name, count in left.items():
        if count:
            print(f"{name}: ran out of time, {count} left; call again to go on")
    if not sum(left.values()):
        print("nothing is left")
    return int(any(row["ok"] is False for row in bench.rows[begun:]))


def show_table(bench: Bench, begun: int) -> None:
    """How many rows of each phase are right, and the slowest compared with the roof."""
    from gpu_phases.results import describe_row

    mine = [r for r in bench.rows if (r["chip"], r["revision"]) == (bench.chip.name, bench.revision)]
    new = len(bench.rows) - begun
    print(f"\n{bench.chip.name}, revision {bench.revision}: {len(mine)} rows, {new} of them new")
    for phase, name in enumerate(NAMES):
        rows = [row for row in mine if row["phase"] == phase]
        wrong = [row for row in rows if row["ok"] is False]
        if rows:
            print(f"{phase} {name:18} {len(rows):5} rows, {len(wrong)} wrong")
        for row in wrong[:8]:
            print(f"    {describe_row(row)}")
    shares = sorted((r for r in mine if r["share_of_roof"] is not None), key=lambda r: r["share_of_roof"])
    for row in shares[:8]:
        print(f"    farthest from the roof: {describe_row(row)}")
    print(f"rows: {bench.file}")


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--full", action="store_true", help="the long form, in parts of --minutes")
    parser.add_argument("--phases", default=None, help="their numbers, as 0,1,2; default: all")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="of this call; default: 9")
    parser.add_argument("--out", type=Path, default=HERE.parent / "build" / "gpu", help="where rows are kept")
    parser.add_argument("--baseline", type=Path, help="rows of another run, to compare with")
    parser.add_argument("--only", default="", help="only ops with this text in their names")
    parser.add_argument("--dry", action="store_true", help="without a GPU, in Triton's interpreter")
    given = parser.parse_args(argv)
    try:
        given.phases = [int(n) for n in given.phases.split(",")] if given.phases else list(range(len(NAMES)))
    except ValueError:
        parser.error(f"--phases {given.phases}: numbers from 0 to {len(NAMES) - 1}, with commas")
    if not all(0 <= n < len(NAMES) for n in given.phases):
        parser.error(f"--phases: they are numbered 0 to {len(NAMES) - 1}")
    return given


def main() -> int:
    given = parse()
    if given.dry:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    try:
        return run(given)
    except ModuleNotFoundError as error:  # ahead of the first row: rows catch their own
        raise SystemExit(f"{error}; {INSTALL}") from error


if __name__ == "__main__":
    sys.exit(main())
