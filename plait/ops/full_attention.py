"""Attention of whole sequences, all of them or their prompts in both directions."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from plait.ops.case import Case
from plait.ops.registry import Arguments, op

CASES: list[Case] = [
    dict(seqs=[1, 7, 40], heads=4, kv_heads=2, dim=16, window=None, softcap=None),
    dict(seqs=[30, 5], heads=3, kv_heads=1, dim=24, window=6, softcap=20.0),
    dict(seqs=[9, 1, 30], heads=4, kv_heads=2, dim=16, window=None, softcap=None, prompts=[4, 1, 0]),
]


@op(cases=CASES)
def full_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    query_start: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    prompts: Tensor | None = None,
) -> Tensor:
    """Softmax attention of every token over all tokens of its sequence (Devlin et al. 2019).

    q: [T, heads, d], k, v: [T, kv_heads, d], query_start: [S+1], where sequences begin in T; all of each must
    be there -> [T, heads, d]. Query head h reads kv head h // (heads / kv_heads). `window`: only tokens less
    than so many away, on both sides; `softcap`: scores become cap·tanh(·/cap). `prompts`: [S], how many
    tokens of each sequence see one another; those behind them see what is before them (a prefix LM; Raffel
    et al. 2020).
    """
    out, counts = torch.empty_like(q), None if prompts is None else prompts.tolist()
    for n, (start, end) in enumerate(pairwise(query_start.tolist())):
        keys, values = k[start:end].float(), v[start:end].float()
        grouped = q[start:end].float().unflatten(1, (keys.shape[1], -1))  # [n, kv, g, d]
        scores = torch.einsum("nkgd,tkd->kgnt", grouped, keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if window is not None:
            at = torch.arange(end - start, device=q.device)
            scores = scores.masked_fill((at[:, None] - at).abs() >= window, -math.inf)
        if counts is not None:
            at = torch.arange(end - start, device=q.device)
            scores = scores.masked_fill(at > at[:, None].clamp(min=counts[n] - 1), -math.inf)
        attended = torch.einsum("kgnt,tkd->nkgd", scores.softmax(-1), values)
        out[start:end] = attended.flatten(1, 2).to(q.dtype)
    return out


@full_attention.inputs
def _full_attention_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    lengths = torch.tensor([0, *case["seqs"]], device=device)
    total = sum(case["seqs"])
    q = torch.randn(total, case["heads"], case["dim"], dtype=dtype, device=device)
    k, v = (torch.randn(total, case["kv_heads"], case["dim"], dtype=dtype, device=device) for _ in range(2))
    prompts = torch.tensor(case["prompts"], device=device) if case.get("prompts") else None
    return (q, k, v, lengths.cumsum(0), case["dim"] ** -0.5, case["window"], case["softcap"], prompts), {}
