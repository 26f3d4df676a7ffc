"""bfloat16 as its bits: to float32 exactly, and from wider floats to nearest even."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

NOT_A_NUMBER = 0x7FC0


def widen_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The numbers of these bits."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def round_to_bfloat16(numbers: NDArray[Any]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16 of float32 or float64; of two that are as near, the even one's."""
    single = _round_to_odd(numbers) if numbers.dtype == np.float64 else numbers.astype(np.float32)
    bits = np.atleast_1d(single).view(np.uint32).reshape(np.shape(single))
    rounded = ((bits.astype(np.uint64) + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(single), np.uint16(NOT_A_NUMBER), rounded)


def _round_to_odd(numbers: NDArray[np.float64]) -> NDArray[np.float32]:
    """float32 with an odd last bit for what lies between two: rounding that again rounds once (Boldo)."""
    with np.errstate(over="ignore"):
        near = np.atleast_1d(numbers.astype(np.float32))
    given = np.atleast_1d(numbers)
    is_between = np.isfinite(near) & (near.astype(np.float64) != given) & (near.view(np.uint32) % 2 == 0)
    limit = np.where(given > near, np.float32(np.inf), np.float32(-np.inf))
    return np.where(is_between, np.nextafter(near, limit), near).reshape(numbers.shape)
