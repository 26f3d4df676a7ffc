"""What a model writes on that fills several places of a text at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CanvasSpec:
    """Tokens are written `size` at a time, in several passes (block diffusion; Arriola et al. 2025).

    A canvas lies at a multiple of `size`; places without a token have the mask. A pass fills those where the
    probability of what is sampled is above `threshold`, or else the one where it is largest.
    """

    size: int
    mask_token: int
    threshold: float = 0.95
