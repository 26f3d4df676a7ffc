"""Small by measure: the longest file, the longest function, and the whole package.

A function's length is its lines without decorators and docstring. `python tools/check_sizes.py` prints what
is too long and exits with 1; `--table` also prints the size of every package.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("plait", "tools", "benchmarks", "examples")
FILE_LINES, FUNCTION_LINES = 400, 50
KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES = 600, 150
PACKAGE_LINES = 73_000  # what there is and 3 % of air; raised in a commit of its own, or not at all

# path, or path:function -> (limit, reason). The only list of exceptions.
EXCEPTIONS: dict[str, tuple[int, str]] = {}


def limits(where: str) -> tuple[int, int]:
    if where.startswith("plait/kernels/"):
        return KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES
    return FILE_LINES, FUNCTION_LINES


def functions(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """(name, first line, length) of every function and method."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node, clean=False) is not None:
                doc = node.body[0]
                length -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            yield node.name, node.lineno, length


def sources(root: Path) -> Iterator[tuple[str, str]]:
    for top in CHECKED:
        for path in sorted((root / top).rglob("*.py")):
            yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")


def too_long(root: Path = ROOT) -> list[str]:
    """Everything over its limit, as `file:line: what`; an exception that is no longer needed is one too."""
    found, unused, package = [], dict(EXCEPTIONS), 0
    for where, text in sources(root):
        file_limit, function_limit = limits(where)
        lines = text.count("\n") + (not text.endswith("\n") and text != "")
        package += lines if where.startswith("plait/") else 0
        measured = [(where, f"{where}:1: {lines} lines", lines, file_limit)]
        for name, line, length in functions(ast.parse(text)):
            what = f"{where}:{line}: {name} has {length} lines"
            measured.append((f"{where}:{name}", what, length, function_limit))
        for key, what, length, limit in measured:
            if length > limit:
                allowed = unused.pop(key, EXCEPTIONS.get(key, (limit, "")))[0]
                found += [f"{what}, the limit is {allowed}"] if length > allowed else []
    found += [f"tools/check_sizes.py: the exception for {key} is no longer needed" for key in unused]
    if package > PACKAGE_LINES:
        found.append(f"plait/: {package} lines, the cap is {PACKAGE_LINES}")
    return found


def table(root: Path = ROOT) -> str:
    """Lines of every folder right under `plait/`."""
    folders: dict[str, int] = {}
    for where, text in sources(root):
        if where.startswith("plait/"):
            folder = "/".join(where.split("/")[:2])
            folders[folder] = folders.get(folder, 0) + text.count("\n")
    rows = [f"{lines:6}  {folder}" for folder, lines in sorted(folders.items())]
    return "\n".join([*rows, f"{sum(folders.values()):6}  of {PACKAGE_LINES} in all"])


def main() -> int:
    if "--table" in sys.argv:
        print(table())
    found = too_long()
    print("\n".join(found) if found else "sizes: every file and function is within its limit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
