"""Tiny checkpoints of families whose layers attend."""

from __future__ import annotations

from tests.families.variant import Variant

VARIANTS: dict[str, Variant] = {}
