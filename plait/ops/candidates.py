"""Which entries a query attends to, in two steps (DeepSeek-V4.1): one layer chooses blocks of entries, and
later layers choose entries in these blocks alone.

Both ops read index keys that `choose_entries` or an op before them in the step has stored.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.attention import BLOCK, paged_case, random_cache, visible
from plait.ops.case import Case
from plait.ops.compressed import count_entries, read_entries
from plait.ops.indexer import NONE, sort_chosen
from plait.ops.registry import Arguments, op

BLOCKS: list[Case] = [
    dict(seqs=[1], heads=4, index_dim=16, top_k=3, size=2, rate=1, step=1),
    dict(seqs=[1, 7, 5, 40], heads=5, index_dim=20, top_k=3, size=4, rate=2, step=2),
    dict(seqs=[150, 3, 300], heads=8, index_dim=32, top_k=9, size=8, rate=1, step=1),
    dict(seqs=[70, 3], heads=3, index_dim=48, top_k=4, size=3, rate=2, step=1, kv_dtype="bfloat16"),
]


@op(cases=BLOCKS, is_product=True)
def choose_entry_blocks(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
    size: int,
    rate: int,
    step: int,
) -> Tensor:
    """The `top_k` blocks of `size` entries that have the largest scores: a block has that of its best entry.

    The newest entry's block is always among them. Scores, q, weights, cache and the rest: as in
    `choose_entries` -> [T, top_k] int32, rising, then NONE.
    """
    chosen = torch.full((len(q), top_k), NONE, dtype=torch.int32, device=q.device)
    for s, rows, _, end in visible(q, (query_start, seq_lens), None, q.shape[1]):
        known = read_entries(cache, block_table[s], end, rate, step)
        counts = count_entries(rows, end, rate, q.device)[:, None]
        scores = score_known(q[rows], weights[rows], known, counts)
        scores = F.pad(scores, (0, -len(known) % size), value=-math.inf).unflatten(1, (-1, size)).amax(2)
        each = torch.arange(scores.shape[1], device=q.device)
        scores = scores.masked_fill(each == (counts - 1) // size, math.inf)
        order = scores.sort(descending=True, stable=True).indices[:, : min(top_k, len(each))]
        chosen[rows, : order.shape[1]] = sort_chosen(order, order * size >= counts, len(each))
    return chosen


def score_known(q: Tensor, weights: Tensor, known: Tensor, counts: Tensor) -> Tensor:
    """Σ_h weights_h · relu(q_h · key), -inf behind the first `counts` keys of each row: [n, keys]."""
    scores = torch.einsum("nhd,td->nht", q.float(), known).relu()
    scores = torch.einsum("nh,nht->nt", weights.float(), scores)
    return scores.masked_fill(torch.arange(len(known), device=q.device) >= counts, -math.inf)


@choose_entry_blocks.inputs
def _block_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    (table, _, *seqs), num_blocks = paged_case(case["seqs"], device)
    total, heads, dim, step = sum(case["seqs"]), case["heads"], case["index_dim"], case["step"]
    q = torch.randn(total, heads, dim, dtype=dtype, device=device)
    weights = torch.randn(total, heads, dtype=dtype, device=device)
    cache = random_cache((num_blocks, BLOCK // step, dim), case, dtype, device)
    return (q, weights, cache, table, *seqs, case["top_k"], case["size"], case["rate"], step), {}


AMONG: list[Case] = [{**case, "blocks": case["top_k"], "top_k": 5} for case in BLOCKS]


@op(cases=AMONG, is_product=True)
def choose_among_blocks(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    blocks: Tensor,
    top_k: int,
    size: int,
    rate: int,
    step: int,
) -> Tensor:
    """`choose_entries` of those in some blocks of `size` entries. blocks: [T, n] int32 as
    `choose_entry_blocks` gives them -> [T, top_k] int32, rising, then NONE."""
    chosen = torch.full((len(q), top_k), NONE, dtype=torch.int32, device=q.device)
    for s, rows, _, end in visible(q, (query_start, seq_lens), None, q.shape[1]):
        known = read_entries(cache, block_table[s], end, rate, step)
        scores = score_known(q[rows], weights[rows], known, count_entries(rows, end, rate, q.device)[:, None])
        of = torch.arange(len(known), device=q.device) // size
        is_there = (blocks[rows, :, None] == of).any(1)
        order = scores.masked_fill(~is_there, -math.inf).sort(descending=True, stable=True).indices
        best = order[:, : min(top_k, len(known))]
        unseen = ~is_there.gather(1, best) | (best >= count_entries(rows, end, rate, q.device)[:, None])
        chosen[rows, : best.shape[1]] = sort_chosen(best, unseen, len(known))
    return chosen


@choose_among_blocks.inputs
def _among_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    given, _ = _block_inputs({**case, "top_k": 0}, dtype, device)
    total, count, size = len(given[0]), case["blocks"], case["size"]
    blocks = torch.full((total, count), NONE, dtype=torch.int32)
    places = [t for length in case["seqs"] for t in range(length)]
    for row, at in zip(blocks, places, strict=True):
        there = -(-((at + 1) // case["rate"]) // size)
        best = torch.randperm(there)[:count].sort().values
        row[: len(best)] = best.int()
    return (*given[:6], blocks.to(device), case["top_k"], *given[7:]), {}
