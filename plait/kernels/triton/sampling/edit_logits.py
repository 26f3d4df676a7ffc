"""What requests forbid, favour and penalise, in one launch over all logits, and the counts behind it.

A program edits `TILE` logits of one row. It reads them and a line of each table once, and writes a copy: the
logits stay as the model computed them, for log-probabilities. Tables have a line 0 that changes nothing, so
that rows without edits take the same way. Every operation is rounded as a CPU's, so the logits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm
from plait.ops.edit_logits import count_tokens, edit_logits
from plait.ops.launch import launch

NAME = "triton"
TILE = 2048
ROWS = 256  # of a program that counts
EXACT = {"enable_fp_fusion": False}  # a product is rounded before it is subtracted, as on a CPU


@triton.jit(do_not_specialize=["num_stops", "stops_row"])
def edit_tiles(
    logits, out, lines, masks, biases, counts, penalties, stops, until, position,
    logits_row, out_row, lines_row, masks_row, biases_row, counts_row, penalties_row, stops_row, num_stops,
    vocab, TILE: tl.constexpr,
):  # fmt: skip
    """See `plait.ops.edit_logits`; `*_row` are strides. Grid: (L, tiles)."""
    await_previous()
    row = tl.program_id(0)
    token = tl.program_id(1) * TILE + tl.arange(0, TILE)
    there, far = token < vocab, row.to(tl.int64)
    value = tl.load(logits + far * logits_row + token, mask=there, other=0.0).to(tl.float32)
    mask_line, bias_line = tl.load(lines + row), tl.load(lines + lines_row + row)
    count_line = tl.load(lines + 2 * lines_row + row)
    words = tl.load(masks + mask_line * masks_row + token // 32, mask=there, other=0)
    forbidden = ((words >> (token % 32)) & 1) == 0
    if tl.load(position + row) < tl.load(until + row):
        for i in range(num_stops):
            forbidden = forbidden | (token == tl.load(stops + far * stops_row + i))
    value = tl.where(forbidden, -float("inf"), value)
    value += tl.load(biases + bias_line * biases_row + token, mask=there, other=0.0)
    count = tl.load(counts + count_line * counts_row + token, mask=there, other=0)
    repetition = tl.load(penalties + row).to(tl.float32)
    presence = tl.load(penalties + penalties_row + row).to(tl.float32)
    frequency = tl.load(penalties + 2 * penalties_row + row).to(tl.float32)
    again = tl.where(value > 0, tl.div_rn(value, tl.zeros_like(value) + repetition), value * repetition)
    value = tl.where(count > 0, again, value)
    output = count >> 1
    less = value - frequency * output.to(tl.float32) - presence
    tl.store(out + far * out_row + token, tl.where(output > 0, less, value), mask=there)


@triton.jit(do_not_specialize=["rows"])
def count_rows(ids, position, lines, counts, counts_row, rows, ROWS: tl.constexpr):
    """Adds a drawn token to each row's counts, and 1 to its position. Grid: (programs,)."""
    await_previous()
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    there = row < rows
    tl.store(position + row, tl.load(position + row, mask=there, other=0) + 1, mask=there)
    line = tl.load(lines + row, mask=there, other=0)
    place = counts + line * counts_row + tl.load(ids + row, mask=there, other=0)
    counts_here = there & (line > 0)
    tl.store(place, tl.load(place, mask=counts_here, other=0) + 2, mask=counts_here)


@edit_logits.variant(NAME, on="cuda")
def edit_rows(
    logits: Tensor,
    lines: Tensor,
    masks: Tensor,
    biases: Tensor,
    counts: Tensor,
    penalties: Tensor,
    stops: Tensor,
    until: Tensor,
    position: Tensor,
) -> Tensor:
    """`edit_logits`: the same arguments and result."""
    rows, vocab = logits.shape
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    width = triton.cdiv(vocab, 16) * 16
    out = torch.empty(rows, width, dtype=torch.float32, device=logits.device)[:, :vocab]
    if rows:
        tables = (lines, masks, biases, counts, penalties, stops)
        launch(
            edit_tiles, (rows, triton.cdiv(vocab, TILE)),
            logits, out, *tables, until, position, logits.stride(0), width,
            *(table.stride(0) for table in tables), stops.shape[1], vocab, TILE=TILE, num_warps=8, **EXACT,
        )  # fmt: skip
    return out


@count_tokens.variant(NAME, on="cuda")
def count_drawn(ids: Tensor, position: Tensor, lines: Tensor, counts: Tensor) -> Tensor:
    """`count_tokens`: the same arguments and result."""
    if rows := len(ids):
        launch(
            count_rows, (triton.cdiv(rows, ROWS),), ids, position, lines, counts, counts.stride(0), rows,
            ROWS=ROWS, num_warps=4,
        )  # fmt: skip
    return position


POINTERS = {
    "logits": "fp32*", "out": "fp32*", "ids": "i64*", "lines": "i64*", "masks": "i32*", "biases": "fp32*",
    "counts": "i32*", "penalties": "fp64*", "stops": "i64*", "until": "i64*", "position": "i64*",
    "logits_row": "i32!", "out_row": "i32!", "biases_row": "i32!", "counts_row": "i32!", "vocab": "i32!",
}  # fmt: skip


def forms() -> Iterator[KernelForm]:
    """Both kernels: vocabularies differ in no constant."""
    yield KernelForm(
        "edit_tiles", edit_tiles, POINTERS, {"TILE": TILE}, num_warps=8, demands=(("LDG.128", "LDGSTS.128"),),
        options=EXACT,
    )  # fmt: skip
    yield KernelForm("count_rows", count_rows, POINTERS, {"ROWS": ROWS})
