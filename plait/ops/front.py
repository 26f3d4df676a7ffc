"""What lies before each text, because a model has learned it: keys that all queries see, states of scans."""

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
    visible,
    write_paged,
)
from plait.ops.case import Case, RecurrentCase
from plait.ops.conv import ragged_case
from plait.ops.registry import Arguments, op

CASES: list[Case] = [
    dict(seqs=[1], heads=4, kv_heads=2, dim=16, v_dim=32, window=None, front=5),
    dict(seqs=SEQS, heads=6, kv_heads=2, dim=10, v_dim=20, window=9, front=3),
    dict(seqs=[70, 3], heads=5, kv_heads=1, dim=64, v_dim=128, window=20, front=33),
    dict(seqs=SEQS, heads=3, kv_heads=3, dim=7, v_dim=5, window=None, front=0),
    dict(seqs=SEQS, heads=4, kv_heads=2, dim=16, v_dim=32, window=9, front=6, kv_dtype="bfloat16"),
]


@op(cases=CASES, private=("k_cache", "v_cache"), is_product=True)
def front_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    front: tuple[Tensor, Tensor],
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    step: dict[object, object] | None = None,
) -> Tensor:
    """Store the new keys and values; then softmax attention over `front` and each sequence's own past.

    q: [T, heads, d], k: [T, kv_heads, d], v: [T, kv_heads, e], caches: [blocks, block_size, kv_heads, …];
    front: keys [n, kv_heads, d] and values [n, kv_heads, e] that lie before every sequence, outside of any
    window -> [T, heads, e]. `k` and `v` None: another mixer of the step has stored them. The rest as in
    `ops.attention.paged_attention`.
    """
    if k is not None and v is not None:
        write_paged(k_cache, k, slot_mapping)
        write_paged(v_cache, v, slot_mapping)
    count, out = len(front[0]), q.new_empty(*q.shape[:2], v_cache.shape[-1])
    for s, rows, start, end in visible(q, (query_start, seq_lens), window):
        caches = (k_cache, v_cache)
        own = (read_paged(cache, block_table[s], start, end).float() for cache in caches)
        keys, values = (torch.cat([before.float(), x]) for before, x in zip(front, own, strict=True))
        grouped = q[rows].float().unflatten(1, (keys.shape[1], -1))  # [n, kv, g, d]
        scores = torch.einsum("nkgd,tkd->kgnt", grouped, keys) * scale
        mask = causal_mask(rows.stop - rows.start, start, end, window, q.device)
        scores[..., count:] = scores[..., count:].masked_fill(~mask, -math.inf)
        out[rows] = torch.einsum("kgnt,tke->nkge", scores.softmax(-1), values).flatten(1, 2).to(q.dtype)
    return out


@front_attention.inputs
def _front_inputs(case: Case, dtype: torch.dtype, device: str) -> Arguments:
    where, num_blocks = paged_case(case["seqs"], device)
    total, kv, widths = sum(case["seqs"]), case["kv_heads"], (case["dim"], case["v_dim"])
    q = torch.randn(total, case["heads"], case["dim"], dtype=dtype, device=device)
    k, v = (torch.randn(total, kv, width, dtype=dtype, device=device) for width in widths)
    caches = [random_cache((num_blocks, BLOCK, kv, width), case, dtype, device) for width in widths]
    front = tuple(torch.randn(case["front"], kv, width, device=device) for width in widths)
    return (q, k, v, *caches, front, *where, case["dim"] ** -0.5, case["window"]), {}


BEGIN_CASES: list[RecurrentCase] = [
    dict(seqs=[(1, True)], shape=(3, 8)),
    dict(seqs=[(1, True), (4, False), (2, True), (1, False)], shape=(10, 7)),
]


@op(cases=BEGIN_CASES)
def begin_slots(
    initial: Tensor, state: Tensor, slots: Tensor, has_history: Tensor, positions: Tensor
) -> Tensor:
    """Write the state that every sequence begins with to the slots of those without history.

    initial: [...], state: [num_slots, ...], in place, slots: [S], has_history: [S] bool, positions: [T], of
    the step's tokens -> which sequences have a history then, [S] bool: all.
    """
    state[slots[~has_history]] = initial
    return torch.ones_like(has_history)


@begin_slots.inputs
def _begin_inputs(case: RecurrentCase, dtype: torch.dtype, device: str) -> Arguments:
    slots, starts, has_history, num_slots = ragged_case(case["seqs"], device)
    initial, state = (torch.randn(*some, *case["shape"], device=device) for some in ((), (num_slots,)))
    return (initial, state, slots, has_history, torch.arange(int(starts[-1]), device=device)), {}
