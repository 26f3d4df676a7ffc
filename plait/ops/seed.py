"""Randomness without a state: a hash of (seed, position). Plain integers, no torch.

A token's random number depends on its request's seed and its place in the sequence alone, so it is the same
in any batch, after preemption, and in another process.
"""

from __future__ import annotations

MASK64 = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15  # 2**64 over the golden ratio, odd
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # the factors of SplitMix64's finalizer


def mix(x: int) -> int:
    """The finalizer of SplitMix64 (Steele et al. 2014): 64 bits in, 64 well-mixed bits out."""
    x &= MASK64
    x = ((x ^ (x >> 30)) * MIX_1) & MASK64
    x = ((x ^ (x >> 27)) * MIX_2) & MASK64
    return x ^ (x >> 31)


def uniform(seed: int, position: int) -> float:
    """The random number of one token, in [0, 1) with 53 bits. Any integer is a seed; position >= 0."""
    stream = mix(seed + GOLDEN)
    return (mix(stream + (position + 1) * GOLDEN) >> 11) * 2.0**-53


def choice_seed(seed: int, index: int) -> int:
    """The seed of one choice of a request: its own for the first, a hash of (seed, index) for the others."""
    return mix(seed + index * GOLDEN) if index else seed
