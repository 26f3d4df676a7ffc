"""Fields of blocks of bytes: float16 numbers, nibbles and smaller ones, single bits.

Fields are little endian, and the lowest bits of a run of bytes come before its higher ones.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


@cache
def constants(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small table of a format, [n]. It is copied to a device once: at every copy the host waits for it."""
    return torch.tensor(values, dtype=dtype, device=device)


def half(blocks: Tensor, at: int) -> Tensor:
    """The float16 at a byte of every block, [n, 1] float32."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def nibbles(packed: Tensor) -> Tensor:
    """[n, runs, bytes] -> [n, runs * 2, bytes]: of each run the low nibbles, then the high ones."""
    return torch.stack((packed & 15, packed >> 4), 2).flatten(1, 2)


def fields(packed: Tensor, bits: int) -> Tensor:
    """[n, runs, bytes] -> [n, runs * 8/bits, bytes]: of each run its lowest `bits`, then the next, …"""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return ((packed.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1, 2)


def bits(packed: Tensor) -> Tensor:
    """[n, bytes] -> [n, bytes * 8], the lowest bit of a byte first."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(-1) >> shifts) & 1).flatten(1)


def words(blocks: Tensor, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Bytes start..stop of every block as unsigned numbers of that width, [n, count] int64."""
    found = blocks[:, start:stop].clone(memory_format=torch.contiguous_format).view(dtype).long()
    return found & ((1 << 8 * dtype.itemsize) - 1)
