"""Weights of random bytes in every quantized format, as cases of ops need them: products of order 1."""

from __future__ import annotations

import math
import re

import torch
from torch import Tensor

from plait.quant.codebook import Codebook
from plait.quant.fp4 import Fp4
from plait.quant.fp8 import Fp8
from plait.quant.gguf import BLOCK_TYPES, BlockType, Gguf, block_type
from plait.quant.grouped import Grouped
from plait.quant.weight import Weight

_FP8 = re.compile(r"fp8(?:_b(?P<block>\d+))?")
_CODES = ("mxfp4", "nvfp4", "bnb_nf4", "bnb_fp4")
_GROUPED = re.compile(r"int(?P<bits>\d)(?:_g(?P<group>\d+))?(?P<more>(?:\+\w+)*)")


def is_storage(kind: str) -> bool:
    """Whether `random_weight` has weights of this name; no plain numbers are among them."""
    is_block = kind in {block.name for block in BLOCK_TYPES.values()}
    return is_block or kind in _CODES or bool(_FP8.fullmatch(kind) or _GROUPED.fullmatch(kind))


def random_weight(kind: str, rows: int, cols: int) -> Weight:
    """A weight in a format named as `Weight.format` names it, for GGUF and all others.

    Names of integers in groups may have additions: 'int4_g128+zeros+order+bfloat16'.
    """
    unit = 2.0 / cols**0.5
    if found := _GROUPED.fullmatch(kind):
        return _random_groups(int(found["bits"]), int(found["group"] or cols), found["more"], rows, cols)
    if found := _FP8.fullmatch(kind):
        side = int(found["block"] or 0)
        codes = (torch.randn(rows, cols) * 60).to(torch.float8_e4m3fn)
        block = (side, side) if side else (1, cols)
        shape = [-(-n // b) for n, b in zip((rows, cols), block, strict=True)]
        return Fp8(codes, (0.5 + torch.rand(shape)) * unit / 100, block)
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    match kind:
        case "mxfp4":
            scales = 127 + round(math.log2(unit / 6)) + torch.randint(-1, 2, (rows, cols // 32))
            return Fp4(codes, scales.to(torch.uint8))
        case "nvfp4":
            scales = (20 + 10 * torch.rand(rows, cols // 16)).to(torch.float8_e4m3fn)
            return Fp4(codes, scales, torch.tensor([unit / 200]))
        case "bnb_nf4" | "bnb_fp4":
            scales = unit * torch.rand(rows, cols // 64)
            return Codebook(codes, torch.linspace(-1, 1, 16), scales, 64, kind.removeprefix("bnb_"))
    return random_blocks(kind, rows, cols)


def _random_groups(bits: int, group: int, more: str, rows: int, cols: int) -> Grouped:
    words = set(more.split("+")[1:])
    count = -(-cols // group)
    codes = torch.randint(0, 256, (rows, cols * bits // 8), dtype=torch.uint8)
    dtype = next((getattr(torch, w) for w in words if hasattr(torch, w) and "float" in w), torch.float16)
    scales = ((0.5 + torch.rand(rows, count)) * 2.0 ** (2 - bits) / cols**0.5).to(dtype)
    low, high = (1 << bits) * 3 // 8, (1 << bits) * 5 // 8 + 1
    zeros = torch.randint(low, high, (rows, count), dtype=torch.uint8) if "zeros" in words else None
    order = torch.randperm(cols).to(torch.int32) if "order" in words else None
    return Grouped(codes, scales, zeros, bits, group, order)


def random_blocks(name: str, rows: int, cols: int) -> Gguf:
    """A weight matrix of random bytes. Its scales are small: inputs of order 1 give outputs of order 1."""
    kind = block_type(name)
    data = torch.randint(0, 256, (rows * cols // kind.elements, kind.nbytes), dtype=torch.uint8)
    span = kind.decode(with_scales(data, kind, 1.0)).abs().amax() + 1e-9
    data = with_scales(data, kind, float(2.0 / (span * cols**0.5)))
    return Gguf(data.view(rows, -1), kind)


def with_scales(data: Tensor, kind: BlockType, scale: float) -> Tensor:
    """The same blocks [n, bytes] under other scales, within a factor of two of `scale`."""
    data, count = data.clone(), len(data)
    values = scale * (0.5 + torch.rand(count, len(kind.scales_at)))
    for i, at in enumerate(kind.scales_at):
        data[:, at : at + 2] = values[:, i : i + 1].to(torch.float16).view(torch.uint8)
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
