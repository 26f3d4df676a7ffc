"""Tiny checkpoints of families with linear attention and gated recurrences."""

from __future__ import annotations

from tests.families.variant import Variant

VARIANTS: dict[str, Variant] = {}
