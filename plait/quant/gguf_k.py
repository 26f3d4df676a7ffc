"""How K-quants and IQ4 blocks become numbers: groups with small whole scales under a float16.

Every function takes uint8 [n, bytes of a block] and gives float32 [n, elements]. Layouts: the ggml tensor
library.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.quant.bits import constants, fields, half, nibbles

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def q2_k(blocks: Tensor) -> Tensor:
    """16 groups of 16; a byte per group: the scale in its low nibble, the minimum in the high one."""
    scale = half(blocks, 80) * (blocks[:, :16] & 15).float()  # [n, 16]
    minimum = half(blocks, 82) * (blocks[:, :16] >> 4).float()
    q = fields(blocks[:, 16:80].reshape(-1, 2, 32), 2).reshape(-1, 16, 16).float()
    return (scale.unsqueeze(-1) * q - minimum.unsqueeze(-1)).flatten(1)


def q3_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 with six-bit scales; the third bits are in a mask, where clear means minus 4."""
    low = nibbles(blocks[:, None, 96:104]).flatten(1)  # [n, 16]
    high = fields(blocks[:, None, 104:108], 2).flatten(1)
    scale = half(blocks, 108) * ((low | (high << 4)).float() - 32)
    q = fields(blocks[:, 32:96].reshape(-1, 2, 32), 2).flatten(1)
    q |= fields(blocks[:, None, :32], 1).flatten(1) << 2
    return (scale.unsqueeze(-1) * (q.float() - 4).view(-1, 16, 16)).flatten(1)


def _k_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """[n, 12] -> the six-bit scales and minima of 8 groups, [n, 8, 1] float32 each.

    Groups 0..3 have theirs in the low six bits of bytes 0..3 and 4..7. Groups 4..7 have the low four bits in
    a nibble of bytes 8..11 and the high two in the top of bytes 0..3 and 4..7.
    """
    first, second, third = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scale = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), 1)
    minimum = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), 1)
    return scale.float().unsqueeze(-1), minimum.float().unsqueeze(-1)


def _k_groups(blocks: Tensor, q: Tensor) -> Tensor:
    """q: [n, 8, 32] under the two-level scales that Q4_K and Q5_K share."""
    scale, minimum = _k_scales(blocks[:, 4:16])
    d, dmin = half(blocks, 0).unsqueeze(-1), half(blocks, 2).unsqueeze(-1)
    return ((d * scale) * q.float() - dmin * minimum).flatten(1)


def q4_k(blocks: Tensor) -> Tensor:
    return _k_groups(blocks, nibbles(blocks[:, 16:].reshape(-1, 4, 32)))


def q5_k(blocks: Tensor) -> Tensor:
    """Bit g of the 32 high-bit bytes belongs to group g."""
    q = nibbles(blocks[:, 48:].reshape(-1, 4, 32)) | (fields(blocks[:, None, 16:48], 1) << 4)
    return _k_groups(blocks, q)


def q6_k(blocks: Tensor) -> Tensor:
    """Two halves of 128: runs of 32 made of nibbles and two-bit fields; 16 int8 scales."""
    low = nibbles(blocks[:, :128].reshape(-1, 2, 64)).reshape(-1, 8, 32)
    high = fields(blocks[:, 128:192].reshape(-1, 2, 32), 2)
    scale = half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
    q = (low | (high << 4)).float() - 32
    return (scale.unsqueeze(-1) * q.view(-1, 16, 16)).flatten(1)


def _iq4(q: Tensor) -> Tensor:
    return constants(IQ4_VALUES, torch.float32, q.device)[q.int()]


def iq4_nl(blocks: Tensor) -> Tensor:
    return half(blocks, 0) * _iq4(nibbles(blocks[:, None, 2:18]).flatten(1))


def iq4_xs(blocks: Tensor) -> Tensor:
    """8 groups of 32; six-bit scales: nibbles at byte 4, two high bits each at byte 2."""
    packed = blocks[:, 4:8]
    low = torch.stack((packed & 15, packed >> 4), 2).flatten(1)  # [n, 8], neighbours share a byte
    pairs = blocks[:, 2:4]
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = ((pairs.unsqueeze(-1) >> shifts) & 3).flatten(1)
    scale = half(blocks, 0) * ((low | (high << 4)).float() - 32)
    return (scale.unsqueeze(-1) * _iq4(nibbles(blocks[:, 8:].reshape(-1, 8, 16)).reshape(-1, 8, 32))).flatten(
        1
    )
