"""A decode step's buffers move on in one launch each: where entries go, and what was sampled.

One program takes BLOCK rows; a row is read and written by one thread, so there is no order to keep.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm
from plait.ops.launch import launch
from plait.ops.step import locate_tokens, move_rows_on

NAME = "triton"
BLOCK = 128  # rows of a program


@triton.jit
def _locate(positions, table, out, rows, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Flat addresses of the rows' next entries."""
    await_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    position = tl.load(positions + row, mask, other=0)
    block = tl.load(table + row.to(tl.int64) * stride + position // SIZE, mask, other=0)
    tl.store(out + row, block * SIZE + position % SIZE, mask)


@triton.jit
def _move_on(
    ids, values, active, token_ids, positions, seq_lens, answers, rows, stride, BLOCK: tl.constexpr
):  # fmt: skip
    """Tokens, positions and lengths of active rows, and every row's answer."""
    await_previous()
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = row < rows
    token, step = tl.load(ids + row, mask, other=0), tl.load(active + row, mask, other=0)
    tl.store(answers + row, token.to(tl.float64), mask)
    tl.store(answers + stride + row, tl.load(values + row, mask, other=0.0).to(tl.float64), mask)
    tl.store(token_ids + row, token, mask & (step > 0))
    tl.store(positions + row, tl.load(positions + row, mask, other=0) + step, mask)
    tl.store(seq_lens + row, tl.load(seq_lens + row, mask, other=0) + step, mask)


@locate_tokens.variant(NAME, on="cuda")
def _locate_tokens(positions: Tensor, table: Tensor, block_size: int) -> Tensor:
    out, rows = positions.new_empty(positions.shape), positions.shape[0]
    grid = (triton.cdiv(rows, BLOCK),)
    launch(_locate, grid, positions, table, out, rows, table.stride(0), SIZE=block_size, BLOCK=BLOCK)
    return out


@move_rows_on.variant(NAME, on="cuda")
def _move_rows_on(
    ids: Tensor,
    values: Tensor,
    active: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    answers: Tensor,
) -> Tensor:
    rows = ids.shape[0]
    grid, buffers = (triton.cdiv(rows, BLOCK),), (active, token_ids, positions, seq_lens, answers)
    launch(_move_on, grid, ids, values, *buffers, rows, answers.stride(0), BLOCK=BLOCK)
    return answers


def forms() -> Iterator[KernelForm]:
    """Both kernels, which have one form for each block size."""
    longs = dict.fromkeys(("ids", "active", "token_ids", "positions", "seq_lens", "table", "out"), "i64*")
    for size in (16, 64):
        types = {**{name: longs[name] for name in ("positions", "table", "out")}, "stride": "i32"}
        yield KernelForm(f"locate_tokens {size}", _locate, types, {"SIZE": size, "BLOCK": BLOCK})
    types = {name: longs[name] for name in ("ids", "active", "token_ids", "positions", "seq_lens")}
    types |= {"values": "fp32*", "answers": "fp64*", "rows": "i32", "stride": "i32"}
    yield KernelForm("move_rows_on", _move_on, types, {"BLOCK": BLOCK})
