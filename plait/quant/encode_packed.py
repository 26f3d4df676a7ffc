"""Quantizes to the storage types of packed safetensors: integers in groups, and eight-bit floats.

    encode_groups(weight, group=128) -> Grouped     symmetric, four bits unless set otherwise
    encode_fp8(weight) -> Fp8                       blocks of 128 x 128; block=(1, columns): a scale per row

Both take [rows, columns] in any float dtype, work on some rows at a time, and raise BadFile for numbers that
are not finite or too large. A group's scale is searched as for GGUF's blocks (`encode`): the scale of
least squared error is solved for a few widths of the grid. Codes are taken once more for the rounded scale.
"""

from __future__ import annotations

import torch
from torch import Tensor

from plait.errors import BadFile, ShapeMismatch
from plait.quant.bits import pack
from plait.quant.fp8 import Fp8
from plait.quant.grouped import Grouped

FP8_MAX = 448.0  # the largest E4M3 number
_PIECE = 1 << 20  # numbers at a time
_WIDER = (0.0, -3.0, -2.4, -1.8, -1.2, -0.6, 0.5, 1.0)  # by how many codes the grid is made wider
_HALF_MAX = 65504.0


def encode_groups(
    weight: Tensor,
    group: int = 128,
    bits: int = 4,
    scale: torch.dtype = torch.float16,
    name: str = "a weight",
) -> Grouped:
    """weight [rows, cols] -> signed integers of `bits` bits under a positive scale for `group` columns.

    Raises ShapeMismatch if cols are no whole groups, BadFile if a number is not finite or too large.
    """
    rows, cols = _sizes(weight, name)
    if cols % group:
        raise ShapeMismatch(f"{name}: int{bits} wants whole groups of {group} columns, there are {cols}")
    codes = torch.empty(rows, cols * bits // 8, dtype=torch.uint8, device=weight.device)
    scales = torch.empty(rows, cols // group, dtype=scale, device=weight.device)
    low = -(1 << (bits - 1))
    for start, stop in _pieces(rows, cols):
        x = _check_range(weight[start:stop].float(), name).reshape(-1, group)
        kept = _group_scales(x, low).to(scale)
        q = _round_scaled(x, _inverse(kept.float()).unsqueeze(1), low)
        scales[start:stop] = kept.view(stop - start, -1)
        codes[start:stop] = pack((q - low).to(torch.uint8).view(stop - start, cols), bits)
    return Grouped(codes, scales, None, bits, group)


def encode_fp8(weight: Tensor, block: tuple[int, int] = (128, 128), name: str = "a weight") -> Fp8:
    """weight [rows, cols] -> E4M3 numbers; the largest in each block is 448 times its scale.

    block: (rows, columns) that share a scale; those at the edges may be cut short. Raises BadFile.
    """
    rows, cols = _sizes(weight, name)
    tall, wide = min(block[0], max(rows, 1)), min(block[1], max(cols, 1))
    codes = torch.empty(rows, cols, dtype=torch.float8_e4m3fn, device=weight.device)
    scale = torch.empty(-(-rows // tall), -(-cols // wide), device=weight.device)
    for start, stop in _pieces(rows, cols, tall):
        x = _check_range(weight[start:stop].float(), name)
        whole = torch.nn.functional.pad(x, (0, -cols % wide, 0, -(stop - start) % tall))
        blocks = whole.unflatten(0, (-1, tall)).unflatten(2, (-1, wide))
        found = blocks.abs().amax((1, 3)) / FP8_MAX
        found = torch.where(found > 0, found, 1.0)
        scale[start // tall : -(-stop // tall)] = found
        coded = (blocks / found[:, None, :, None]).clamp(-FP8_MAX, FP8_MAX).flatten(2).flatten(0, 1)
        codes[start:stop] = coded[: stop - start, :cols].to(torch.float8_e4m3fn)
    return Fp8(codes, scale, (tall, wide))


def _sizes(weight: Tensor, name: str) -> tuple[int, int]:
    if weight.dim() != 2:
        raise ShapeMismatch(f"{name}: a map has rows and columns, got {list(weight.shape)}")
    rows, cols = weight.shape
    return rows, cols


def _pieces(rows: int, cols: int, multiple: int = 1) -> list[tuple[int, int]]:
    step = max(1, _PIECE // max(1, cols) // multiple) * multiple
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def _check_range(x: Tensor, name: str) -> Tensor:
    largest = float(x.abs().amax()) if x.numel() else 0.0
    if not largest < _HALF_MAX:  # also where it is not a number
        raise BadFile(
            f"{name}: its largest number is {largest}; packed storage takes only finite numbers below "
            f"{_HALF_MAX:g}: leave it as it is"
        )
    return x


def _inverse(x: Tensor) -> Tensor:
    return torch.where(x > 0, 1 / x, 0.0)


def _round_scaled(x: Tensor, inverse: Tensor, low: int) -> Tensor:
    return (x * inverse).round_().clamp_(low, -low - 1)


def _group_scales(x: Tensor, low: int) -> Tensor:
    """The scale d > 0 of x ~ d * q, q in low..-low-1, for every row of x: [n, group] -> [n]."""
    per_unit = _inverse(x.abs().amax(1, keepdim=True))
    scale = torch.zeros(len(x), device=x.device)
    best = torch.zeros_like(scale)
    for wider in _WIDER:
        q = _round_scaled(x, per_unit * (-low - 0.5 - wider), low)
        xq, qq = (x * q).sum(1), q.square().sum(1)
        found = xq / qq.clamp(min=1)
        gain = xq * found  # by how much the squared error is less than that of zeros
        better = gain > best
        scale, best = torch.where(better, found, scale), torch.where(better, gain, best)
    return scale
