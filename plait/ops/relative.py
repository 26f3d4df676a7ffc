"""Attention with a bias that each query makes for each distance (Inkling): profiles over distances, mixed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.ops.attention import (
    BLOCK,
    SEQS,
    causal_mask,
    paged_case,
    positions_ahead,
    random_cache,
    read_paged,
    visible,
    write_paged,
)
from plait.ops.case import Case
from plait.ops.registry import Arguments, op

CASES: list[Case] = [
    dict(seqs=[1], heads=4, kv_heads=2, dim=16, size=4, pairs=3),
    dict(seqs=SEQS, heads=6, kv_heads=3, dim=20, size=5, pairs=6),
    dict(seqs=SEQS, heads=4, kv_heads=2, dim=10, size=9, pairs=5, window=9),
    dict(seqs=[150, 3], heads=19, kv_heads=1, dim=24, size=200, pairs=4, kv_dtype="bfloat16"),
    dict(seqs=SEQS, heads=6, kv_heads=2, dim=10, size=9, pairs=5, sinks=True),
    dict(seqs=[70, 1, 3], heads=4, kv_heads=2, dim=16, size=5, pairs=3, window=9, sinks=True),
    dict(seqs=[90, 1, 3], heads=6, kv_heads=2, dim=16, size=128, pairs=1),
]


@op(cases=CASES, private=("k_cache", "v_cache"), is_product=True)
def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mixed: Tensor,
    profiles: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
) -> Tensor:
    """`paged_attention`, with mixed_h · profiles[distance] added to its scores, where there is such.

    mixed: [T, heads, m], or one row for all of them as a view, in q's dtype or float32; profiles:
    [distances, m] float32, of distance 0 first; sinks: [T, heads], rows may lie apart, the score of no token
    in each softmax; the rest as in `paged_attention` -> [T, heads, d].
    """
    write_paged(k_cache, k, slot_mapping)
    write_paged(v_cache, v, slot_mapping)
    out, most = torch.empty_like(q), len(profiles)
    for s, rows, start, end in visible(q, (query_start, seq_lens), window):
        keys = read_paged(k_cache, block_table[s], start, end).float()
        values = read_paged(v_cache, block_table[s], start, end).float()
        count = rows.stop - rows.start
        grouped = q[rows].float().unflatten(1, (keys.shape[1], -1))  # [n, kv, g, d]
        scores = (torch.einsum("nkgd,tkd->kgnt", grouped, keys) * scale).flatten(0, 1)
        behind = -positions_ahead(count, start, end, q.device)
        bias = torch.einsum("nhm,em->hne", mixed[rows].float(), profiles)
        bias = bias.gather(2, behind.clamp(0, most - 1).expand(len(bias), -1, -1))
        scores = scores + bias.masked_fill(behind >= most, 0.0)
        mask = causal_mask(count, start, end, window, q.device)
        scores = scores.masked_fill(~mask, -math.inf)
        if sinks is not None:
            scores = torch.cat([scores, sinks[rows].float().T[..., None]], -1)
        probs = scores.softmax(-1)[..., : end - start].unflatten(0, (keys.shape[1], -1))
        out[rows] = torch.einsum("kgnt,tkd->nkgd", probs, values).flatten(1, 2).to(q.dtype)
    return out


@relative_attention.inputs
def _attention_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, kv, dim = sum(case["seqs"]), case["kv_heads"], case["dim"]
    q, k, v = (torch.randn(total, n, dim, dtype=dtype, device=device) for n in (case["heads"], kv, kv))
    caches = [random_cache((num_blocks, BLOCK, kv, dim), case, dtype, device) for _ in "kv"]
    mixed = torch.randn(total, case["heads"], case["pairs"], dtype=dtype, device=device)
    if case["pairs"] == 1:  # the same for all tokens (Step 1)
        mixed = mixed[:1].float().expand(total, -1, -1)
    profiles = torch.randn(case["size"], case["pairs"], device=device)
    sinks = None
    if "sinks" in case:
        sinks = torch.randn(total, 2 * case["heads"], dtype=dtype, device=device).chunk(2, -1)[1]
    return (q, k, v, mixed, profiles, *caches, *where, dim**-0.5, case.get("window"), sinks), {}
