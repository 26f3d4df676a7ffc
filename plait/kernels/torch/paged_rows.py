"""Rows of paged memory by their numbers in each sequence, in shapes that no data decides."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_rows(cache: Tensor, block_table: Tensor, rows: Tensor) -> Tensor:
    """Rows of each sequence [T, n], counted from its first -> [T, n, …]. cache: [blocks, rows of one, …]."""
    size = cache.shape[1]
    places = block_table.gather(1, rows // size) * size + rows % size
    return cache.flatten(0, 1)[places]


def list_window(cache: Tensor, block_table: Tensor, seq_lens: Tensor, window: int | None) -> Tensor:
    """The rows that the last token of each sequence sees, [T, n], below 0 in front of its first."""
    most = block_table.shape[1] * cache.shape[1]
    width = most if window is None else min(window, most)
    return (seq_lens - width)[:, None] + torch.arange(width, device=cache.device)
