"""Indices into a table of sixteen numbers, in blocks under their largest magnitude: bitsandbytes' nf4, fp4.

How the bytes lie: byte b of a row of `codes` holds column 2b in its HIGH nibble and column 2b + 1 in its low
one, as bitsandbytes writes them. `block` columns of a row share one number:

    w[o, c] = table[code[o, c]] * absmax[o, c // block]

`absmax` can be quantized itself (double quantization). It is bytes then, and the number they stand for is

    nested.table[absmax[o, k]] * nested.scale[o, k // nested.block] + nested.offset[o]

A file's blocks run on over the ends of rows. Where rows are no multiple of them, `block` is the largest
size that divides both, and a number is there several times: rows stay independent of each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant.weight import BlockWeight, check_range


@dataclass(frozen=True, slots=True, eq=False)
class Nested:
    """What bytes of `absmax` mean. table: float32 [256]; scale: float32 [out, n]; offset: float32 [out]."""

    table: Tensor
    scale: Tensor
    offset: Tensor
    block: int  # bytes of absmax in a row that share a scale

    @property
    def nbytes(self) -> int:
        return 4 * (self.table.numel() + self.scale.numel() + self.offset.numel())


@dataclass(frozen=True, slots=True, eq=False)
class Codebook(BlockWeight):
    """A weight matrix [out, in] of indices into a table.

    codes: uint8 [out, in / 2]; table: float32 [16]; absmax: float32 [out, in / block], or uint8 of that shape
    with `nested`; kind: the table's name, 'nf4' or 'fp4'.
    """

    codes: Tensor
    table: Tensor
    absmax: Tensor
    block: int
    kind: str
    nested: Nested | None = None

    def __post_init__(self) -> None:
        rows, cols = self.shape
        wanted = torch.float32 if self.nested is None else torch.uint8
        if (
            self.codes.dtype != torch.uint8
            or list(self.table.shape) != [16]
            or self.absmax.dtype != wanted
            or self.block < 1
            or cols % self.block
            or list(self.absmax.shape) != [rows, cols // self.block]
        ):
            raise ShapeMismatch(
                f"{self.kind} of {[rows, cols]} in blocks of {self.block} wants uint8 codes, a table of 16 "
                f"and {wanted} {[rows, cols // max(self.block, 1)]} for the blocks, got {self.codes.dtype}, "
                f"{list(self.table.shape)} and {self.absmax.dtype} {list(self.absmax.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        rows, row_bytes = self.codes.shape
        return rows, row_bytes * 2

    @property
    def nbytes(self) -> int:
        own = self.codes.numel() + 4 * 16 + self.absmax.numel() * self.absmax.element_size()
        return own + (self.nested.nbytes if self.nested else 0)

    @property
    def format(self) -> str:
        """'bnb_nf4' or 'bnb_fp4'."""
        return f"bnb_{self.kind}"

    def magnitudes(self) -> Tensor:
        """What multiplies each block, [out, in / block] float32, whether or not it is stored as bytes."""
        if self.nested is None:
            return self.absmax
        of = torch.arange(self.absmax.shape[1], device=self.absmax.device) // self.nested.block
        numbers = self.nested.table[self.absmax.int()] * self.nested.scale[:, of]
        return numbers + self.nested.offset[:, None]

    def _decode(self, start: int, stop: int) -> Tensor:
        some = self._take(slice(start, stop))
        index = torch.stack((some.codes >> 4, some.codes & 15), -1).flatten(1)
        numbers = self.table[index.int()].unflatten(1, (-1, self.block))
        decoded: Tensor = (numbers * some.magnitudes().unsqueeze(-1)).flatten(1)
        return decoded

    def _take(self, index: Tensor | slice) -> Codebook:
        nested = self.nested
        if nested is not None:
            nested = replace(nested, scale=nested.scale[index], offset=nested.offset[index])
        return replace(self, codes=self.codes[index], absmax=self.absmax[index], nested=nested)

    def cols(self, start: int, stop: int) -> Codebook:
        """Columns start..stop. Raises ShapeMismatch outside the matrix or inside a block."""
        check_range("columns", start, stop, self.shape[1], self)
        if start % self.block or stop % self.block or start % 2 or stop % 2:
            raise ShapeMismatch(
                f"columns {start}..{stop} would cut a block of {self.format}: both must be multiples of "
                f"{self.block}"
            )
        blocks = slice(start // self.block, stop // self.block)
        codes = self.codes[:, start // 2 : stop // 2]
        return replace(self, codes=codes, absmax=self.magnitudes()[:, blocks], nested=None)

    @classmethod
    def cat(cls, parts: Sequence[Codebook]) -> Codebook:
        """Row-wise concatenation. Raises ShapeMismatch unless format, width, block and table are one.

        Where the parts' blocks are quantized in different ways, the result keeps them in float32.
        """
        first = parts[0]
        same = {(part.format, part.shape[1], part.block) for part in parts}
        if len(same) != 1 or not all(torch.equal(part.table, first.table) for part in parts):
            shown = [f"{part.format} {list(part.shape)} in blocks of {part.block}" for part in parts]
            raise ShapeMismatch(f"cannot stack the rows of {shown}: format, width and table must be one")
        nested = _stack_nested([part.nested for part in parts])
        numbers = [part.absmax if nested else part.magnitudes() for part in parts]
        codes = torch.cat([part.codes for part in parts])
        return replace(first, codes=codes, absmax=torch.cat(numbers), nested=nested)

    def times(self, factor: Tensor) -> Codebook:
        """The matrix times a number, or one number for each row; what multiplies blocks becomes float32."""
        by = factor.to(self.absmax.device, torch.float32).reshape(-1, 1)
        return replace(self, absmax=self.magnitudes() * by, nested=None)

    def to(self, device: torch.device) -> Codebook:
        nested = self.nested
        if nested is not None:
            table, scale, offset = (t.to(device) for t in (nested.table, nested.scale, nested.offset))
            nested = Nested(table, scale, offset, nested.block)
        codes, table, absmax = (t.to(device) for t in (self.codes, self.table, self.absmax))
        return replace(self, codes=codes, table=table, absmax=absmax, nested=nested)


def _stack_nested(parts: Sequence[Nested | None]) -> Nested | None:
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    first = found[0]
    if any(part.block != first.block or not torch.equal(part.table, first.table) for part in found):
        return None
    scale, offset = torch.cat([part.scale for part in found]), torch.cat([part.offset for part in found])
    return Nested(first.table, scale, offset, first.block)
