"""What a model writes on that fills several places of a text at once."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CanvasSpec:
    """Tokens are written `size` at a time, in several passes (block diffusion; Arriola et al. 2025).

    A canvas lies at a multiple of `size`; places without a token have the mask. A pass fills those where the
    probability of what is sampled is above `threshold`, or else the one where it is largest.

    With `edit_threshold` a token is replaced by another that is sampled in its place with more probability
    than that, until a pass changes nothing or `edit_passes` have run without masks (Bie et al. 2026).
    """

    size: int
    mask_token: int
    threshold: float = 0.95
    edit_threshold: float | None = None
    edit_passes: int = 16

    @property
    def most_passes(self) -> int:
        """The most passes until a canvas is done."""
        return self.size + (0 if self.edit_threshold is None else self.edit_passes)
