"""The same numbers in another format's bytes: codes and scales are moved, nothing is rounded."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.quant.bits import pack, unpack
from plait.quant.fp4 import Fp4
from plait.quant.gguf import BlockType, Gguf, block_type
from plait.quant.grouped import Grouped
from plait.quant.weight import Weight

BLOCK = 32  # columns under one scale in Q4_0, Q8_0 and MXFP4
NVFP4 = 64  # columns of a block of it


def block_kind(value: Tensor | Weight) -> BlockType | None:
    """The format of GGUF that holds every number of the matrix exactly, if there is one.

    MXFP4 is MXFP4 there, integers of 4 and 8 bits around a middle zero are Q4_0 and Q8_0. NVFP4 is NVFP4, but
    for its factor, which is a tensor of its own: `factors`.
    """
    match value:
        case Gguf():
            return value.kind
        case Fp4(factor=None) if value.format == "mxfp4":
            return block_type("MXFP4")
        case Fp4() if value.format == "nvfp4" and value.shape[1] % NVFP4 == 0 and _is_unsigned(value.scales):
            return block_type("NVFP4")
        case Grouped(zeros=None, order=None, bits=4 | 8) if _fits(value):
            return block_type("Q8_0" if value.bits == 8 else "Q4_0")
    return None


def _fits(value: Grouped) -> bool:
    """Whole blocks under scales that are numbers of float16."""
    cols = value.shape[1]
    if cols % BLOCK or (value.group % BLOCK and value.group < cols):
        return False
    return torch.equal(value.scales.to(torch.float16).to(value.scales.dtype), value.scales)


def as_blocks(value: Weight, kind: BlockType) -> Gguf:
    """The weight matrix in its `block_kind`."""
    if isinstance(value, Grouped):
        return Gguf(_integers(value), kind)
    if isinstance(value, Fp4):
        return Gguf(_mxfp4(value) if value.format == "mxfp4" else _nvfp4(value), kind)
    assert isinstance(value, Gguf)
    assert value.kind.name == kind.name
    return value


def _integers(value: Grouped) -> Tensor:
    rows, cols = value.shape
    groups = torch.arange(0, cols, BLOCK) // value.group
    scales = value.scales[:, groups].to(torch.float16).unsqueeze(-1).view(torch.uint8)
    codes = unpack(value.codes, value.bits, cols).view(rows, -1, BLOCK)
    if value.bits == 8:
        return torch.cat((scales, codes ^ 0x80), 2).flatten(1)
    return torch.cat((scales, _halves(codes)), 2).flatten(1)


def _mxfp4(value: Fp4) -> Tensor:
    rows, cols = value.shape
    codes = unpack(value.codes, 4, cols).view(rows, -1, BLOCK)
    return torch.cat((value.scales.view(torch.uint8).unsqueeze(-1), _halves(codes)), 2).flatten(1)


def _is_unsigned(scales: Tensor) -> bool:
    """Numbers of E4M3 without a sign, as GGUF's have none."""
    return bool((scales.view(torch.uint8) < 0x7F).all())


def _nvfp4(value: Fp4) -> Tensor:
    """Four bytes of scales, then four groups of sixteen, each in halves."""
    rows, cols = value.shape
    codes = unpack(value.codes, 4, cols).view(rows, -1, 4, 16)
    halves = (codes[..., :8] | codes[..., 8:] << 4).flatten(2)
    return torch.cat((value.scales.view(torch.uint8).view(rows, -1, 4), halves), 2).flatten(1)


def factors(values: Sequence[Tensor | Weight], count: int) -> Tensor | None:
    """The factor of each of `count` equal parts of the rows of these NVFP4 matrices, float32 [count].

    None where a part has several factors, or a matrix is of a format without them.
    """
    if not all(isinstance(value, Fp4) for value in values):
        return None
    each = [torch.ones(1) if v.factor is None else v.factor for v in values if isinstance(v, Fp4)]
    rows = [by.expand(value.shape[0]) for by, value in zip(each, values, strict=True)]
    found = torch.cat(rows).view(count, -1)
    return found.amax(1) if bool((found == found[:, :1]).all()) else None


def _halves(codes: Tensor) -> Tensor:
    """[..., 32] -> [..., 16]: the first half in low nibbles, the second in high ones, as in every block."""
    return codes[..., :16] | codes[..., 16:] << 4


def nibbles_of(weight: Gguf, scale_nbytes: int) -> tuple[Tensor, Tensor]:
    """(codes [rows, cols / 2], neighbours in a byte; bytes of scales [rows, blocks, n]) of Q4_0 or MXFP4."""
    rows, cols = weight.shape
    blocks = weight.data.view(rows, -1, weight.kind.nbytes)
    halves = blocks[..., scale_nbytes:]
    codes = torch.cat((halves & 15, halves >> 4), 2).view(rows, cols)
    return pack(codes, 4), blocks[..., :scale_nbytes].contiguous()
