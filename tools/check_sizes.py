"""Small by measure: the longest file, the longest function, each package, and the lines with loose types.

A function's length is its lines without decorators and docstring. A line with a loose type names `Any` or
calls `cast`. `python tools/check_sizes.py` prints what
is too long and exits with 1; `--table` also prints the size of every package, and of what kind the lines are.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CHECKED = ("plait", "tools", "benchmarks", "examples")
FILE_LINES, FUNCTION_LINES = 400, 50
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
KERNEL_FILE_LINES, KERNEL_FUNCTION_LINES = 600, 150
# Lines of each folder of plait/ (".": its own modules): what there is, and a little air. A cap falls when
# lines go; it is raised in a commit of its own that says why, or not at all.
CAPS = {
    ".": 2_280,
    "bench": 4_400,
    "checkpoint": 6_050,
    "cli": 6_770,
    "cluster": 3_600,
    "convert": 3_700,
    "engine": 2_760,
    "families": 23_700,
    "frontend": 1_680,
    "kernels": 36_400,
    "llm": 630,
    "loading": 7_200,
    "model": 7_950,
    "ops": 8_400,
    "quant": 2_530,
    "runner": 7_120,
    "schedule": 4_060,
    "server": 19_150,
    "spec": 1_400,
    "state": 2_100,
    "text": 10_560,
    "verify": 3_430,
    "worker": 2_550,
}

# Lines of plait/ with `Any` (its imports, too) or typing's `cast`. It falls when they go, and is not raised:
# `object`, a TypeVar, a Protocol or a class says more.
LOOSE_LINES = 674

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
    found, unused = [], dict(EXCEPTIONS)
    for where, text in sources(root):
        file_limit, function_limit = limits(where)
        lines = text.count("\n") + (not text.endswith("\n") and text != "")
        measured = [(where, f"{where}:1: {lines} lines", lines, file_limit)]
        for name, line, length in functions(ast.parse(text)):
            what = f"{where}:{line}: {name} has {length} lines"
            measured.append((f"{where}:{name}", what, length, function_limit))
        for key, what, length, limit in measured:
            if length > limit:
                allowed = unused.pop(key, EXCEPTIONS.get(key, (limit, "")))[0]
                found += [f"{what}, the limit is {allowed}"] if length > allowed else []
    found += [f"tools/check_sizes.py: the exception for {key} is no longer needed" for key in unused]
    for folder, lines in folders(root).items():
        if lines > CAPS.get(folder, 0):
            found.append(f"plait/{folder}: {lines} lines, the cap is {CAPS.get(folder, 0)}")
    return found


def is_loose(node: ast.AST) -> bool:
    """Whether this names `Any`, calls `cast` by its own name, or imports one of them."""
    match node:
        case ast.ImportFrom(module="typing", names=names):
            return any(alias.name in ("Any", "cast") for alias in names)
        case ast.Name(id="Any") | ast.Call(func=ast.Name(id="cast")):
            return True
    return False


def loose_lines(tree: ast.Module) -> set[int]:
    """The lines of a module with loose types."""
    return {node.lineno for node in ast.walk(tree) if is_loose(node)}


def renamed_any(tree: ast.Module) -> list[int]:
    """Where another name is given to `Any` alone, which would hide it."""
    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign | ast.AnnAssign))
    return [n.lineno for n in assigned if isinstance(n.value, ast.Name) and n.value.id == "Any"]


def too_loose(root: Path = ROOT, most: int | None = None) -> list[str]:
    """What `LOOSE_LINES` refuses, and every other name for `Any`."""
    trees = {where: ast.parse(text) for where, text in sources(root) if where.startswith("plait/")}
    found = [
        f"{where}:{line}: another name for Any hides it"
        for where, tree in trees.items()
        for line in renamed_any(tree)
    ]
    most = LOOSE_LINES if most is None else most
    count = sum(len(loose_lines(tree)) for tree in trees.values())
    if count > most:
        found.append(f"plait: {count} lines with Any or cast, the cap is {most}")
    return found


def folders(root: Path = ROOT) -> dict[str, int]:
    """Lines of each folder right under `plait/`, and of its own modules under "."."""
    found: dict[str, int] = {}
    for where, text in sources(root):
        package, _, path = where.partition("/")
        if package == "plait":
            folder = path.split("/")[0] if "/" in path else "."
            found[folder] = found.get(folder, 0) + text.count("\n")
    return dict(sorted(found.items()))


def count_kinds(text: str) -> Counter[str]:
    """How many lines of a module are code, docstrings, imports, comments and blank."""
    kinds: dict[int, str] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            kinds |= dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), "imports")
        elif isinstance(node, DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            doc = node.body[0]
            kinds |= dict.fromkeys(range(doc.lineno, (doc.end_lineno or 0) + 1), "docstrings")
    lines = enumerate(text.splitlines(), 1)
    plain = (line.strip() for i, line in lines if i not in kinds)
    others = ("comments" if line[:1] == "#" else "code" if line else "blank" for line in plain)
    return Counter([*kinds.values(), *others])


def table(root: Path = ROOT) -> str:
    """Lines of each folder of the package, next to its cap, and how many are of what kind."""
    found = folders(root)
    rows = [f"{lines:6} of {CAPS.get(folder, 0):6}  {folder}" for folder, lines in found.items()]
    loose = sum(len(loose_lines(ast.parse(t))) for where, t in sources(root) if where.startswith("plait/"))
    rows.append(f"{loose:6} of {LOOSE_LINES:6}  lines with Any or cast")
    kinds = sum((count_kinds(t) for where, t in sources(root) if where.startswith("plait/")), Counter())
    rows.append(f"{sum(found.values()):6} of {sum(CAPS.values()):6}  in all")
    return "\n".join([*rows, *(f"{count:16}  {kind}" for kind, count in kinds.most_common())])


def main() -> int:
    if "--table" in sys.argv:
        print(table())
    found = too_long() + too_loose()
    print("\n".join(found) if found else "sizes: every file and function is within its limit")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
