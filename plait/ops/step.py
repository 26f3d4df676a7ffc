"""What moves a decode step's buffers on, so that the next step needs nothing of the host.

A row is the place of a sequence in static buffers. `active` is 1 for a row with a sequence and 0 for padding,
which stays where it is: at position 0 of block 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.registry import Arguments, op

CASES: list[Case] = [
    dict(rows=1, blocks=3),
    dict(rows=5, blocks=8),
    dict(rows=300, blocks=2),
]
EXACT = {torch.float32: 0.0}


@op(cases=CASES, tolerance=EXACT)
def locate_tokens(positions: Tensor, table: Tensor, block_size: int) -> Tensor:
    """Where each row's next entry goes: positions [S] int64, block table [S, M] -> flat addresses [S]."""
    block = table.gather(1, (positions // block_size)[:, None])[:, 0]
    return block * block_size + positions % block_size


@locate_tokens.inputs
def _locate_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    rows, blocks = case["rows"], case["blocks"]
    positions = torch.randint(0, 16 * blocks, (rows,), device=device)
    return (positions, torch.randint(0, 1000, (rows, blocks), device=device), 16), {}


@op(cases=CASES, tolerance=EXACT)
def move_rows_on(
    ids: Tensor,
    values: Tensor,
    active: Tensor,
    token_ids: Tensor,
    positions: Tensor,
    seq_lens: Tensor,
    answers: Tensor,
) -> Tensor:
    """After a draw, in place: ids and largest logits become the rows' next tokens and answers.

    ids: [S] int64, values: [S] float32, active, token_ids, positions, seq_lens: [S] int64; answers: [2, S]
    float64, which has ids exactly, is returned. Rows that are not active keep all but their answer.
    """
    answers[0].copy_(ids)
    answers[1].copy_(values)
    token_ids.copy_(torch.where(active > 0, ids, token_ids))
    positions.add_(active)
    seq_lens.add_(active)
    return answers


@move_rows_on.inputs
def _move_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    rows = case["rows"]
    ids, token_ids, positions = (torch.randint(0, 2**31, (rows,), device=device) for _ in range(3))
    active = torch.randint(0, 2, (rows,), device=device)
    answers = torch.zeros(2, rows, dtype=torch.float64, device=device)
    values = torch.randn(rows, device=device)
    return (ids, values, active, token_ids, positions, positions + 1, answers), {}
