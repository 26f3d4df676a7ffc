"""Puts `examples/` on the import path, where `train_nano_hybrid.py` finds its own modules."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
