"""Storages of weights with kernels that `make test` compiles; `make test-all` compiles those of all.

From an empty cache a storage's kernels take up to eight seconds of a processor. Those of rare storages are
made from the same parts, and tests that decode every storage without kernels are quick. One of the storages
in DRAWN is compiled for each commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest

from plait.ops.linear import FLOATS, KINDS, STORED

COMMON = frozenset(
    {
        *("Q8_0", "Q4_1", "Q4_K", "Q6_K"),  # of GGUF: plain blocks, a minimum, scales of scales, six bits
        *("int4_g128", "int4_g64", "mxfp4"),  # of safetensors: groups, with zero points and an order, a table
        *FLOATS,
    }
)
DRAWN = ("int4_g128", "int4_g64", "mxfp4")
ALL = frozenset(kind.partition("+")[0] for kind in (*KINDS, *STORED, *FLOATS))


def is_rare(storage: object) -> bool:
    """Whether a storage's kernels are left to `make test-all`; plain dtypes are no storage."""
    name = str(storage).partition("+")[0]
    return name in ALL and name not in COMMON


def marks_of(storage: object) -> list[Any]:
    """The marks of a test that compiles a storage's kernels."""
    name = str(storage).partition("+")[0]
    if is_rare(name):
        return [pytest.mark.slow]
    return [pytest.mark.drawn(name, DRAWN)] if name in DRAWN else []


def mark_rare(storages: Iterable[str]) -> list[Any]:
    """The storages as parameters: those that are rare are slow, and some are for one commit in three."""
    return [pytest.param(one, marks=marks_of(one)) for one in storages]
