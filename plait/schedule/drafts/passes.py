"""What a plan says of a pass over a noisy canvas, and what the pass answers besides tokens."""

from __future__ import annotations

from msgspec import Struct


class Denoising(Struct, frozen=True, gc=False):
    """A pass over a noisy canvas, which is the last tokens of a chunk, those with logits: how hot it is, and
    whether it is the first."""

    temperature: float
    is_first: bool


class Denoised(Struct, frozen=True, gc=False):
    """What a pass found besides draws: of each place the likeliest token, and the entropy in nats."""

    likeliest: tuple[int, ...]
    entropies: tuple[float, ...]
