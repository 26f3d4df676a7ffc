"""What requests forbid, favour and penalise: logits edited before a token is chosen from them.

A row's edits are lines of tables that all rows share. Line 0 of each changes nothing, so every row has the
same work, and rows without edits read one line that lies in the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.registry import Arguments, op

IN_PROMPT = 1  # the lowest bit of a count: the token is in the prompt
PER_OUTPUT = 2  # what each time that a token was generated adds to its count
NO_STOP = -1
CASES: list[Case] = [
    dict(rows=1, vocab_size=7),
    dict(rows=4, vocab_size=300),
    dict(rows=9, vocab_size=5000),
]


@op(cases=CASES, tolerance={torch.float32: 0.0})
def edit_logits(
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
    """logits: [L, vocab] float32, not changed -> edited [L, vocab] float32.

    lines: [3, L] int64, each row's line of `masks`, `biases` and `counts`. masks: [lines, words] int32, one
    bit for each token that may be sampled, the lowest bit first. biases: [lines, vocab] float32.
    counts: [lines, vocab] int32, of each token `IN_PROMPT` and `PER_OUTPUT` for each time it was generated.
    penalties: [3, L] float64, used as float32: repetition (CTRL, Keskar et al. 2019), presence, frequency.
    stops: [L, n] int64, or `NO_STOP`: forbidden while `position` < `until`, both [L] int64.

    First masks and stops, then biases, then penalties: of repetition what prompt and output have, of the
    other two the output alone.
    """
    token = torch.arange(logits.shape[1], device=logits.device)
    allowed = (masks[lines[0]][:, token // 32] >> (token % 32)) & 1
    values = logits.float().masked_fill(allowed == 0, -torch.inf)
    early = (stops[:, :, None] == token).any(1) & (position < until)[:, None]
    values = values.masked_fill(early, -torch.inf) + biases[lines[1]]
    count = counts[lines[2]]
    repetition, presence, frequency = (row[:, None] for row in penalties.float())
    again = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(count > 0, again, values)
    output = count // PER_OUTPUT
    return torch.where(output > 0, values - frequency * output - presence, values)


@op(cases=CASES, tolerance={torch.float32: 0.0})
def count_tokens(ids: Tensor, position: Tensor, lines: Tensor, counts: Tensor) -> Tensor:
    """What a token drawn in each row changes, in place: the next one's position [L], and `counts`.

    ids, lines: [L] int64; a row of line 0 is not counted, and no two rows have another line in common.
    """
    added = (lines > 0).to(counts.dtype) * PER_OUTPUT
    counts.index_put_((lines, ids.clamp(0, counts.shape[1] - 1)), added, accumulate=True)
    return position.add_(1)


@count_tokens.inputs
def _count_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    rows, vocab = case["rows"], case["vocab_size"]
    counts = torch.randint(0, 9, (rows + 1, vocab), dtype=torch.int32)
    lines, ids = torch.arange(rows) * (torch.arange(rows) % 3 > 0), torch.randint(vocab, (rows,))
    position = torch.randint(0, 1000, (rows,))
    return (ids.to(device), position.to(device), lines.to(device), counts.to(device)), {}


@edit_logits.inputs
def _inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    rows, vocab, lines = case["rows"], case["vocab_size"], 4
    logits = torch.randn(rows, vocab, dtype=dtype)
    masks = torch.randint(-(2**31), 2**31 - 1, (lines, -(-vocab // 32)), dtype=torch.int32)
    biases, counts = torch.randn(lines, vocab).round(decimals=1), torch.randint(0, 9, (lines, vocab))
    masks[0], biases[0], counts[0] = -1, 0.0, 0
    penalties = torch.rand(3, rows, dtype=torch.float64) + 0.5
    stops = torch.randint(NO_STOP, vocab, (rows, 3))
    grid = torch.arange(rows)
    which = torch.stack([grid % lines, grid // 2 % lines, (grid + 1) % lines])
    tensors = (logits, which, masks, biases, counts.int(), penalties, stops, grid % 3, torch.ones_like(grid))
    return tuple(t.to(device) for t in tensors), {}
