"""Block-sparse attention on a GPU that our own kernels do not serve: decodes in shapes that no data decides.

So a step of decodes can be captured. Prompts go through the references, sequence by sequence.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.attention import write_paged
from plait.ops.block_sparse import block_sparse_attention, choose_blocks
from plait.ops.entry import Form, head_forms
from plait.ops.indexer import NONE, sort_chosen

NAME = "torch"


def register() -> None:
    """Offer them on GPUs. Doing so twice changes nothing."""
    choose_blocks.variant(NAME, on="cuda")(choose)
    block_sparse_attention.variant(NAME, on="cuda")(attend)


def choose(
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
    """`choose_blocks`: the same arguments and result."""
    where = (block_table, slot_mapping, query_start, seq_lens)
    if len(q) != len(seq_lens):
        return choose_blocks.reference(q, k, cache, *where, size, top_k, local)  # type: ignore[no-any-return]
    write_paged(cache, k, slot_mapping)
    known = cache[block_table].flatten(1, 2).float()  # [T, most, d]
    most = known.shape[1]
    count = -(-most // size)
    unseen = torch.arange(most, device=q.device) >= seq_lens[:, None]
    # What lies in memory behind a sequence may be no number: it comes last all the same.
    scores = torch.einsum("thd,tkd->thk", q.float(), known).masked_fill(unseen[:, None], -math.inf)
    scores = F.pad(scores, (0, count * size - most), value=-math.inf).unflatten(-1, (count, size)).amax(-1)
    own, blocks = ((seq_lens - 1) // size)[:, None, None], torch.arange(count, device=q.device)
    scores = scores.masked_fill((blocks <= own) & (blocks > own - local), math.inf)
    order = scores.sort(descending=True, stable=True).indices[..., :top_k]
    chosen = torch.full((*q.shape[:2], top_k), NONE, dtype=torch.int32, device=q.device)
    chosen[..., : order.shape[-1]] = sort_chosen(order, order > own, count)
    return chosen


def attend(
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
    """`block_sparse_attention`: the same arguments and result."""
    where = (block_table, slot_mapping, query_start, seq_lens)
    if len(q) != len(seq_lens):
        given = (q, k, v, k_cache, v_cache, chosen, *where)
        return block_sparse_attention.reference(*given, scale, size)  # type: ignore[no-any-return]
    forms = head_forms(q.shape[-1], k_cache.dtype)
    if k is not None and v is not None:
        write_paged(k_cache, k, slot_mapping, forms[0])
        write_paged(v_cache, v, slot_mapping, forms[1])
    inside = torch.arange(size, device=q.device)
    places = (chosen.long()[..., None] * size + inside).flatten(2)  # [T, kv, keys], below 0 behind the last
    hidden = (places < 0) | (places >= seq_lens[:, None, None])
    keys, values = (
        _gather(cache, form, places.masked_fill(hidden, 0), block_table)
        for cache, form in zip((k_cache, v_cache), forms, strict=True)
    )
    grouped = q.float().unflatten(1, (keys.shape[1], -1))  # [T, kv, g, d]
    scores = torch.einsum("tkgd,tknd->tkgn", grouped, keys) * scale
    probs = scores.masked_fill(hidden[:, :, None], -math.inf).softmax(-1)
    return torch.einsum("tkgn,tknd->tkgd", probs, values).flatten(1, 2).to(q.dtype)


def _gather(cache: Tensor, form: Form, places: Tensor, block_table: Tensor) -> Tensor:
    """Entries at positions [T, kv, keys] of each row's sequence -> [T, kv, keys, d] float32."""
    size, kv = cache.shape[1:3]
    blocks = block_table[:, None].expand(-1, kv, -1).gather(2, places // size)
    heads = torch.arange(kv, device=cache.device)[None, :, None]
    found = cache.flatten(0, 1)[blocks * size + places % size, heads]
    return form.decode(found) if form else found.float()
