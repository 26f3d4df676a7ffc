"""Small unsigned integers packed into bytes, and the fields of blocks of bytes.

`pack` and `unpack`: integers one after the other, from the lowest bit of the first byte on. Fields of blocks:
float16 numbers, nibbles and smaller ones, single bits; they are little endian, and the lowest bits of a run
of bytes come before its higher ones.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """The first `count` numbers of each row: uint8 [n, bytes] -> uint8 [n, count], bits 1..8."""
    if bits == 8:
        return packed[:, :count]
    if bits in (1, 2, 4):
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
        return ((packed.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(1)[:, :count]
    units = _units(packed, bits).long()  # [n, units, bits]: eight numbers each
    units <<= torch.arange(bits, device=packed.device) * 8
    numbers = units.sum(-1, keepdim=True) >> torch.arange(8, device=packed.device) * bits
    numbers &= (1 << bits) - 1
    return numbers.to(torch.uint8).flatten(1)[:, :count]


def pack(values: Tensor, bits: int) -> Tensor:
    """uint8 [n, count] below 2**bits -> uint8 [n, ceil(count * bits / 8)]."""
    count = values.shape[1]
    if bits == 8:
        return values
    if bits in (1, 2, 4):
        units = _units(values, 8 // bits)
        whole = units[:, :, 0].contiguous()
        for place in range(1, 8 // bits):
            whole |= units[:, :, place] << (bits * place)
        return whole
    units = _units(values, 8).long()  # eight numbers are `bits` bytes
    words = (units << (torch.arange(8, device=values.device) * bits)).sum(-1, keepdim=True)
    parts = (words >> (torch.arange(bits, device=values.device) * 8)) & 255
    packed: Tensor = parts.to(torch.uint8).flatten(1)[:, : -(-count * bits // 8)].contiguous()
    return packed


def _units(values: Tensor, size: int) -> Tensor:
    """[n, count] -> [n, ceil(count / size), size], filled up with zeros."""
    missing = -values.shape[1] % size
    units: Tensor = torch.nn.functional.pad(values, (0, missing)).unflatten(1, (-1, size))
    return units


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
