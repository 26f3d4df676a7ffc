"""What lies before each text, on a GPU: decodes in shapes that no data decides.

So a step of decodes can be captured. Prompts go through the references, sequence by sequence.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.kernels.torch.paged_rows import gather_rows, list_window
from plait.ops.attention import write_paged
from plait.ops.front import begin_slots, front_attention

NAME = "torch"


def register() -> None:
    """Offer them on GPUs. Doing so twice changes nothing."""
    begin_slots.variant(NAME, on="cuda")(begin)
    front_attention.variant(NAME, on="cuda")(attend)


def begin(initial: Tensor, state: Tensor, slots: Tensor, has_history: Tensor, positions: Tensor) -> Tensor:
    """`begin_slots`: the same arguments and result. Those with history change nothing."""
    where, is_kept = torch.where(has_history, 0, slots), has_history.view(-1, *[1] * initial.dim())
    state[where] = torch.where(is_kept, state[where], initial.to(state.dtype))
    return torch.ones_like(has_history)


def attend(
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
    """`front_attention`: the same arguments and result."""
    if len(q) != len(seq_lens):
        given = (q, k, v, k_cache, v_cache, front, block_table, slot_mapping, query_start, seq_lens)
        return front_attention.reference(*given, scale, window)  # type: ignore[no-any-return]
    if k is not None and v is not None:
        write_paged(k_cache, k, slot_mapping)
        write_paged(v_cache, v, slot_mapping)
    at = list_window(k_cache, block_table, seq_lens, window)
    hidden, rows = at < 0, at.clamp(min=0)
    keys, values = (
        gather_rows(cache, block_table, rows).float().masked_fill(hidden[..., None, None], 0)
        for cache in (k_cache, v_cache)
    )
    grouped = q.float().unflatten(1, (keys.shape[2], -1))  # [T, kv, g, d]
    own = torch.einsum("tkgd,tnkd->tkgn", grouped, keys) * scale
    own = own.masked_fill(hidden[:, None, None], -math.inf)
    before = torch.einsum("tkgd,fkd->tkgf", grouped, front[0].float()) * scale
    probs = torch.cat([before, own], -1).softmax(-1)
    count = len(front[0])
    found = torch.einsum("tkgf,fke->tkge", probs[..., :count], front[1].float())
    found += torch.einsum("tkgn,tnke->tkge", probs[..., count:], values)
    return found.flatten(1, 2).to(q.dtype)
