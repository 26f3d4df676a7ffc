"""Loops over weights have as many stages as a GPU's shared memory holds."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed here")

from plait.kernels.triton.linear import heads, one_form
from plait.kernels.triton.linear.linear import PlanesTiling, dense_constants
from plait.kernels.triton.linear.plane_forms import EVERY
from plait.kernels.triton.moe.grouped_experts import product_tile
from plait.kernels.triton.moe.plane_experts import UNITS, pair_tile
from plait.kernels.triton.shared_memory import LEAST_SHARED, LoopMemory, dense_memory, plane_memory
from plait.ops.chip import EXAMPLES

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def list_loops(limit: int) -> Iterator[tuple[str, dict[str, Any], LoopMemory]]:
    """(what, constants, memory) of each loop over planes and over plain numbers, at most `limit` bytes."""
    for name, (layout, _) in EVERY.items():
        tiling = PlanesTiling(layout, 4096, 4096)
        few = [tiling.few_constants(rows, "", limit) for rows in (8, 16)]
        few += [one_form.planes_form(tiling, limit), heads._row_constants(tiling, 16, limit)]
        few += [pair_tile(layout, each, limit) | {"UNITS": UNITS} for each in (0, 8, 16, 64)]
        few += [tiling.many_constants(rows, limit) for rows in (17, 512)]
        for made in few:
            yield name, made, plane_memory(layout, made["UNITS"], made["BN"], made["BM"])
    for dtype in DTYPES:
        for rows in (8, 16):
            made = dense_constants(4096, 4096, rows, "", dtype, limit)
            yield f"plain, {dtype}", made, dense_memory(made["UNITS"] * made["UNIT"], made["BN"], rows, dtype)
        for rows, gated in product((16, 64, 128), (False, True)):
            made = product_tile(rows, gated, dtype, limit)
            columns = made["BN"] * (2 if gated else 1)
            yield f"groups, {dtype}", made, dense_memory(made["BK"], columns, rows, dtype)


@pytest.mark.parametrize("limit", sorted({48 << 10, *(chip.shared_nbytes for chip in EXAMPLES.values())}))
def test_every_loop_fits_into_the_shared_memory_of_a_gpu(limit: int) -> None:
    """48 KiB are what any GPU has; no kernel is left unbound for want of memory, stages are fewer."""
    for name, made, memory in list_loops(limit):
        assert made["num_stages"] >= 1
        assert memory.nbytes(made["num_stages"]) <= min(limit, LEAST_SHARED), (name, made)


def test_less_shared_memory_changes_stages_alone() -> None:
    """So tiles, and with them the order of sums, are the same on every GPU."""
    fewer = 0
    for (name, small, _), (_, large, _) in zip(list_loops(48 << 10), list_loops(227 << 10), strict=True):
        assert {**small, "num_stages": 0} == {**large, "num_stages": 0}, name
        assert small["num_stages"] <= large["num_stages"]
        fewer += small["num_stages"] < large["num_stages"]
    assert fewer > 10
