"""Short convolutions with taps that each token makes for itself (JetBlock; Gu et al. 2025)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.case import RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.registry import Arguments, op

SEQS = [(1, True), (1, True), (1, False), (2, False), (40, False), (3, True), (17, True)]
CASES: list[RecurrentCase] = [
    dict(seqs=[(1, True)], channels=16, kernel=4),
    dict(seqs=SEQS, channels=37, kernel=4),
    dict(seqs=SEQS, channels=80, kernel=3),
]


@op(cases=CASES)
def dynamic_conv(
    x: Tensor, taps: Tensor, tail: Tensor, slots: Tensor, query_start: Tensor, has_history: Tensor
) -> Tensor:
    """y[t] = silu(Σ_k taps[t, k] x[t - K + 1 + k]), channel by channel, continued from a sequence's tail.

    x: [T, C], rows may lie apart, taps: [T, K · C], the oldest tap first, tail: [num_slots, K-1, C] in place
    -> [T, C] in x's dtype. The rest as in `causal_conv`.
    """
    weights = taps.float().unflatten(-1, (-1, x.shape[1]))
    return F.silu(_convolve(x, weights, tail, (slots, query_start, has_history))).to(x.dtype)


def _convolve(x: Tensor, weights: Tensor, tail: Tensor, where: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Σ_k weights[t, k] x[t - K + 1 + k] in float32, weights: [T, K, C]; the tail moves on."""
    slots, query_start, has_history = where
    past, seqs = tail.shape[1], len(slots)
    rows, starts = torch.arange(len(x), device=x.device), query_start[:-1]
    owner = torch.repeat_interleave(
        torch.arange(seqs, device=x.device), query_start.diff(), output_size=len(x)
    )
    kept = torch.where(has_history[:, None, None], tail[slots], torch.zeros_like(tail[:1])).to(x.dtype)
    whole = torch.cat([kept.flatten(0, 1), x])  # all tails, then all rows
    out = torch.zeros(x.shape, device=x.device)
    reach = torch.arange(past, device=x.device)

    def place(at: Tensor, owner: Tensor) -> Tensor:
        """Of the input `at` rows behind its sequence's first, where it is in `whole`."""
        return torch.where(at < 0, past * owner + past + at, past * seqs + starts[owner] + at)

    for k in range(past + 1):
        at = rows - starts[owner] - past + k
        out = torch.addcmul(out, weights[:, k], whole[place(at, owner)].float())
    last = (query_start.diff()[:, None] - past + reach).flatten()
    every = torch.arange(seqs, device=x.device).repeat_interleave(past)
    tail[slots] = whole[place(last, every)].unflatten(0, (seqs, past)).to(tail.dtype)
    return out


@dynamic_conv.inputs
def _inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, channels, kernel = int(query_start[-1]), case["channels"], case["kernel"]
    x = torch.randn(total, 2 * channels, dtype=dtype, device=device).chunk(2, -1)[0]
    taps = torch.randn(total, kernel * channels, dtype=dtype, device=device) / kernel**0.5
    tail = torch.randn(num_slots, kernel - 1, channels, dtype=dtype, device=device)
    return (x, taps, tail, slots, query_start, has_history), {}


HEADS: list[RecurrentCase] = [
    dict(seqs=[(1, True)], heads=2, dim=16, kernel=4),
    dict(seqs=SEQS, heads=3, dim=10, kernel=3),
    dict(seqs=SEQS, heads=2, dim=40, kernel=4),
]


@op(cases=HEADS)
def head_conv(
    x: Tensor,
    taps: Tensor,
    fixed: Tensor,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    scale: float,
) -> Tensor:
    """y[t] = Σ_k (fixed[k] + scale · taps[t, head, k]) x[t - K + 1 + k], channel by channel (Inkling 2).

    A token makes K taps for each head, and the channels of a head share them. x: [T, C], taps: [T, H · K],
    the oldest tap of a head first; rows of both may lie apart. fixed: [K, C] float32, tail: [num_slots, K-1,
    C] in place -> [T, C] in x's dtype. The rest as in `causal_conv`.
    """
    heads, kernel = taps.shape[1] // len(fixed), len(fixed)
    own = taps.float().unflatten(-1, (heads, kernel)).mT.repeat_interleave(x.shape[1] // heads, -1)
    return _convolve(x, fixed + scale * own, tail, (slots, query_start, has_history)).to(x.dtype)


@head_conv.inputs
def _head_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    total, heads, kernel = int(query_start[-1]), case["heads"], case["kernel"]
    channels = heads * case["dim"]
    x = torch.randn(total, 2 * channels, dtype=dtype, device=device).chunk(2, -1)[0]
    taps = torch.randn(total, 2 * heads * kernel, dtype=dtype, device=device).chunk(2, -1)[1]
    fixed = torch.randn(kernel, channels, device=device) / kernel**0.5
    tail = torch.randn(num_slots, kernel - 1, channels, dtype=dtype, device=device)
    return (x, taps, fixed, tail, slots, query_start, has_history, 0.4), {}
