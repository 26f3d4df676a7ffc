"""Small unsigned integers, packed one after the other from the lowest bit of the first byte on."""

from __future__ import annotations

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
