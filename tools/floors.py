"""The floors of Plait: a module imports only from floors below it, and sideways only along the table.

Read from the source (AST), so that an import inside a function or under TYPE_CHECKING counts too.
`python tools/floors.py` prints every edge that breaks the table and exits with 1.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FLOORS = (
    {"errors", "config", "cache_folder", "host"},
    {"spec", "request", "memory", "process_memory"},
    {"quant", "ops", "kernels"},
    {"checkpoint", "families", "state", "model"},
    {"schedule", "runner", "text", "engine", "convert"},
    {"server", "cluster", "bench", "cli", "__main__"},
)
SIDEWAYS = {
    "config": {"errors"},
    "ops": {"quant"},
    "kernels": {"ops", "quant"},
    "families": {"checkpoint.names"},
    "model": {"checkpoint.weights", "state"},
    "engine": {"schedule", "runner", "text"},
    "runner": {"schedule.plan"},
    "convert": {"engine", "runner", "text"},
    "cli": {"server", "cluster", "bench"},
    "__main__": {"cli"},
}
NO_TORCH = (
    *("errors", "config", "cache_folder", "host", "spec", "request", "memory", "process_memory"),
    *("state.blocks", "state.prefix"),
    *("schedule", "families.normalize", "text", "server"),
)
READS_ENVIRONMENT = {"cli"}
SETS_ENVIRONMENT = "bench.sides"  # processes of their own, whose engines are told most things that way
FLOOR_OF = {room: height for height, rooms in enumerate(FLOORS) for room in rooms}


def within(module: str, room: str) -> bool:
    """Whether a module (`model.mla`) is `room` (`model`) or inside it."""
    return module == room or module.startswith(room + ".")


def module_name(path: Path, root: Path) -> str:
    parts = path.relative_to(root / "plait").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, module: str, modules: set[str]) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of everything imported; `from p import m` is p.m when that is a module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                yield node.lineno, "." * node.level
                continue
            base = node.module or ""
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node.lineno, full if full.removeprefix("plait.") in modules else base


def environment_reads(tree: ast.Module) -> Iterator[int]:
    names = {"environ", "environb", "getenv", "putenv"}
    for node in ast.walk(tree):
        attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        if attribute and node.value.id == "os" and node.attr in names:
            yield node.lineno
        elif isinstance(node, ast.ImportFrom) and node.module == "os":
            yield from (node.lineno for alias in node.names if alias.name in names)


def refusal(module: str, target: str) -> str | None:
    """Why `module` may not import `target` (an absolute name), or None."""
    if target.startswith("."):
        return "a relative import; write plait.…"
    if target.split(".")[0] == "torch" and any(within(module, room) for room in NO_TORCH):
        return "this room must not know torch"
    if target != "plait" and not target.startswith("plait."):
        return None
    there, room = target.removeprefix("plait").removeprefix("."), module.split(".")[0]
    if there == "" or there.split(".")[0] == room or module == "":  # ourselves, or the Python door
        return None
    if there.startswith("kernels.") and there != "kernels.load":
        return "kernels are reached through plait.kernels.load()"
    height, floor = FLOOR_OF.get(there.split(".")[0]), FLOOR_OF.get(room)
    if height is None or floor is None:
        return f"{there.split('.')[0] if height is None else room} has no floor in tools/floors.py"
    if height < floor or any(within(there, allowed) for allowed in SIDEWAYS.get(room, ())):
        return None
    return f"floor {floor} may not import from floor {height}" + (" sideways" if height == floor else "")


def broken_edges(root: Path = ROOT) -> list[str]:
    """Every import or environment read under `root/plait` that breaks the rules, as `file:line: why`."""
    paths = sorted((root / "plait").rglob("*.py"))
    modules = {module_name(path, root) for path in paths}
    found = []
    for path in paths:
        tree, module = ast.parse(path.read_text(encoding="utf-8")), module_name(path, root)
        where = path.relative_to(root)
        for line, target in imports(tree, module, modules):
            if why := refusal(module, target):
                found.append(f"{where}:{line}: {module or 'plait'} imports {target}: {why}")
        if module.split(".")[0] not in READS_ENVIRONMENT and not within(module, SETS_ENVIRONMENT):
            found += [
                f"{where}:{line}: only cli/ may read the environment" for line in environment_reads(tree)
            ]
    return found


def main() -> int:
    edges = broken_edges()
    print("\n".join(edges) if edges else "floors: every import goes down, or along the table")
    return 1 if edges else 0


if __name__ == "__main__":
    sys.exit(main())
