"""Orders of rows that converters change: pairs that rotate together, and value heads of one key head."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.spec.recurrent import DeltaNetSpec


def value_order(mixer: DeltaNetSpec, width: int, *, to_tiles: bool) -> Tensor:
    """Heads of `width` rows: those of one key head together -> the first of each key head, the second, ..."""
    ratio = mixer.num_heads // mixer.num_key_heads
    shape = (mixer.num_key_heads, ratio) if to_tiles else (ratio, mixer.num_key_heads)
    heads = torch.arange(mixer.num_heads).view(shape).T.flatten()
    return (heads[:, None] * width + torch.arange(width)).flatten()


def pairs_order(head_dim: int, rotated: int, *, to_pairs: bool) -> Tensor:
    """Which row of a head comes where: [first half, second half] -> pairs, or back. [head_dim]."""
    first = torch.arange(rotated)
    order = first.view(2, -1).T.flatten() if to_pairs else first.view(-1, 2).T.flatten()
    return torch.cat((order, torch.arange(rotated, head_dim)))


def order_of_heads(order: Tensor, heads: int) -> Tensor:
    """The order [head_dim] of one head for all of them: [heads x head_dim]."""
    return (torch.arange(heads)[:, None] * len(order) + order).flatten()
