"""Tiny checkpoints of families with state spaces and short convolutions."""

from __future__ import annotations

from tests.families.variant import Variant

VARIANTS: dict[str, Variant] = {}
