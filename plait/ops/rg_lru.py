"""Griffin's real-gated linear recurrent unit over a ragged batch: every channel is a number of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.ops.case import RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.registry import Arguments, op
from plait.ops.ssm import SHORT_SEQS, begin, pieces
from plait.ops.state_rounding import decode_state, encode_state, require_positions

CASES: list[RecurrentCase] = [
    dict(seqs=[(1, True)], decodes=1, heads=2, dim=16),
    dict(seqs=SHORT_SEQS, decodes=2, heads=3, dim=7),
    dict(seqs=SHORT_SEQS, decodes=2, heads=2, dim=90),
]


@op(cases=CASES)
def rg_lru(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    rate: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    positions: Tensor | None = None,
) -> Tensor:
    """a = exp(rate · r); h ← a h + √(1 - a²) i x, with i and r the sigmoids of the gates. De et al. 2024.

    x: [T, W], gates: [T, H, 2 W/H] (of each head the input's, then the recurrence's), bias: [H, 2 W/H], rate:
    [W] (negative), state: [num_slots, W] float32 or bfloat16, in place -> h [T, W] in x's dtype. A sequence's
    first token is taken in whole: h = i x. positions: [T], of the rows in their sequences, by which a
    bfloat16 state is rounded.
    """
    both = (gates.float() + bias.float()).sigmoid()
    enter, recur = (half.flatten(1) for half in both.chunk(2, -1))  # [T, W]
    log_a = rate.float() * recur
    a, kept, u = log_a.exp(), (-torch.expm1(2 * log_a)).sqrt(), enter * x.float()
    out, at = torch.empty_like(u), require_positions(positions, query_start, state.dtype)
    if num_decodes:
        first, own = slice(num_decodes), slots[:num_decodes]
        out[first] = a[first] * decode_state(state[own]) + kept[first] * u[first]
        state[own] = encode_state(out[first], at[first], state.dtype)
    for rows, slot, past in pieces(slots, query_start, has_history, num_decodes):
        h = begin(state, slot, past)
        for t in range(rows.start, rows.stop):
            is_first = not past and t == rows.start
            out[t] = u[t] if is_first else a[t] * decode_state(h) + kept[t] * u[t]
            h = encode_state(out[t], at[t], state.dtype)
        state[slot] = h
    return out.to(x.dtype)


@rg_lru.inputs
def _inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, heads, dim = int(query_start[-1]), case["heads"], case["dim"]
    x = torch.randn(total, heads * dim, dtype=dtype, device=device)
    gates = torch.randn(total, heads, 2 * dim, dtype=dtype, device=device)
    bias, rate = torch.randn(heads, 2 * dim, device=device), -8 * torch.rand(heads * dim, device=device)
    state = torch.randn(num_slots, heads * dim, device=device)
    return (x, gates, bias, rate, state, slots, query_start, has_history, case["decodes"]), {}
