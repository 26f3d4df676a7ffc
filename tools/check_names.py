"""How classes and functions of Plait are named, read from the source (AST).

`python tools/check_names.py` prints every breach of these rules and exits with 1:

* a public class name is defined once in the package;
* nothing of the package is imported under another name (`from plait.a import b as c`);
* a function of a module is called by a verb, or by a noun where it is a cheap value. It has no participle
  (`kept`, `held_by_name`), but for an adjective of the field before its noun (`paged_attention`, TERMS);
* nor has a method, but for KEPT_METHODS. Properties and class methods that build (`of`) are free.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# Participles that do not end in -ed or -ing; what is a verb's own form as well (read, cut, set) passes.
IRREGULAR = """
    begun bound broken brought built caught chosen done drawn driven fallen felt found frozen given gone
    grown heard held hidden kept known laid left lent lost made meant met paid said seen sent shown sold
    sought spent spoken stolen stood sunk sworn taken taught thought thrown told torn understood woken won
    worn woven written
"""
# Words that only look like participles.
OTHERS = """
    bed bleed bring embed exceed feed need nothing ping proceed red ring seed shed sing speed spring sting
    string succeed swing thing
"""
# Adjectives and nouns of the field: those in -ed precede a noun, those in -ing may be the noun.
TERMS = """
    banned cached embedding fixed fused gated grouped ignored leading lightning mapping masked missing packed
    padding paged pooling ragged reasoning required rising rounding running sampled sampling scaling shared
    started stored thinking timing trailing unscaled unused
"""
# Methods that keep their participles, each with its reason. The list only shrinks.
KEPT_METHODS = {
    "Connection._unsupported_upgrade_warning": "uvicorn calls it",
    "Decoder.hidden": "hidden states, a noun of the field",
    "PlaneLayout.padded": "sources of GPU kernels call it: all that were compiled would be stale",
    "SharedWeights.shared": "as Weights",
    "SharedWeights.stored": "as Weights",
    "Weights.shared": "mixers read weights by it, those of plug-ins too",
    "Weights.stored": "mixers read weights by it, those of plug-ins too",
}
JOINING = "as at by for from in into of on over to under up with"


def sources(root: Path) -> Iterator[tuple[str, ast.Module]]:
    for path in sorted((root / "plait").rglob("*.py")):
        yield path.relative_to(root).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def is_participle(word: str) -> bool:
    if word in OTHERS.split():
        return False
    return word in IRREGULAR.split() or (len(word) > 4 and word.endswith(("ed", "ing")))


def is_named_by_participle(name: str) -> bool:
    """Whether a function's name begins with a participle that is no adjective or noun of the field."""
    first, *rest = name.strip("_").split("_")
    if first not in TERMS.split():
        return is_participle(first)
    return rest[0] in JOINING.split() if rest else first.endswith("ed")


def repeated_classes(root: Path = ROOT) -> list[str]:
    """Every public class name that is defined in more than one place."""
    places: dict[str, list[str]] = {}
    for where, tree in sources(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(f"{where}:{node.lineno}")
    return [f"class {name} is in {', '.join(at)}" for name, at in sorted(places.items()) if len(at) > 1]


def renamed_imports(root: Path = ROOT) -> list[str]:
    """Every import of the package's own under another name, as `file:line: what`."""
    found = []
    for where, tree in sources(root):
        for node in ast.walk(tree):
            if not isinstance(node, ast.Import | ast.ImportFrom):
                continue
            base = (node.module or "") if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                full = alias.name if base is None else f"{base}.{alias.name}"
                if alias.asname is not None and full.split(".")[0] == "plait":
                    found.append(f"{where}:{node.lineno}: {full} is imported as {alias.asname}")
    return found


def participles(root: Path = ROOT) -> list[str]:
    """Every function of a module that is named by a participle, as `file:line: what`."""
    return [
        f"{where}:{node.lineno}: {node.name}() is named by a participle; a verb says what it does"
        for where, tree in sources(root)
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and is_named_by_participle(node.name)
    ]


def is_free(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Whether it is a value by its decorators: a property, or a class method, which builds."""
    names = {ast.unparse(decorator).split("(")[0] for decorator in function.decorator_list}
    return any(name.endswith(("property", ".setter", "classmethod")) for name in names)


def participle_methods(root: Path = ROOT, kept: Mapping[str, str] = KEPT_METHODS) -> list[str]:
    """Every method that is named by a participle, and each of `kept` that is not there any more."""
    found, unused = [], dict(kept)
    for where, tree in sources(root):
        for owner in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
            for node in owner.body:
                if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or is_free(node):
                    continue
                name = f"{owner.name}.{node.name}"
                if is_named_by_participle(node.name) and unused.pop(name, kept.get(name)) is None:
                    found.append(
                        f"{where}:{node.lineno}: {name}() is named by a participle; a verb says what it does"
                    )
    return found + [
        f"tools/check_names.py: {name} is no longer a method with a participle" for name in unused
    ]


def main() -> int:
    found = [*repeated_classes(), *renamed_imports(), *participles(), *participle_methods()]
    print("\n".join(found) if found else "names: every rule of tools/check_names.py holds")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
