"""The short convolution in front of a state-space scan, over a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.activation import activate
from plait.ops.case import RecurrentCase
from plait.ops.registry import Arguments, TensorFn, op

SEQS = [(1, True), (1, True), (1, False), (2, True), (11, False), (5, True)]  # (new tokens, has history)
CASES: list[RecurrentCase] = [
    dict(seqs=[(1, True)], channels=24, kernel=4, bias=True),
    dict(seqs=SEQS, channels=40, kernel=4, bias=True),
    dict(seqs=SEQS, channels=8, kernel=3, bias=False),
    dict(seqs=[(1, True)] * 5, channels=130, kernel=4, bias=True),
]


@op(cases=CASES)
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    """Depthwise causal convolution of every sequence, continued from its tail; then SiLU. Gu & Dao 2023.

    x: [T, C], weight: [C, K], bias: [C], tail: [num_slots, K-1, C] (the last K-1 raw inputs, oldest first;
    updated in place), slots: [S], query_start: [S+1], has_history: [S] -> [T, C] in x's dtype, computed in
    float32. A sequence without history starts from zeros, whatever its slot holds. `activation`: "silu"/None.
    """
    past, seqs = weight.shape[1] - 1, len(slots)
    rows = torch.arange(len(x), device=x.device)
    owner = torch.repeat_interleave(
        torch.arange(seqs, device=x.device), query_start.diff(), output_size=len(x)
    )
    at = rows + past * (owner + 1)  # each sequence's inputs, its tail in front of them
    reach = torch.arange(past, device=x.device)
    padded = torch.zeros(len(x) + past * seqs, x.shape[1], dtype=x.dtype, device=x.device)
    begin = query_start[:-1] + past * torch.arange(seqs, device=x.device)
    history = torch.where(has_history[:, None, None], tail[slots], torch.zeros_like(tail[:1])).to(x.dtype)
    padded[begin[:, None] + reach] = history
    padded[at] = x
    out = torch.zeros(1, x.shape[1], device=x.device) if bias is None else bias.float()[None]
    taps = weight.float().T.contiguous()
    for k, tap in enumerate(taps):  # over all rows at once: those that cross sequences go unread
        out = torch.addcmul(out, padded[k : len(padded) - past + k].float(), tap)
    out = out[at - past]
    end = query_start[1:] + past * torch.arange(seqs, device=x.device)
    tail[slots] = padded[end[:, None] + reach].to(tail.dtype)
    return (F.silu(out) if activation == "silu" else out).to(x.dtype)


@causal_conv.replaces(causal_conv, activate)
def _conv_then_activation(
    conv: TensorFn,
    activate: TensorFn,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    tail: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    activation: str | None = "silu",
) -> Tensor:
    out = conv(x, weight, bias, tail, slots, query_start, has_history, None)
    return activate(out, activation, False) if activation else out


@causal_conv.inputs
def _inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, query_start, has_history, num_slots = ragged_case(case["seqs"], device)
    channels, kernel = case["channels"], case["kernel"]
    x = torch.randn(int(query_start[-1]), channels, dtype=dtype, device=device)
    weight = torch.randn(channels, kernel, dtype=dtype, device=device) / kernel**0.5
    bias = torch.randn(channels, dtype=dtype, device=device) if case["bias"] else None
    tail = torch.randn(num_slots, kernel - 1, channels, dtype=dtype, device=device)
    return (x, weight, bias, tail, slots, query_start, has_history), {}


def ragged_case(seqs: Sequence[tuple[int, bool]], device: str) -> tuple[Tensor, Tensor, Tensor, int]:
    """(slots, query_start, has_history, num_slots) of sequences given as (new tokens, has history).

    Slots are shuffled, and slot 0 belongs to no sequence. The `cases` of every recurrent op share this.
    """
    slots = torch.randperm(len(seqs) + 1) + 1
    starts = torch.tensor([0, *(n for n, _ in seqs)]).cumsum(0)
    history = torch.tensor([has for _, has in seqs])
    return slots[: len(seqs)].to(device), starts.to(device), history.to(device), len(seqs) + 2
