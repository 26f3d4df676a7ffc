"""bitsandbytes' four bits: nibbles that index a table, with their sizes in a JSON text in a tensor."""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd, isfinite, prod

import torch
from torch import Tensor

from plait.checkpoint.quantized.parts import StoredWeight, WeightParts
from plait.checkpoint.readers.mmap_json import parse_json
from plait.errors import BadFile, ShapeMismatch, UnsupportedFormat, clip_text
from plait.quant.codebook import Codebook, Nested

_MAX_STATE = 4096


def codebook(parts: WeightParts) -> StoredWeight:
    """weight uint8 [bytes, 1], flattened over rows; absmax for each `blocksize` numbers, perhaps as bytes."""
    state = _state(parts)
    kind = state.get("quant_type")
    if kind not in ("nf4", "fp4"):
        raise UnsupportedFormat(
            f"{parts.name}: bitsandbytes' type {str(kind)[:40]!r} is not read; nf4 and fp4 are"
        )
    shape, block = _sizes(parts, state)
    count = prod(shape)
    if parts.dtype("plain") != "uint8" or prod(parts.shape("plain")) * 2 != count:
        raise ShapeMismatch(
            f"{parts.names['plain']}: {parts.dtype('plain')} {list(parts.shape('plain'))} is not "
            f"{list(shape)} in four bits"
        )
    nested = "nested_absmax" in parts
    parts.expect("absmax", (-(-count // block),), "uint8" if nested else "float32")
    parts.expect("quant_map", (16,), "float32")

    def read() -> Codebook:
        rows, cols = count // shape[-1], shape[-1]
        size = gcd(cols, block)
        absmax = _by_row(parts.read("absmax") if nested else parts.finite("absmax"), block, size, rows, cols)
        inner = _read_nested(parts, state, block, size, (rows, cols)) if nested else None
        codes = parts.read("plain").reshape(rows, cols // 2)
        return Codebook(codes, parts.finite("quant_map"), absmax, size, kind, inner)

    return StoredWeight(shape, f"bnb_{kind}", read)


def _state(parts: WeightParts) -> Mapping[str, object]:
    found = [name for name in parts.names if name.startswith("quant_state")]
    if len(found) != 1:
        raise BadFile(f"{parts.name}: its quant_state is missing, which has its shape")
    (size,) = parts.need(found[0], "uint8", dims=(1,))
    if size > _MAX_STATE:
        raise BadFile(
            f"{parts.names[found[0]]}: {size} bytes; a few hundred are usual, {_MAX_STATE} are allowed"
        )
    return parse_json(bytes(parts.read(found[0]).tolist()), parts.names[found[0]])


def _sizes(parts: WeightParts, state: Mapping[str, object]) -> tuple[tuple[int, ...], int]:
    """(shape of the weight, numbers of a block)."""
    shape, block = state.get("shape"), state.get("blocksize")
    if (
        not isinstance(shape, list)
        or len(shape) not in (2, 3)
        or not all(type(n) is int and 0 < n < 1 << 48 for n in shape)
        or shape[-1] % 2
        or type(block) is not int
        or not 0 < block <= 1 << 16
        or block & (block - 1)
    ):
        shown = f"shape {clip_text(repr(shape), 80)}, blocksize {clip_text(repr(block), 80)}"
        raise BadFile(f"{parts.name}: its quant_state has {shown}")
    return tuple(shape), block


def _by_row(numbers: Tensor, block: int, size: int, rows: int, cols: int) -> Tensor:
    """One number for each `size` columns of a row, of numbers for each `block` of all rows flattened."""
    if size == block:
        return numbers.reshape(rows, cols // size)
    return numbers[torch.arange(rows * cols // size) * size // block].reshape(rows, cols // size)


def _read_nested(
    parts: WeightParts, state: Mapping[str, object], block: int, size: int, shape: tuple[int, int]
) -> Nested:
    outer, offset = state.get("nested_blocksize"), state.get("nested_offset")
    if type(outer) is not int or not 0 < outer <= 1 << 16 or outer & (outer - 1):
        raise BadFile(f"{parts.name}: its quant_state has nested_blocksize {str(outer)[:40]!r}")
    if not isinstance(offset, int | float) or not isfinite(offset):
        raise BadFile(f"{parts.name}: its quant_state has nested_offset {str(offset)[:40]!r}")
    (count,) = parts.shape("absmax")
    parts.expect("nested_absmax", (-(-count // outer),), "float32")
    parts.expect("nested_quant_map", (256,), "float32")
    rows, cols = shape
    per_row = cols // size
    step = gcd(per_row, outer * (block // size))  # places of a row's absmax that share a scale
    first = torch.arange(rows * per_row // step) * step * size // block
    scale = parts.finite("nested_absmax")[first // outer].reshape(rows, per_row // step)
    table = parts.finite("nested_quant_map")
    return Nested(table, scale, torch.full((rows,), float(offset)), step)
