"""How positions enter attention: rotary angles, and queries that grow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary positions (Su et al. 2021) on the first `dim` of a head.

    `scaling` keeps the config's own keys (`rope_type`, `factor`, …); `ops.rope` knows each kind.
    `interleaved` rotates pairs (2i, 2i+1) instead of (i, i + dim/2).
    """

    dim: int
    theta: float = 10_000.0
    scaling: Mapping[str, Any] = field(default_factory=dict)
    interleaved: bool = False


@dataclass(frozen=True, slots=True)
class TemperatureSpec:
    """Queries that grow with their position p: by 1 + growth · ln(1 + ⌊(p + first) / length⌋) (Llama 4)."""

    growth: float
    length: float
    first: float = 0.0
    power: bool = False  # by (1 + (p + first) / length)^growth instead (Beam)
    late: bool = False  # by 1 + growth · ln(max(1, (p + first) / length)) instead (Inkling)
