"""Attention of each sequence by torch's fused kernel, over its keys and values gathered from their blocks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from plait.ops.attention import causal_mask, paged_attention, read_paged, visible, write_paged
from plait.ops.entry import head_forms
from plait.ops.registry import OpFacts

NAME = "sdpa"


def register() -> None:
    """Offer it on every device. Doing so twice changes nothing."""
    for device in ("cpu", "cuda"):
        paged_attention.variant(NAME, on=device, when=_no_softcap)(sdpa)


def _no_softcap(facts: OpFacts) -> str | None:
    if facts.sizes.get("softcap") is not None:
        return "torch's attention has no softcap"
    return "torch's attention has no slopes of heads" if facts.sizes.get("alibi") else None


def sdpa(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    step: dict[object, object] | None = None,
    slopes: None = None,
    chunk: int | None = None,
    canvas: int | None = None,
    canvas_start: Tensor | None = None,
) -> Tensor:
    """`paged_attention` without softcap and slopes: the same arguments and result; `step` is not needed."""
    caches = tuple(zip((k_cache, v_cache), head_forms(q.shape[-1], k_cache.dtype), strict=True))
    for (cache, form), new in zip(caches, (k, v), strict=True):
        if new is not None:
            write_paged(cache, new, slot_mapping, form)
    out = torch.empty_like(q)
    for s, rows, start, end in visible(q, (query_start, seq_lens), window, 0, canvas_start):
        keys, values = (read_paged(c, block_table[s], start, end, form).to(q.dtype) for c, form in caches)
        n = rows.stop - rows.start
        mask = None
        opened = None if canvas_start is None else int(canvas_start[s])
        if n > 1 or chunk or canvas or opened is not None:
            mask = causal_mask(n, start, end, window, q.device, chunk, canvas, opened)
        if sinks is not None:
            # A sink is the score of a key of zeros with the value zero: one more column of the mask.
            keys, values = (F.pad(t, (0, 0, 0, 0, 0, 1)) for t in (keys, values))
            own = sinks[rows].T if sinks.dim() == 2 else sinks[:, None]
            mask = _with_sinks(mask, own.to(q.dtype), (n, end - start))
        heads_first = [t.transpose(0, 1)[None] for t in (q[rows], keys, values)]
        attended = F.scaled_dot_product_attention(
            heads_first[0], heads_first[1], heads_first[2], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[rows] = attended[0].transpose(0, 1)
    return out


def _with_sinks(mask: Tensor | None, sinks: Tensor, size: tuple[int, int]) -> Tensor:
    """What is added to scores, [heads, n, keys + 1]: -inf where the mask is false; at the end sinks, of
    [heads, n] or [heads, 1]."""
    added = sinks.new_zeros(len(sinks), size[0], size[1] + 1)
    if mask is not None:
        added[..., :-1].masked_fill_(~mask, float("-inf"))
    added[..., -1] = sinks
    return added
