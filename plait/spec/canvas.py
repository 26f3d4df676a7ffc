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
    def tail(self) -> int:
        """Places behind the longest sequence: none, as a block of memory holds whole canvases."""
        return 0

    def __str__(self) -> str:
        return (
            f"writes {self.size} tokens at a time, over masks: those above {self.threshold:g} of probability"
        )

    @property
    def most_passes(self) -> int:
        """The most passes until a canvas is done."""
        return self.size + (0 if self.edit_threshold is None else self.edit_passes)


@dataclass(frozen=True, slots=True)
class NoisyCanvasSpec:
    """Tokens are written `size` at a time out of random ones, in at most `most_passes` (DiffusionGemma).

    A canvas begins behind the last token, wherever that is. A pass samples every place at a temperature that
    falls from `hottest` to `coolest`. Places of least entropy keep that token, as many as have a sum within
    `entropy_bound` in front of them (Ben-Hamu et al. 2025); others get a random one. The canvas is done when
    the likeliest tokens have stayed the same for `stable_passes` and the mean entropy is below `confidence`.
    """

    size: int
    most_passes: int = 48
    coolest: float = 0.4
    hottest: float = 0.8
    entropy_bound: float = 0.1
    stable_passes: int = 1
    confidence: float = 0.005

    def __str__(self) -> str:
        return f"writes {self.size} tokens at a time, out of noise: in {self.most_passes} passes at most"

    @property
    def tail(self) -> int:
        """Places behind the longest sequence, of a canvas that begins with its last token."""
        return self.size - 1


AnyCanvas = CanvasSpec | NoisyCanvasSpec
