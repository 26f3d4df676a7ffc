"""What all gateways say of themselves, where each question is answered by any one of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

Row = Mapping[str, object]
CALLS_EACH = 4  # for each gateway that is missing, in one round


def ask_gateways(ask: Callable[[int], Sequence[Row]], expected: int, patience_s: float) -> list[Row]:
    """A row of each gateway, by `name`; fewer than `expected` if some do not answer within `patience_s`.

    `ask(count)`: so many answers, each of a gateway that the cluster chooses. A router sends calls that come
    at once to different gateways, so a few rounds find all.
    """
    found: dict[str, Row] = {}
    until = time.monotonic() + patience_s
    while len(found) < max(expected, 1) and time.monotonic() < until:
        for row in ask(CALLS_EACH * max(expected - len(found), 1)):
            found[str(row.get("name", row.get("pid")))] = row  # older gateways have no name
    return [row for _, row in sorted(found.items())]
