"""Block-sparse attention (MiniMax-M3): small heads choose blocks of keys, a key-value head reads those alone.

A block is `size` tokens, counted from a sequence's first: it has nothing to do with a block of memory. The
references go through the sequences one by one, so that a result cannot depend on the batch composition.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.attention import (
    BLOCK,
    SEQS,
    causal_mask,
    paged_case,
    random_cache,
    read_paged,
    visible,
    write_paged,
)
from plait.ops.case import Case
from plait.ops.entry import head_forms, head_widths
from plait.ops.indexer import NONE, sort_chosen
from plait.ops.registry import Arguments, op

CHOICES: list[Case] = [
    dict(seqs=[1], kv_heads=2, index_dim=16, size=4, top_k=2, local=1),
    dict(seqs=SEQS, kv_heads=3, index_dim=20, size=5, top_k=3, local=0),
    dict(seqs=[150, 3, 300], kv_heads=2, index_dim=32, size=16, top_k=4, local=2),
    dict(seqs=[70, 3], kv_heads=1, index_dim=48, size=7, top_k=4, local=1, kv_dtype="bfloat16"),
]


@op(cases=CHOICES, private=("cache",), is_product=True)
def choose_blocks(
    q: Tensor,
    k: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    size: int,
    top_k: int,
    local: int,
) -> Tensor:
    """Store the new index keys; then the `top_k` blocks of keys that each head of each token is to attend to.

    A block's score is the largest q_h · k of its keys up to the token; the last `local` blocks, the token's
    own included, come first. Of equal ones the earlier is taken. q: [T, heads, d], k: [T, d], cache: [blocks,
    block_size, d], the rest as in `paged_attention` -> [T, heads, top_k] int32, rising, then NONE.
    """
    write_paged(cache, k, slot_mapping)
    chosen = torch.full((*q.shape[:2], top_k), NONE, dtype=torch.int32, device=q.device)
    for s, rows, start, end in visible(q, (query_start, seq_lens), None, q.shape[1]):
        known = read_paged(cache, block_table[s], start, end).float()
        mask = causal_mask(rows.stop - rows.start, start, end, None, q.device)
        scores = torch.einsum("nhd,td->hnt", q[rows].float(), known).masked_fill(~mask, -math.inf)
        count = -(-end // size)
        scores = F.pad(scores, (0, count * size - end), value=-math.inf).unflatten(-1, (count, size)).amax(-1)
        own = torch.arange(end - mask.shape[0], end, device=q.device)[:, None] // size
        blocks = torch.arange(count, device=q.device)
        scores = scores.masked_fill((blocks <= own) & (blocks > own - local), math.inf)
        order = scores.sort(descending=True, stable=True).indices[..., : min(top_k, count)]
        chosen[rows, :, : order.shape[-1]] = sort_chosen(order, order > own, count).transpose(0, 1)
    return chosen


@choose_blocks.inputs
def _choose_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, heads, dim = sum(case["seqs"]), case["kv_heads"], case["index_dim"]
    q, k = (torch.randn(total, *shape, dtype=dtype, device=device) for shape in ((heads, dim), (dim,)))
    cache = random_cache((num_blocks, BLOCK, dim), case, dtype, device)
    return (q, k, cache, *where, case["size"], case["top_k"], case["local"]), {}


CASES: list[Case] = [
    dict(seqs=[1], heads=4, kv_heads=2, dim=16, size=4, top_k=2),
    dict(seqs=SEQS, heads=6, kv_heads=3, dim=20, size=5, top_k=3),
    dict(seqs=[300, 2], heads=19, kv_heads=1, dim=32, size=80, top_k=2),
    dict(seqs=[150, 3], heads=4, kv_heads=2, dim=24, size=16, top_k=4, kv_dtype="bfloat16"),
    dict(seqs=SEQS, heads=4, kv_heads=2, dim=20, size=5, top_k=3, kv_dtype="int8"),
]


@op(cases=CASES, private=("k_cache", "v_cache"), is_product=True)
def block_sparse_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    chosen: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    size: int,
) -> Tensor:
    """`paged_attention` of each key-value head over the blocks that `choose_blocks` gave it, up to the token.

    chosen: [T, kv_heads, top_k] int32, NONE behind the last; -> [T, heads, d]. `k` and `v` None:
    `ops.place.place_heads` has stored them.
    """
    k_form, v_form = head_forms(q.shape[-1], k_cache.dtype)
    if k is not None and v is not None:
        write_paged(k_cache, k, slot_mapping, k_form)
        write_paged(v_cache, v, slot_mapping, v_form)
    out = torch.empty_like(q)
    for s, rows, start, end in visible(q, (query_start, seq_lens), None, q.shape[1]):
        keys = read_paged(k_cache, block_table[s], start, end, k_form).float()
        values = read_paged(v_cache, block_table[s], start, end, v_form).float()
        grouped = q[rows].float().unflatten(1, (keys.shape[1], -1))  # [n, kv, g, d]
        scores = torch.einsum("nkgd,tkd->kgnt", grouped, keys) * scale
        count = -(-end // size)
        taken = chosen[rows].long().transpose(0, 1)  # [kv, n, top_k]
        seen = torch.zeros(*taken.shape[:2], count + 1, dtype=torch.bool, device=q.device)
        seen = seen.scatter_(2, taken.masked_fill(taken == NONE, count), True)[..., :count]
        seen = seen.repeat_interleave(size, -1)[..., :end]
        seen = seen & causal_mask(rows.stop - rows.start, start, end, None, q.device)
        probs = scores.masked_fill(~seen[:, None], -math.inf).softmax(-1)
        out[rows] = torch.einsum("kgnt,tkd->nkgd", probs, values).flatten(1, 2).to(q.dtype)
    return out


@block_sparse_attention.inputs
def _attention_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, kv, dim, size = sum(case["seqs"]), case["kv_heads"], case["dim"], case["size"]
    q, k, v = (torch.randn(total, n, dim, dtype=dtype, device=device) for n in (case["heads"], kv, kv))
    widths = head_widths(dim, case.get("kv_dtype", ""))
    caches = [random_cache((num_blocks, BLOCK, kv, width), case, dtype, device) for width in widths]
    chosen = torch.full((total, kv, case["top_k"]), NONE, dtype=torch.int32)
    places = [t for length in case["seqs"] for t in range(length)]
    for row, at in zip(chosen, places, strict=True):
        own = at // size
        for head in row:  # its own block, so that there is a key, and others
            others = torch.randperm(own)[: case["top_k"] - 1].sort().values
            head[: len(others) + 1] = torch.cat([others, torch.tensor([own])]).int()
    return (q, k, v, *caches, chosen.to(device), *where, dim**-0.5, size), {}
