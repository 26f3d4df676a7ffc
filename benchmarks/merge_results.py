"""Put new result files into the one file of their machine: `results/MACHINE.json`, by kind of measure.

python benchmarks/merge_results.py benchmarks/results/2026-11-21-amd-epyc-2-cores.json …

The benchmarks write a file for each run, [KIND-]DATE-MACHINE[-NOTE].json, and merge it. Of each kind the
newest stays: an older one is refused, and the revision that had it keeps it. Files that were merged are
removed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path

NAME = re.compile(r"(?:(?P<kind>[a-z]+)-)?(?P<date>\d{4}-\d\d-\d\d)-(?P<machine>.+?-cores)(?:-\w+)?\.json")
MODELS = "models"  # the kind of a file without one in its name
WIDTH = 150  # characters of a line, if more than one value is in it


def write_compact(value: object, depth: int = 0) -> str:
    """JSON with what fits into a line in a line: a row of numbers is one."""
    line = json.dumps(value)
    if len(line) + depth <= WIDTH or not isinstance(value, dict | list) or not value:
        return line
    indent = " " * (depth + 1)
    if isinstance(value, dict):
        parts = [f"{json.dumps(key)}: {write_compact(part, depth + 1)}" for key, part in value.items()]
    else:
        parts = [write_compact(part, depth + 1) for part in value]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{indent}" + f",\n{indent}".join(parts) + f"\n{' ' * depth}{last}"


def merge_file(path: Path) -> Path:
    """Put one file into that of its machine, and remove it. Raises ValueError if it does not belong there."""
    if (found := NAME.fullmatch(path.name)) is None:
        raise ValueError(f"{path.name} is not named [KIND-]DATE-MACHINE[-NOTE].json")
    kind, target = found["kind"] or MODELS, path.with_name(f"{found['machine']}.json")
    kept = json.loads(target.read_text()) if target.exists() else {}
    if kind in kept and kept[kind]["date"] > found["date"]:
        raise ValueError(f"{path.name} is older than {kind} of {kept[kind]['date']} in {target.name}")
    kept[kind] = {"date": found["date"], "measured": json.loads(path.read_text())}
    target.write_text(write_compact(dict(sorted(kept.items()))) + "\n")
    path.unlink()
    return target


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    for path in parser.parse_args().files:
        try:
            print(f"{path.name} → {merge_file(path).name}")
        except (OSError, ValueError) as error:
            print(f"not merged: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
