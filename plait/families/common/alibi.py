"""Slopes of ALiBi (Press et al. 2021): what the score of each head loses with every position of distance."""

from __future__ import annotations


def spread_slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """2^(-most / n), 2^(-2 most / n), … of the largest power of two n of heads; of others those between.

    As BLOOM and Falcon have them.
    """
    whole = 1 << heads.bit_length() - 1
    between = [2.0 ** -(most * (i + 0.5) / whole) for i in range(heads - whole)]
    return (*(2.0 ** -(most * i / whole) for i in range(1, whole + 1)), *between)


def thin_slopes(heads: int, most: float = 8.0) -> tuple[float, ...]:
    """Of the next power of two of heads every second slope, then the others. As MPT has them."""
    whole = 1 << (heads - 1).bit_length()
    every = [2.0 ** -(most * i / whole) for i in range(1, whole + 1)]
    return tuple(every if whole == heads else (every[1::2] + every[::2])[:heads])
