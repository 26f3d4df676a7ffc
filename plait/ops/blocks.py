"""Weights of random bytes in GGUF's block formats, as cases of ops want them: numbers of order 1."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from plait.quant.gguf import BlockType, Gguf, block_type


def random_blocks(name: str, rows: int, cols: int) -> Gguf:
    """A map of random bytes in a format, its scales made small: products with numbers of order 1 are too."""
    kind = block_type(name)
    data = torch.randint(0, 256, (rows * cols // kind.elements, kind.nbytes), dtype=torch.uint8)
    span = kind.decode(with_scales(data, kind, 1.0)).abs().amax() + 1e-9
    data = with_scales(data, kind, float(2.0 / (span * cols**0.5)))
    return Gguf(data.view(rows, -1), kind)


def with_scales(data: Tensor, kind: BlockType, scale: float) -> Tensor:
    """The same blocks [n, bytes] under other scales, within a factor of two of the one that is asked for."""
    data, count = data.clone(), len(data)
    values = scale * (0.5 + torch.rand(count, len(kind.scales_at)))
    for i, at in enumerate(kind.scales_at):
        data[:, at : at + 2] = values[:, i].to(torch.float16).view(torch.uint8).view(-1, 2)
    match kind.name:
        case "Q8_K":
            data[:, :4] = torch.full((count,), scale).view(torch.uint8).view(-1, 4)
        case "MXFP4":
            data[:, 0] = 128 + round(math.log2(scale)) + torch.randint(-1, 2, (count,)).to(torch.uint8)
        case "NVFP4":
            halves = (2.0 * scale * (0.5 + torch.rand(count, 4))).to(torch.float8_e4m3fn)
            data[:, :4] = halves.view(torch.uint8)
        case "IQ1_M":  # four bits of the float16 in the top of each of four words
            bits = int(torch.tensor(scale, dtype=torch.float16).view(torch.int16))
            for i in range(4):
                data[:, 49 + 2 * i] = data[:, 49 + 2 * i] & 15 | ((bits >> 4 * i & 15) << 4)
    return data
