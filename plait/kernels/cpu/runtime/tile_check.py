"""Checks that tiles of AMX give the documented bits, by a kernel that is there already: without Numba."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import numpy as np

NAMES = ("bfloat16", "bytes", "signed bytes")
Products = tuple[bytes, bytes, bytes]  # in that order


def run_products(address: int, given: Sequence[bytes]) -> Products:
    """What the kernel `amx.check.products` at that address computes.

    given: its scratch memory, then the tiles a, b and c of each product. They are copied.
    """
    arrays = [np.frombuffer(bytearray(one), np.uint8) for one in given]
    words = np.array([0, 0, *(array.ctypes.data for array in arrays)], np.int64)
    call = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(address)
    call(0, words.ctypes.data, 0, 1)
    return arrays[3].tobytes(), arrays[6].tobytes(), arrays[9].tobytes()


def name_difference(found: Products, expected: Products) -> str | None:
    """Which products differ, or None. expected: as they are documented."""
    pairs = zip(NAMES, found, expected, strict=True)
    wrong = [name for name, one, other in pairs if one != other]
    return f"its products of {' and of '.join(wrong)} are not what is documented" if wrong else None
