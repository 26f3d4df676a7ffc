"""Log-probabilities of a model's logits."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.registry import Arguments, op

CASES: list[Case] = [dict(rows=1, vocab_size=7), dict(rows=3, vocab_size=3001)]


@op(cases=CASES, tolerance={torch.float32: 2e-6})
def log_probabilities(logits: Tensor, rows: Tensor) -> Tensor:
    """logits: [L, vocab] float, rows: [n] int64 -> log softmax of these rows, [n, vocab] float32.

    A row's bits depend on that row alone.
    """
    return logits[rows].float().log_softmax(-1)


@log_probabilities.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    logits = torch.randn(case["rows"] + 2, case["vocab_size"], dtype=dtype) * 5
    logits[:, 1::7] = -100.0
    rows = torch.randint(len(logits), (case["rows"],))
    return (logits.to(device), rows.to(device)), {}
