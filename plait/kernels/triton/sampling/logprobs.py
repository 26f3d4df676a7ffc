"""Log-probabilities of some rows of logits, in one launch with one program a row.

A row is read three times, of which two find it in the cache: for its largest logit, for the sum, and for the
result. Each lane adds its own columns in their order, and lanes are added in one tree, so a row has the same
bits at any place; in torch's kernel they depend on how the row is aligned.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm
from plait.ops.launch import launch
from plait.ops.logprobs import log_probabilities

NAME = "triton"
TILE = 4096


@triton.jit
def score_rows(logits, rows, out, logits_row, out_row, vocab, TILE: tl.constexpr):
    """logits: [L, vocab], rows: [n] -> out [n, vocab] float32. Grid: (n,)."""
    await_previous()
    row, lane = tl.program_id(0).to(tl.int64), tl.arange(0, TILE)
    line = logits + tl.load(rows + row) * logits_row
    largest, total = tl.full([TILE], -float("inf"), tl.float32), tl.zeros([TILE], tl.float32)
    for at in range(0, vocab, TILE):
        there = at + lane < vocab
        value = tl.load(line + at + lane, mask=there, other=-float("inf")).to(tl.float32)
        largest = tl.maximum(largest, value)
    top = tl.max(largest, 0)
    for at in range(0, vocab, TILE):
        there = at + lane < vocab
        value = tl.load(line + at + lane, mask=there, other=-float("inf")).to(tl.float32)
        total += tl.exp(value - top)
    log_total = tl.log(tl.sum(total, 0))
    for at in range(0, vocab, TILE):
        there = at + lane < vocab
        value = tl.load(line + at + lane, mask=there, other=0.0).to(tl.float32)
        tl.store(out + row * out_row + at + lane, (value - top) - log_total, mask=there)


@log_probabilities.variant(NAME, on="cuda")
def score(logits: Tensor, rows: Tensor) -> Tensor:
    """`log_probabilities`: the same arguments and result."""
    vocab = logits.shape[1]
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    width = triton.cdiv(vocab, 16) * 16
    out = torch.empty(len(rows), width, dtype=torch.float32, device=logits.device)[:, :vocab]
    if len(rows):
        launch(
            score_rows, (len(rows),), logits, rows, out, logits.stride(0), width, vocab, TILE=TILE,
            num_warps=8,
        )  # fmt: skip
    return out


POINTERS = {
    "logits": "fp32*", "rows": "i64*", "out": "fp32*", "logits_row": "i32!", "out_row": "i32!",
    "vocab": "i32!",
}  # fmt: skip


def forms() -> Iterator[KernelForm]:
    """The kernel: vocabularies differ in no constant."""
    yield KernelForm(
        "score_rows", score_rows, POINTERS, {"TILE": TILE}, num_warps=8, demands=(("LDG.128", "LDGSTS.128"),)
    )
