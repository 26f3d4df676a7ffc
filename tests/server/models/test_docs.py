"""docs/models.md names every metric of a pool, and every bound with its number."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from plait.server.models import hosted, placement, residents
from plait.server.models.pool_metrics import PoolMetrics

TEXT = " ".join((Path(__file__).resolve().parents[3] / "docs" / "models.md").read_text("utf-8").split())


def test_every_metric_is_there() -> None:
    for family in PoolMetrics(list).registry.collect():
        name = family.name + ("_total" if family.type == "counter" else "")
        assert f"`{name}{{" in TEXT, name


@pytest.mark.parametrize(
    "shown",
    [
        f"Up to {residents.MAX_WAITING} wait for one model, and up to {residents.MAX_QUEUED} models wait",
        f"yields after the next one has waited for {placement.PATIENCE_S:g} seconds",
        f"not end within {placement.YIELD_S:g} seconds",
        f"after {hosted.FIRST_PAUSE_S:g} seconds at the earliest",
        f"up to {hosted.MAX_PAUSE_S:g}.",
    ],
)
def test_every_bound_is_there(shown: str) -> None:
    assert shown in TEXT
    assert re.search(r"No model is unloaded in the five seconds after", TEXT)
    assert (placement.RESIDENCE_S, residents.WAIT_S, residents.USUAL_KEEP_S) == (5, 600, 300)
