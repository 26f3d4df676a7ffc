"""The variants of ops that were bound, and why no faster ones were."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import TYPE_CHECKING

from plait.cli.model_facts.tables import Facts, columns

if TYPE_CHECKING:
    from plait.ops.registry import Binding


def group_bindings(bindings: Iterable[Binding]) -> list[Facts]:
    """Equal choices together, with the number of their users."""
    rows = Counter((b.op, b.variant, b.skipped, b.replaces) for b in bindings)
    return [
        {"op": op, "variant": variant, "users": users, "skipped": dict(skipped), "replaces": list(replaces)}
        for (op, variant, skipped, replaces), users in sorted(rows.items(), key=lambda row: row[0][:2])
    ]


def op_lines(rows: Iterable[Facts]) -> list[str]:
    """One line for each choice; variants that are for another device go without saying."""
    table = []
    for row in rows:
        reasons = {name: why for name, why in row["skipped"].items() if not why.startswith("runs on ")}
        notes = [f"fuses {', '.join(row['replaces'])}"] if row["replaces"] else []
        notes += [f"not {name}: {reason}" for name, reason in reasons.items()]
        why = "; ".join(notes) or "nothing faster is there"
        table.append((row["op"], row["variant"], f"× {row['users']}", why))
    return columns(table)
