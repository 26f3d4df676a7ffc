"""Rotary positions bound to a device: frequencies computed once, at construction."""

from __future__ import annotations

from torch import Tensor

from plait import spec
from plait.checkpoint.weights import Weights
from plait.ops.rope import frequencies, rotate


class Rope:
    def __init__(self, s: spec.RopeSpec, w: Weights) -> None:
        inv_freq, self.mscale = frequencies(s, w.target.max_len)
        self.inv_freq, self.interleaved = inv_freq.to(w.target.device), s.interleaved
        self._rotate = w.bind(rotate, dim=s.dim, interleaved=s.interleaved, max_len=w.target.max_len)

    def __call__(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: [T, heads, d], positions: [T] -> like x."""
        return self._rotate(x, positions, self.inv_freq, self.mscale, self.interleaved)  # type: ignore[no-any-return]


def describe_rope(s: spec.RopeSpec | None) -> str:
    """Rotary positions in a few words, for `plait info`."""
    if s is None:
        return "no rope"
    kind = s.scaling.get("rope_type", "")
    scaled = f" {kind}" if kind not in ("", "default") else ""
    return f"rope {s.theta:g}{scaled} on {s.dim}"
