"""Tensors and layers, of a model or of what drafts for it: as plain values, and in words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from plait.cli.common.format_model import bytes_text, index_ranges, layer_groups, layer_text
from plait.cli.model_facts.tables import Facts, columns
from plait.spec.model import ModelSpec

if TYPE_CHECKING:
    from plait.loading.open_model import Opened


def tensor_facts(opened: Opened, names: Sequence[str]) -> Facts:
    """Sizes of the tensors with these names, and bytes by format."""
    checkpoint = opened.checkpoint
    formats: Counter[str] = Counter()
    for name in names:
        formats[checkpoint.format_of(name)] += checkpoint.nbytes(name)
    return {
        "nbytes": sum(formats.values()),
        "formats": dict(formats.most_common()),
        "tensors": len(names),
        "parameters": sum(math.prod(checkpoint.shape(name)) for name in names),
    }


def tensors_text(facts: Facts, kind: str | None = None) -> str:
    """`tensor_facts` in words. `kind`: of the files."""
    formats = " + ".join(f"{bytes_text(nbytes)} {name}" for name, nbytes in facts["formats"].items())
    parts = [f"{facts['parameters'] / 1e6:,.1f} M parameters in {facts['tensors']} tensors", kind, formats]
    return ", ".join(filter(None, parts))


def layer_facts(spec: ModelSpec) -> list[Facts]:
    """Equal layers together, each branch in words."""
    return [
        {"indices": list(indices), "branches": layer_text(layer)} for indices, layer in layer_groups(spec)
    ]


def layer_lines(groups: Iterable[Facts]) -> list[str]:
    """`layer_facts`, a line for each branch."""
    rows: list[tuple[str, str]] = []
    for group in groups:
        branches = group["branches"] or ["nothing"]
        rows += [("" if n else index_ranges(group["indices"]), branch) for n, branch in enumerate(branches)]
    return columns(rows)
