"""How the packages of Plait may depend on each other, read from the source (AST).

An import inside a function or under TYPE_CHECKING counts like any other. `python tools/check_imports.py`
prints every breach of these rules and exits with 1:

* a package imports only from tiers below its own, and sideways only along SIDEWAYS;
* no circle of imports between files, and none between folders;
* a folder has at most MODULES modules, unless it is a folder of siblings (SIBLINGS);
* torch stays out of NO_TORCH, and only READS_ENVIRONMENT reads environment variables.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MODULES = 15
SIBLINGS = {
    "families": "one per family",
    "model/mixers": "one per mixer",
    "ops": "one per op",
    "cli": "one per command",
}
TIERS = (
    {
        "errors",
        "option_fields",
        "config",
        "cache_folder",
        "fair_queue",
        "resource_limits",
        "typed_values",
        "version",
    },
    {"spec", "request", "sampling_fields", "memory", "partition", "unread_options"},
    {"quant", "ops", "kernels"},
    {"checkpoint", "families", "state", "model"},
    {"schedule", "runner", "text"},
    {"engine"},
    {"frontend"},
    {"loading"},
    {"llm", "worker", "verify", "convert"},
    {"server", "cluster", "bench", "cli", "__main__"},
)
SIDEWAYS = {
    "option_fields": {"errors"},
    "config": {"errors", "option_fields"},
    "fair_queue": {"errors"},
    "request": {"sampling_fields", "spec"},
    "partition": {"spec"},
    "unread_options": {"memory"},
    "ops": {"quant"},
    "kernels": {"ops", "quant"},
    "families": {"checkpoint.names"},
    "model": {"checkpoint.shared_weights", "checkpoint.weights", "state"},
    "runner": {"schedule.plan", "schedule.drafts.passes", "schedule.drafts.turns"},
    "verify": {"convert.plan", "worker"},
    "cluster": {"server"},
    "cli": {"server", "cluster", "bench"},
    "__main__": {"cli"},
}
# The front process holds none of a model: what runs in it must not load torch.
NO_TORCH = (
    *sorted(TIERS[0] | TIERS[1]),
    *(
        "state.blocks",
        "state.prefix_tree",
        "state.host_store",
        "state.disk",
        "schedule",
        "families.config.normalize",
        "text",
    ),
    *("runner.host", "checkpoint.find_files", "checkpoint.identity", "checkpoint.packed_cache.file_format"),
    "checkpoint.list_texts",
    "checkpoint.readers.gguf_metadata",
    *("kernels.load", "kernels.cpu.runtime.threads", "kernels.cpu.runtime.machine_code"),
    *("kernels.cpu.codegen.amx_permission", "kernels.cpu.runtime.tile_check"),
    *("kernels.cpu.runtime.frame_words", "kernels.cpu.runtime.row_launches"),
    "kernels.cpu.runtime.turn_tables",
    *("engine.core", "engine.thread", "engine.memory_plan", "engine.host_memory", "engine.grammar_guide"),
    *(
        "engine.admission",
        "engine.fingerprint",
        "engine.draft_places",
        "engine.metrics",
        "frontend",
        "loading.text_side",
        "loading.make_engine",
        "server",
    ),
    *("loading.image.lookup", "loading.image.file_format", "loading.image.key"),
    *("loading.image.restore", "loading.image.start", "loading.disk_cache"),
    *("worker.client", "worker.supervisor", "worker.child_process", "worker.start_process"),
    *("worker.protocol", "worker.request_table", "cluster"),
)
READS_ENVIRONMENT = {"cli"}
SETS_ENVIRONMENT = "bench.engines"  # separate processes, with engines that read most options from there
TIER_OF = {package: height for height, packages in enumerate(TIERS) for package in packages}


def within(module: str, package: str) -> bool:
    """Whether a module (`model.mixers.mla`) is `package` (`model`) or inside it."""
    return module == package or module.startswith(package + ".")


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
    if target.split(".")[0] == "torch" and any(within(module, package) for package in NO_TORCH):
        return "this module must not load torch"
    if target != "plait" and not target.startswith("plait."):
        return None
    there, package = target.removeprefix("plait").removeprefix("."), module.split(".")[0]
    if there == "" or there.split(".")[0] == package or module == "":  # ourselves, or Python's entry point
        return None
    if there.startswith("kernels.") and there != "kernels.load":
        return "kernels are reached through plait.kernels.load()"
    height, tier = TIER_OF.get(there.split(".")[0]), TIER_OF.get(package)
    if height is None or tier is None:
        return f"{there.split('.')[0] if height is None else package} has no tier in tools/check_imports.py"
    if height < tier or any(within(there, allowed) for allowed in SIDEWAYS.get(package, ())):
        return None
    return f"tier {tier} may not import from tier {height}" + (" sideways" if height == tier else "")


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


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The groups of nodes that reach each other (Tarjan 1972), each sorted."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        order[node] = low[node] = len(order)
        stack.append(node)
        for other in sorted(graph.get(node, ())):
            if other not in order:
                visit(other)
            if other in stack:
                low[node] = min(low[node], low[other])
        if low[node] == order[node]:
            at = stack.index(node)
            group, stack[at:] = stack[at:], []
            found.extend([sorted(group)] if len(group) > 1 else [])

    for node in sorted(graph):
        if node not in order:
            visit(node)
    return sorted(found)


def import_graph(root: Path) -> dict[str, set[str]]:
    """Module to the modules of Plait that it imports; names without `plait.`."""
    paths = sorted((root / "plait").rglob("*.py"))
    modules = {module_name(path, root) for path in paths}
    graph: dict[str, set[str]] = {}
    for path in paths:
        module = module_name(path, root)
        targets = {
            target for _, target in imports(ast.parse(path.read_text(encoding="utf-8")), module, modules)
        }
        ours = {t.removeprefix("plait").removeprefix(".") for t in targets if t.split(".")[0] == "plait"}
        graph[module] = ours - {module}
    return graph


def broken_circles(root: Path = ROOT) -> list[str]:
    """Every circle of imports between files, and between folders."""
    graph, packages = import_graph(root), {path.parent for path in (root / "plait").rglob("*.py")}
    names = {path.relative_to(root / "plait").as_posix().replace("/", ".") for path in packages}

    def folder(module: str) -> str:
        return module if module in names else module.rpartition(".")[0]

    folders: dict[str, set[str]] = {}
    for module, targets in graph.items():
        here = folder(module)
        there = {folder(target) for target in targets} - {here, "", "."}
        folders.setdefault(here, set()).update(there if here else ())
    found = [f"files import each other: {', '.join(group)}" for group in circles(graph)]
    return found + [f"folders import each other: {', '.join(group)}" for group in circles(folders)]


def crowded_folders(root: Path = ROOT) -> list[str]:
    """Every folder with more modules than a reader takes in at a glance."""
    found = []
    for folder in sorted({path.parent for path in (root / "plait").rglob("*.py")}):
        name = folder.relative_to(root / "plait").as_posix()
        count = sum(path.name not in ("__init__.py", "__main__.py") for path in folder.glob("*.py"))
        if count > MODULES and name not in SIBLINGS:
            found.append(f"plait/{name}: {count} modules, the limit is {MODULES}")
    return found


def main() -> int:
    found = [*broken_edges(), *broken_circles(), *crowded_folders()]
    print("\n".join(found) if found else "imports: every rule of tools/check_imports.py holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
