"""Recurrent state in fewer bits: rounded after every token, by a rule that knows only position and place.

A state is rounded once per token, whatever else shares the step and wherever a prompt is cut. So a chunk, a
batch, a snapshot and a restart have the same bits. What a token puts out is computed before its rounding.

Nearest rounding would lose what a slowly decaying state adds: a sum stops growing where its terms are below
half a step. So rounding is stochastic. The threshold of number (row, column) after the token at a position
is the fraction of mix(position) + row · ROW_STEP + column · COLUMN_STEP, in units of 2^32. It is even over
positions, so rounding has no bias; over the numbers of one state it is a lattice, more even than chance.

A row of int8 is bytes: [codes, one for each column; a bfloat16 scale for every STATE_GROUP of them]. A scale
is a little more than the largest magnitude of its group / 127. A largest number above 127 steps would be cut
off in every token, which is a decay of its own. A number over its scale is rounded to 2^-15 of a step, and
the upper 15 bits of its threshold are added before what is below a step is dropped.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

# The two-dimensional sequence of least discrepancy of Roberts (2018): powers of the inverse plastic number.
ROW_STEP, COLUMN_STEP = 0x91E10DA5, 0xC13FA9A9
# The finalizer of MurmurHash3 (Appleby), behind a multiple of the golden ratio.
GOLDEN, FIRST, SECOND = 0x9E3779B9, 0x85EBCA6B, 0xC2B2AE35
WORD = 0xFFFFFFFF
STATE_GROUP = 64  # columns of a row under one scale
LARGEST, SCALE_NBYTES = 127, 2
# Of the largest magnitude; times 1 + 2^-8, so that rounding to the nearest bfloat16 makes no scale too small.
WIDEST_STEP = float(torch.tensor((1 + 2**-8) / LARGEST))
STEP_BITS = 15  # of a number between two codes
LEAST_SCALE = 2.0**-110  # numbers under a smaller one are kept as zeros: 2^15 over it must be finite
Where = tuple[Tensor, Tensor, Tensor, int]  # slots, query_start, has_history, num_decodes
Move = Callable[[Tensor, "slice | int"], Tensor]  # (states, rows of their tokens) -> states after them


def mix_positions(positions: Tensor) -> Tensor:
    """Whole numbers -> int64 in 0 … 2^32 - 1, each as good as drawn."""
    x = positions.long() * GOLDEN & WORD
    x = x ^ x >> 16
    x = x * FIRST & WORD
    x = x ^ x >> 13
    x = x * SECOND & WORD
    return x ^ x >> 16


def draw_thresholds(positions: Tensor, shape: Sequence[int]) -> Tensor:
    """Of every number of a state of that shape, [*positions, *shape] int64 in 0 … 2^32 - 1."""
    rows, columns = math.prod(shape[:-1]), shape[-1]
    count = torch.arange(max(rows, columns), device=positions.device)
    place = (count[:rows, None] * ROW_STEP + count[:columns] * COLUMN_STEP).view(*shape)
    return mix_positions(positions).view(*positions.shape, *[1] * len(shape)) + place & WORD


def encode_state(h: Tensor, positions: Tensor, dtype: torch.dtype) -> Tensor:
    """What is kept of float32 states [*positions, *shape] after the tokens at these positions.

    bfloat16: the upper half of h's bits, after the upper half of the threshold is added to the lower one.
    float32: h itself. int8: codes and scales, [*positions, *shape[:-1], row_nbytes(shape[-1])].
    """
    if dtype == torch.float32:
        return h
    if dtype == torch.int8:
        return _encode_rows(h, draw_thresholds(positions, h.shape[positions.dim() :]))
    bits = h.contiguous().view(torch.int32).long() & WORD
    kept = bits + (draw_thresholds(positions, h.shape[positions.dim() :]) >> 16) & 0xFFFF0000
    kept = torch.where(kept > 0x7FFFFFFF, kept - (1 << 32), kept)
    return torch.where(h.isnan(), h, kept.int().view(torch.float32)).to(dtype)


def decode_state(kept: Tensor) -> Tensor:
    """float32 states of what was kept."""
    if kept.dtype != torch.int8:
        return kept.float()
    columns = kept.shape[-1] - SCALE_NBYTES * -(-kept.shape[-1] // (STATE_GROUP + SCALE_NBYTES))
    scales = kept[..., columns:].contiguous().view(torch.bfloat16).float()
    return kept[..., :columns].float() * scales.repeat_interleave(STATE_GROUP, -1)[..., :columns]


def row_nbytes(columns: int) -> int:
    """Bytes of a row of so many columns in int8."""
    return columns + SCALE_NBYTES * -(-columns // STATE_GROUP)


def _encode_rows(h: Tensor, thresholds: Tensor) -> Tensor:
    """float32 [..., n] -> int8 [..., row_nbytes(n)]; thresholds: as h, of 32 bits."""
    codes, scales, draws = [], [], thresholds >> 32 - STEP_BITS
    for part, draw in zip(h.split(STATE_GROUP, -1), draws.split(STATE_GROUP, -1), strict=True):
        top = part.abs().amax(-1, keepdim=True)
        scale = (top * WIDEST_STEP + (top - top)).bfloat16()  # no number where one is infinite or none
        inverse = torch.where(scale.float() >= LEAST_SCALE, 2.0**STEP_BITS / scale.float(), 0)
        steps = (part.double() * inverse.double()).nan_to_num().round().long()
        codes.append((steps + draw >> STEP_BITS).clamp(-LARGEST, LARGEST).to(torch.int8))
        scales.append(scale.contiguous().view(torch.int8))
    return torch.cat([*codes, *scales], -1)


def walk_tokens(move: Move, state: Tensor, where: Where, positions: Tensor | None) -> None:
    """Move every sequence's state, in its slot, past its tokens one by one; round it after each.

    state: [num_slots, *shape]; positions: [T], which only a rounded state needs.
    """
    slots, query_start, has_history, num_decodes = where
    at = require_positions(positions, query_start, state.dtype)
    if num_decodes:
        own, first = slots[:num_decodes], slice(num_decodes)
        state[own] = encode_state(move(decode_state(state[own]), first), at[first], state.dtype)
    if num_decodes == len(slots):
        return  # a batch of decodes asks nothing of the device
    starts, owners, history = query_start.tolist(), slots.tolist(), has_history.tolist()
    for s in range(num_decodes, len(owners)):
        kept = state[owners[s]] if history[s] else torch.zeros_like(state[owners[s]])
        for t in range(starts[s], starts[s + 1]):
            kept = encode_state(move(decode_state(kept), t), at[t], state.dtype)
        state[owners[s]] = kept


def require_positions(positions: Tensor | None, query_start: Tensor, dtype: torch.dtype) -> Tensor:
    """The positions; zeros where none are needed and none are given. Raises ValueError without them."""
    if positions is not None:
        return positions
    if dtype != torch.float32:
        raise ValueError(f"a state in {dtype} is rounded by position, and no positions are given")
    return torch.zeros(int(query_start[-1]), dtype=torch.int64, device=query_start.device)
