"""Sparse attention by an indexer (DeepSeek-V3.2): a small attention chooses the keys that a large one reads.

The references go through the sequences one by one, so that a result cannot depend on the batch composition.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.ops.attention import (
    BLOCK,
    SEQS,
    causal_mask,
    paged_case,
    random_cache,
    read_paged,
    share_softmax,
    visible,
    write_paged,
)
from plait.ops.case import Case
from plait.ops.entry import latent_form, latent_width
from plait.ops.registry import Arguments, op

NONE = -1  # in place of a position, behind the last that was chosen

CHOICES: list[dict[str, object]] = [
    dict(seqs=[1], heads=4, index_dim=16, top_k=3),
    dict(seqs=SEQS, heads=5, index_dim=20, top_k=7),
    dict(seqs=[150, 3, 300], heads=8, index_dim=32, top_k=64),
    dict(seqs=[70, 3], heads=3, index_dim=48, top_k=33, kv_dtype="bfloat16"),
]


@op(cases=CHOICES, private=("cache",), is_product=True)
def choose_keys(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
) -> Tensor:
    """Store the new index keys; then the `top_k` positions that each token is to attend to, itself included.

    A key's score is Σ_h weights_h · relu(q_h · k); of equal ones, the earlier is taken. q: [T, heads, d],
    weights: [T, heads], k: [T, d], cache: [blocks, block_size, d], the rest as in `paged_attention` ->
    [T, top_k] int32, rising, then NONE. A positive factor of all scores would change no choice, so there is
    none.
    """
    write_paged(cache, k, slot_mapping)
    chosen = torch.full((len(q), top_k), NONE, dtype=torch.int32, device=q.device)
    for s, rows, start, end in visible(q, (query_start, seq_lens), None, q.shape[1]):
        known = read_paged(cache, block_table[s], start, end).float()
        scores = torch.einsum("nhd,td->nht", q[rows].float(), known).relu()
        scores = torch.einsum("nh,nht->nt", weights[rows].float(), scores)
        mask = causal_mask(rows.stop - rows.start, start, end, None, q.device)
        order = scores.masked_fill(~mask, -math.inf).sort(descending=True, stable=True).indices
        best = order[:, : min(top_k, end)]
        chosen[rows, : best.shape[1]] = sort_chosen(best, ~mask.gather(1, best), end)
    return chosen


def sort_chosen(best: Tensor, unseen: Tensor, end: int) -> Tensor:
    """Chosen numbers below `end`, in rising order, then NONE for those that are `unseen`, as int32."""
    rising = best.masked_fill(unseen, end).sort().values
    return rising.masked_fill(rising == end, NONE).int()


@choose_keys.inputs
def _choose_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, heads, dim = sum(case["seqs"]), case["heads"], case["index_dim"]
    q = torch.randn(total, heads, dim, dtype=dtype, device=device)
    weights, k = (torch.randn(total, n, dtype=dtype, device=device) for n in (heads, dim))
    cache = random_cache((num_blocks, BLOCK, dim), case, dtype, device)
    return (q, weights, k, cache, *where, case["top_k"]), {}


CASES: list[Case] = [
    dict(seqs=[1], heads=4, kv_rank=16, rope_dim=4, top_k=3),
    dict(seqs=[1, 6], heads=5, kv_rank=80, rope_dim=0, top_k=4, kv_dtype="int8"),
    dict(seqs=SEQS, heads=19, kv_rank=34, rope_dim=6, top_k=9),
    dict(seqs=[130, 3], heads=16, kv_rank=64, rope_dim=32, top_k=100),
    dict(seqs=[90, 3], heads=5, kv_rank=24, rope_dim=6, top_k=40, kv_dtype="bfloat16"),
    dict(seqs=[90, 3], heads=3, kv_rank=160, rope_dim=32, top_k=70, kv_dtype="int8"),
    dict(seqs=SEQS, heads=3, kv_rank=20, rope_dim=6, top_k=9, kv_dtype="int8"),
    dict(seqs=[90, 3], heads=19, kv_rank=34, rope_dim=6, top_k=70, sinks=True),
    dict(seqs=SEQS, heads=3, kv_rank=24, rope_dim=0, top_k=5),
    dict(seqs=SEQS, heads=5, kv_rank=34, rope_dim=6, top_k=9, is_placed=True),
    dict(seqs=[90, 3], heads=3, kv_rank=64, rope_dim=0, top_k=40, kv_dtype="int8", is_placed=True),
]


@op(cases=CASES, private=("cache",), is_product=True)
def sparse_latent_attention(
    q: Tensor,
    latent: Tensor | None,
    cache: Tensor,
    chosen: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_rank: int,
    sinks: Tensor | None = None,
) -> Tensor:
    """`paged_latent_attention` over the positions that `choose_keys` gave. chosen: [T, top_k] int32, NONE
    behind the last; latent None: the cache has what is new -> [T, heads, kv_rank]."""
    form = latent_form(kv_rank, q.shape[-1] - kv_rank, cache.dtype)
    if latent is not None:
        write_paged(cache, latent, slot_mapping, form)
    out = q.new_empty(*q.shape[:2], kv_rank)
    for s, rows, start, end in visible(q, (query_start, seq_lens), None, q.shape[1]):
        known = read_paged(cache, block_table[s], start, end, form).float()
        places = chosen[rows].long()
        seen = torch.zeros(len(places), end + 1, dtype=torch.bool, device=q.device)
        seen = seen.scatter_(1, places.masked_fill(places == NONE, end), True)[:, :end]
        scores = torch.einsum("nhr,tr->hnt", q[rows].float(), known) * scale
        probs = share_softmax(scores.masked_fill(~seen, -math.inf)[:, None], sinks)[:, 0]
        out[rows] = torch.einsum("hnt,tr->nhr", probs, known[:, :kv_rank]).to(q.dtype)
    return out


@sparse_latent_attention.inputs
def _latent_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, width, top_k = sum(case["seqs"]), case["kv_rank"] + case["rope_dim"], case["top_k"]
    q = torch.randn(total, case["heads"], width, dtype=dtype, device=device)
    latent = torch.randn(total, width, dtype=dtype, device=device)
    kept = latent_width(case["kv_rank"], case["rope_dim"], case.get("kv_dtype", ""))
    cache = random_cache((num_blocks, BLOCK, kept), case, dtype, device)
    chosen = torch.full((total, top_k), NONE, dtype=torch.int32)
    places = [t for length in case["seqs"] for t in range(length)]
    for row, at in zip(chosen, places, strict=True):
        count = min(top_k, at + 1)
        row[:count] = torch.randperm(at + 1)[:count].sort().values.int()
    sinks = torch.randn(case["heads"], device=device) if case.get("sinks") else None
    new = None if case.get("is_placed") else latent
    if new is None:
        write_paged(cache, latent, where[1], latent_form(case["kv_rank"], case["rope_dim"], cache.dtype))
    given = (q, new, cache, chosen.to(device), *where, width**-0.5, case["kv_rank"])
    return given, {"sinks": sinks}
