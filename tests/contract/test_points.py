"""Every point of the contract has a test that names it, and the README's table is what the tests say."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).parent
NUM_POINTS = 70
# A docstring that begins with 'Points 3, 5 and 70.'
_NAMED = re.compile(r"Points? ((?:\d+(?:, | and |))+)")
_ROW = re.compile(r"\| (\d+) \|(.*)\|$")
NOT_ON_THE_WIRE = {4}  # pings come after 15 s of silence: tests/server/test_faults.py makes that shorter


def points() -> dict[int, list[str]]:
    """The tests of each point, as `file::test`."""
    found: dict[int, list[str]] = defaultdict(list)
    for path in sorted(HERE.glob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                named = _NAMED.match(ast.get_docstring(node) or "")
                for number in re.findall(r"\d+", named[1]) if named else ():
                    found[int(number)].append(f"{path.stem}::{node.name}")
    return found


def table() -> str:
    """The rows of the README."""
    rows = [f"| {n} | {', '.join(f'`{name}`' for name in names)} |" for n, names in sorted(points().items())]
    return "\n".join(rows)


def test_every_point_has_a_test() -> None:
    assert set(range(1, NUM_POINTS + 1)) - set(points()) == NOT_ON_THE_WIRE


def test_the_readme_has_the_same_table() -> None:
    lines = (HERE / "README.md").read_text(encoding="utf-8").splitlines()
    found = {row[1]: row[0] for line in lines if (row := _ROW.match(line))}
    missing = [row for row in table().splitlines() if row not in found.values()]
    assert missing == [], "python -m tests.contract.test_points prints the table"


if __name__ == "__main__":
    print(table())  # noqa: T201
