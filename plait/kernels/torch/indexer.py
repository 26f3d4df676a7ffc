"""The indexer and what attends by its choice, on a GPU that our own kernels do not serve: decodes in shapes
that no data decides.

So a step of decodes can be captured. Prompts go through the references, sequence by sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.ops.attention import share_softmax, write_paged
from plait.ops.entry import latent_form
from plait.ops.indexer import NONE, choose_keys, sort_chosen, sparse_latent_attention

NAME = "torch"


def register() -> None:
    """Offer them on GPUs. Doing so twice changes nothing."""
    choose_keys.variant(NAME, on="cuda")(choose)
    sparse_latent_attention.variant(NAME, on="cuda")(attend)


def choose(
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
    """`choose_keys`: the same arguments and result."""
    where = (block_table, slot_mapping, query_start, seq_lens)
    if len(q) != len(seq_lens):
        return choose_keys.reference(q, weights, k, cache, *where, top_k)  # type: ignore[no-any-return]
    write_paged(cache, k, slot_mapping)
    known = cache[block_table].flatten(1, 2).float()  # [T, most, d]
    most = known.shape[1]
    scores = torch.einsum("thd,tkd->thk", q.float(), known).relu()
    scores = torch.einsum("th,thk->tk", weights.float(), scores)
    unseen = torch.arange(most, device=q.device) >= seq_lens[:, None]
    # What lies in memory behind a sequence may be no number: it comes last all the same.
    order = scores.masked_fill(unseen, -math.inf).sort(descending=True, stable=True).indices[:, :top_k]
    chosen = torch.full((len(q), top_k), NONE, dtype=torch.int32, device=q.device)
    chosen[:, : order.shape[1]] = sort_chosen(order, order >= seq_lens[:, None], most)
    return chosen


def attend(
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
    """`sparse_latent_attention`: the same arguments and result."""
    where = (block_table, slot_mapping, query_start, seq_lens)
    if len(q) != len(seq_lens):
        given = (q, latent, cache, chosen, *where)
        return sparse_latent_attention.reference(*given, scale, kv_rank, sinks)  # type: ignore[no-any-return]
    form = latent_form(kv_rank, q.shape[-1] - kv_rank, cache.dtype)
    if latent is not None:
        write_paged(cache, latent, slot_mapping, form)
    size = cache.shape[1]
    places = chosen.long().clamp(0, block_table.shape[1] * size - 1)
    places = block_table.gather(1, places // size) * size + places % size
    known = cache.view(-1, cache.shape[-1])[places]  # [T, top_k, width]
    known = form.decode(known) if form else known.float()
    scores = torch.einsum("thr,tkr->thk", q.float(), known) * scale
    scores = scores.masked_fill((chosen == NONE)[:, None], -math.inf)
    probs = share_softmax(scores.transpose(0, 1)[:, None], sinks)[:, 0].transpose(0, 1)
    return torch.einsum("thk,tkr->thr", probs, known[..., :kv_rank]).to(q.dtype)
