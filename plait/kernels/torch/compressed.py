"""Attention over compressed entries on a GPU: decodes in shapes that no data decides.

So a step of decodes can be captured. Prompts go through the references, sequence by sequence.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.kernels.torch.paged_rows import gather_rows, list_window
from plait.ops.attention import share_softmax, write_paged
from plait.ops.candidates import choose_among_blocks, choose_entry_blocks
from plait.ops.compressed import choose_entries, entry_attention
from plait.ops.entry import latent_form
from plait.ops.indexer import NONE, sort_chosen

NAME = "torch"


def register() -> None:
    """Offer them on GPUs. Doing so twice changes nothing."""
    choose_entries.variant(NAME, on="cuda")(choose)
    choose_entry_blocks.variant(NAME, on="cuda")(choose_in_blocks)
    choose_among_blocks.variant(NAME, on="cuda")(choose_among)
    entry_attention.variant(NAME, on="cuda")(attend)


def choose(
    q: Tensor,
    weights: Tensor,
    entries: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
    rate: int,
    step: int,
) -> Tensor:
    """`choose_entries`: the same arguments and result."""
    if len(q) != len(seq_lens):
        where = (block_table, slot_mapping, query_start, seq_lens)
        return choose_entries.reference(q, weights, entries, cache, *where, top_k, rate, step)  # type: ignore[no-any-return]
    _store_ended(cache, entries, slot_mapping, seq_lens, rate, step)
    count = (seq_lens // rate)[:, None]  # entries that a token sees
    scores = _score(q, weights, cache, block_table, count, rate, step)
    return _take_best(scores, count, top_k)


def _score(
    q: Tensor, weights: Tensor, cache: Tensor, block_table: Tensor, count: Tensor, rate: int, step: int
) -> Tensor:
    """Scores of all entries that block tables have memory for, -inf behind the first `count`: [T, most]."""
    places = _list_entries(cache, block_table, step, rate)
    known = gather_rows(cache, block_table, (places // step).expand(len(q), -1)).float()  # [T, most, d]
    scores = torch.einsum("thd,tkd->thk", q.float(), known).relu()
    scores = torch.einsum("th,thk->tk", weights.float(), scores)
    # What lies in memory behind a sequence may be no number: it comes last all the same.
    return scores.masked_fill(torch.arange(len(places), device=q.device) >= count, -math.inf)


def _take_best(scores: Tensor, count: Tensor, top_k: int, is_left: Tensor | None = None) -> Tensor:
    """The columns of the `top_k` best of the first `count` scores that `is_left` has; rising, then NONE."""
    chosen = torch.full((len(scores), top_k), NONE, dtype=torch.int32, device=scores.device)
    order = scores.sort(descending=True, stable=True).indices[:, :top_k]
    unseen = order >= count
    unseen = unseen if is_left is None else unseen | ~is_left.gather(1, order)
    chosen[:, : order.shape[1]] = sort_chosen(order, unseen, scores.shape[1])
    return chosen


def choose_in_blocks(
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
    """`choose_entry_blocks`: the same arguments and result."""
    if len(q) != len(seq_lens):
        where = (block_table, query_start, seq_lens)
        return choose_entry_blocks.reference(q, weights, cache, *where, top_k, size, rate, step)  # type: ignore[no-any-return]
    count = (seq_lens // rate)[:, None]
    scores = _score(q, weights, cache, block_table, count, rate, step)
    scores = F.pad(scores, (0, -scores.shape[1] % size), value=-math.inf).unflatten(1, (-1, size)).amax(2)
    newest = torch.arange(scores.shape[1], device=q.device) == (count - 1) // size
    return _take_best(scores.masked_fill(newest, math.inf), (count + size - 1) // size, top_k)


def choose_among(
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
    """`choose_among_blocks`: the same arguments and result."""
    if len(q) != len(seq_lens):
        where = (block_table, query_start, seq_lens, blocks)
        return choose_among_blocks.reference(q, weights, cache, *where, top_k, size, rate, step)  # type: ignore[no-any-return]
    count = (seq_lens // rate)[:, None]
    scores = _score(q, weights, cache, block_table, count, rate, step)
    most = -(-scores.shape[1] // size)
    of = torch.where(blocks == NONE, most, blocks).long()
    is_left = torch.zeros(len(q), most + 1, dtype=torch.bool, device=q.device).scatter_(1, of, True)
    is_left = is_left[:, torch.arange(scores.shape[1], device=q.device) // size]
    return _take_best(scores.masked_fill(~is_left, -math.inf), count, top_k, is_left)


def attend(
    q: Tensor,
    latent: Tensor | None,
    entries: Tensor | None,
    cache: Tensor,
    packed: Tensor,
    chosen: Tensor | None,
    near: tuple[Tensor, Tensor],
    far: tuple[Tensor, Tensor],
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int,
    sinks: Tensor,
    rate: int,
    step: int,
    work: dict[object, object] | None = None,
) -> Tensor:
    """`entry_attention`: the same arguments and result."""
    if len(q) != len(seq_lens):
        given = (q, latent, entries, cache, packed, chosen, near, far, query_start, seq_lens)
        return entry_attention.reference(*given, scale, window, sinks, rate, step)  # type: ignore[no-any-return]
    form = latent_form(q.shape[-1], 0, cache.dtype)
    if latent is not None and entries is not None:
        write_paged(cache, latent, near[1], form)
        _store_ended(packed, entries, far[1], seq_lens, rate, step)
    at = list_window(cache, near[0], seq_lens, window)
    known = gather_rows(cache, near[0], at.clamp(min=0))  # [T, width, d or codes]
    known = form.decode(known) if form else known.float()
    if chosen is None:
        places = _list_entries(packed, far[0], step, rate)
        seen = torch.arange(len(places), device=q.device) < (seq_lens // rate)[:, None]
        rows = (places // step).expand(len(q), -1)
    else:
        seen = chosen != NONE
        rows = ((chosen.long().clamp(min=0) + 1) * rate - 1) // step
    keys = torch.cat([known, gather_rows(packed, far[0], rows).float()], 1)
    mask = torch.cat([at >= 0, seen], 1)
    keys = keys.masked_fill(~mask[..., None], 0)  # what lies there may be no number
    scores = torch.einsum("thd,tkd->thk", q.float(), keys) * scale
    scores = scores.masked_fill(~mask[:, None], -math.inf)
    probs = share_softmax(scores.transpose(0, 1)[:, None], sinks)[:, 0].transpose(0, 1)
    return torch.einsum("thk,tkd->thd", probs, keys).to(q.dtype)


def _store_ended(
    cache: Tensor, entries: Tensor, slots: Tensor, seq_lens: Tensor, rate: int, step: int
) -> None:
    """Those of tokens that end a window; the others go to the block of padding."""
    rows = torch.where(seq_lens % rate == 0, slots // step, 0)
    cache.view(-1, cache.shape[-1])[rows] = entries.to(cache.dtype)


def _list_entries(cache: Tensor, block_table: Tensor, step: int, rate: int) -> Tensor:
    """The positions at which all entries lie that block tables have memory for."""
    most = block_table.shape[1] * cache.shape[1] * step // rate
    return torch.arange(1, most + 1, device=cache.device) * rate - 1
