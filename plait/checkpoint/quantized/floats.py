"""Small floats with scales: FP8 of every granularity, NVFP4 and MXFP4."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from plait.checkpoint.quantized.parts import FLOATS, StoredWeight, WeightParts
from plait.errors import BadFile, ShapeMismatch
from plait.quant.fp4 import Fp4
from plait.quant.fp8 import Fp8

BYTES = ("uint8", "float8_e8m0fnu")
_ROWS = (1, 32)
_BLOCKS = ((128, 128), _ROWS, (1, 128))  # what a file may have that does not say
_SHARDS = (2, 4, 8, 16, 32)  # of rows, each with whole blocks of its own (MiMo-V2.5's queries, keys, values)


def fp8(parts: WeightParts) -> StoredWeight:
    """weight e4m3 [..., out, in]; a scale for all, for each row, or for each block, which multiplies."""
    shape = parts.need("plain", "float8_e4m3fn", dims=(2, 3))
    part = next(name for name in ("scale_inv", "scale", "qscale", "own_scale") if name in parts)
    scales = parts.need(part, *FLOATS, *BYTES, dims=(0, 1, 2, 3))
    block, blocks, rows = _block(parts, part, shape, scales)

    def read() -> Fp8:
        stored = parts.exponents(part) if parts.dtype(part) in BYTES else parts.finite(part).float()
        codes = parts.read("plain").flatten(0, -2)
        scale = stored.reshape(-1, *blocks)
        if len(scale) > 1 and rows % block[0]:  # blocks that end with each matrix of the stack
            return Fp8(codes, scale.repeat_interleave(block[0], 1)[:, :rows].flatten(0, 1), (1, block[1]))
        return Fp8(codes, scale.flatten(0, 1).contiguous(), block)

    return StoredWeight(shape, "fp8" if block[1] >= shape[-1] else f"fp8_b{block[1]}", read)


def unscaled_fp8(parts: WeightParts) -> StoredWeight:
    """weight e4m3 [out, in] with numbers that have no scale."""
    shape = parts.need("plain", "float8_e4m3fn")

    def read() -> Fp8:
        return Fp8(parts.read("plain"), torch.ones(1, 1), (shape[0], shape[1]))

    return StoredWeight(shape, "fp8", read)


def _block(
    parts: WeightParts, part: str, shape: tuple[int, ...], scales: tuple[int, ...]
) -> tuple[tuple[int, int], tuple[int, int], int]:
    """(rows and columns of a block, how many there are of each in one matrix, and the rows of that)."""
    rows, cols = shape[-2:]
    count = prod(shape[:-2])
    if prod(scales) == count:
        return (rows, cols), (1, 1), rows
    if part not in ("scale_inv", "own_scale") and prod(scales) == count * rows and scales[-1] in (1, rows):
        return (1, cols), (rows, 1), rows
    said, group = parts.options.block, parts.options.group
    own = (_ROWS,) if part == "own_scale" else ()  # tables have a scale for columns of each row
    for block in (said, *own) if said else ((1, group or cols), *_BLOCKS):
        blocks = (-(-rows // block[0]), -(-cols // block[1]))
        if scales[-2:] == blocks and prod(scales) == count * prod(blocks):
            return (min(block[0], rows), min(block[1], cols)), blocks, rows
    if said and len(shape) == len(scales) == 2:
        sizes = {n: rows // n for n in _SHARDS if rows % n == 0}
        fits = [n for n, size in sizes.items() if scales == (n * -(-size // said[0]), -(-cols // said[1]))]
        if len(fits) == 1:
            return said, (scales[0] // fits[0], scales[1]), sizes[fits[0]]
    raise ShapeMismatch(
        f"{parts.names[part]}: {list(scales)} scales do not fit a weight of {list(shape)}"
        + (f" in blocks of {list(said)}" if said else "")
    )


def nvfp4(parts: WeightParts) -> StoredWeight:
    """Nibbles uint8 [..., out, in / 2], scales e4m3 for 16 columns, one number for all.

    compressed-tensors divides by its weight_global_scale, modelopt multiplies with its weight_scale_2.
    """
    part = "packed" if "packed" in parts else "plain"
    shape = _nibbles(parts, part, "scale", 16, "float8_e4m3fn")

    def read() -> Fp4:
        factor = parts.number("scale_2") if "scale_2" in parts else 1 / parts.number("global_scale")
        scales = parts.read("scale").flatten(0, -2)
        return Fp4(parts.read(part).flatten(0, -2), scales, torch.tensor([factor], dtype=torch.float32))

    return StoredWeight(shape, "nvfp4", read, lambda: parts.finite("scale"))


def nvfp4_stack(parts: WeightParts) -> StoredWeight:
    """Inkling 2 Mini: nibbles uint8 [..., out, in / 2], scales e4m3 for 16 columns.

    Each matrix of the stack is multiplied by its own largest number, over one number for all or its own.
    """
    shape = _nibbles(parts, "plain", "scale_inv", 16, "float8_e4m3fn")
    count = prod(shape[:-2])
    for part in ("amax", "amax_divisor"):
        if prod(found := parts.need(part, *FLOATS, dims=(0, 1, 2, 3))) not in (1, count):
            raise ShapeMismatch(
                f"{parts.names[part]}: {list(found)}; expected one number, or one for each of the {count} "
                "matrices"
            )

    def read() -> Fp4:
        largest, by = (parts.finite(x).float().flatten().expand(count) for x in ("amax", "amax_divisor"))
        if not bool(by.all()):
            raise BadFile(f"{parts.names['amax_divisor']}: holds a zero; the file is damaged")
        factors = (largest / by).repeat_interleave(shape[-2])
        return Fp4(parts.read("plain").flatten(0, -2), parts.read("scale_inv").flatten(0, -2), factors)

    return StoredWeight(shape, "nvfp4", read, lambda: parts.finite("scale_inv"))


def packed_mxfp4(parts: WeightParts) -> StoredWeight:
    """compressed-tensors, MiMo-V2.6, DeepSeek-V4: bytes [..., out, in / 2] of two numbers each, and one of
    exponent for 32 columns."""
    part = "packed" if "packed" in parts else "plain"
    scales = "own_scale" if "own_scale" in parts else "scale"
    shape = _nibbles(parts, part, scales, 32, *BYTES)

    def read() -> Fp4:
        codes = parts.read(part).view(torch.uint8)
        return Fp4(codes.flatten(0, -2), _exponents(parts, scales))

    return StoredWeight(shape, "mxfp4", read, lambda: parts.check_exponents(scales))


def _nibbles(parts: WeightParts, codes: str, scales: str, group: int, *dtypes: str) -> tuple[int, ...]:
    kinds = ("uint8", "int8") if scales == "own_scale" else ("uint8",)
    shape = parts.need(codes, *kinds, dims=(2, 3))
    cols = shape[-1] * 2
    if cols % group:
        raise ShapeMismatch(f"{parts.names[codes]}: {cols} columns are no whole groups of {group}")
    parts.expect(scales, (*shape[:-1], cols // group), *dtypes)
    return (*shape[:-1], cols)


def block_mxfp4(parts: WeightParts) -> StoredWeight:
    """gpt-oss: blocks uint8 [..., out, in / 32, 16], low nibbles first; scales uint8 [..., out, in / 32]."""
    blocks = parts.need("blocks", "uint8", dims=(3, 4))
    if blocks[-1] != 16:
        raise ShapeMismatch(f"{parts.names['blocks']}: {list(blocks)}; a block has 16 bytes")
    parts.expect("block_scales", blocks[:-1], *BYTES)

    def read() -> Fp4:
        codes = parts.read("blocks").flatten(-2).flatten(0, -2)
        return Fp4(codes, _exponents(parts, "block_scales"))

    shape = (*blocks[:-2], blocks[-2] * 32)
    return StoredWeight(shape, "mxfp4", read, lambda: parts.check_exponents("block_scales"))


def _exponents(parts: WeightParts, part: str) -> Tensor:
    return parts.read(part).view(torch.uint8).flatten(0, -2)
