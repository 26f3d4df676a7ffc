"""Weights laid out for matrix units: planes of small codes, and scales of groups with them.

Kernels of GPUs load 16 bytes at a time and cannot do so from block structs of 18, 34 or 210 bytes. So every
storage is laid out once, when a model is loaded. A plane holds the same bits of all codes:

    plane: int16 [units, out, 16]. Lane e of a unit has 16 / P fields of P bits; field f is column 16 f + e.
    P = 4, a unit is 64 columns:    bits 15..12      bits 11..8       bits 7..4        bits 3..0
        lane e of unit u            64 u + 48 + e    64 u + 32 + e    64 u + 16 + e    64 u + e

A tile of any number of rows is one range of memory, 32 bytes of each row. One field of 16 lanes is what a
matrix instruction multiplies by 16 neighbours of x, so nothing is shuffled. Codes of 5 bits are a plane of 4
and one of 1, those of 6 are 4 and 2, those of 3 are 2 and 1. A code of E2M1 has its sign apart, so that two
of four fields become floats by one move each (`decode_planes`):

    bits 15..12: signs of fields 2, 3, 0, 1         bits 3 f .. 3 f + 2: magnitude of field f

A number is

    value(code) * scale + offset            scale, offset: float32, of a group of columns

and nothing is rounded on the way: scales that are products stay factors (`SCALES`), so that decoding gives
the bits of `Weight.dequantize`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from plait.quant.bits import constants
from plait.quant.gguf_k import IQ4_VALUES
from plait.quant.weight import piece_of

LANES = 16
ALL = 1 << 30  # columns of a group that is a whole row
VALUES = ("integer", "byte", "e4m3", "e2m1", "e2m1 doubled", "table", "iq4")  # what a code stands for
IQ4_ORDER = (*IQ4_VALUES[::2], *IQ4_VALUES[1::2])  # of codes in planes: neighbours differ in the top bit
E5M3_BIAS = 22  # of levels: 2^-22 is below all that E4M3 holds
E5M3_WORD = (127 - E5M3_BIAS) << 3  # what makes a level the upper bits of a float32
SCALES = {
    "plain": "scale = scales",
    "zeros": "scale = scales, offset = -scales * levels; levels: int8",
    "pairs": "scale and offset: the low and the high float16 of scales, int32",
    "levels": "scale = scales * levels; levels: int8",
    "e5m3": "scale = scales * levels; levels: int32 of four bytes, one for each field of a unit. Of a byte "
    "five bits are exponent and three mantissa; 0 is 2^-22, and its codes are zeros",
    "mins": "as pairs; times the low byte of levels, int16, and minus the offset times the high one",
    "nibbles": "as mins; levels: uint8, of nibbles",
}


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """What planes hold: all that a kernel is compiled for.

    bits, high: of the two planes, high is 0 without a second; value: one of `VALUES`; zero: what "integer"
    takes from a code; scales: one of `SCALES`; group: columns of an entry of levels, or of scales if there
    are no levels; block: columns of an entry of scales; tall: rows of an entry of scales.
    """

    bits: int
    high: int = 0
    value: str = "integer"
    zero: int = 0
    scales: str = "plain"
    group: int = ALL
    block: int = ALL
    tall: int = 1

    @property
    def unit(self) -> int:
        """Columns that all planes have whole."""
        return LANES * 16 // (self.high or self.bits)

    @property
    def entry(self) -> int:
        """Columns of an entry of levels as it is stored: bytes of E5M3 are words of a unit."""
        return self.unit if self.scales == "e5m3" else self.group

    @property
    def has_signs(self) -> bool:
        """Whether a lane has the signs of its fields apart."""
        return self.value.startswith("e2m1")

    def padded(self, cols: int) -> int:
        return -(-cols // self.unit) * self.unit


@dataclass(frozen=True, slots=True, eq=False)
class Planes:
    """A weight matrix [out, in] in planes.

    codes: int16 [units, out, 16]; high: the second plane or None; scales: [blocks, ceil(out / tall)]; levels:
    [groups, out] or None; table: float32 [16] of "table", or None; order: int32 [in], the input of each
    column, or None. Columns behind the last are zeros under a scale of zero.
    """

    layout: PlaneLayout
    shape: tuple[int, int]
    codes: Tensor
    high: Tensor | None
    scales: Tensor
    levels: Tensor | None
    table: Tensor | None = None
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors)

    @property
    def tensors(self) -> list[Tensor]:
        every = (self.codes, self.high, self.scales, self.levels, self.table, self.order)
        return [t for t in every if t is not None]

    def rows(self, start: int, stop: int) -> Planes:
        """Rows start..stop, views; `tall` divides both, or stop is the last."""
        tall = self.layout.tall
        assert start % tall == 0
        assert stop % tall == 0 or stop == self.shape[0]
        return replace(
            self,
            shape=(stop - start, self.shape[1]),
            codes=self.codes[:, start:stop],
            high=None if self.high is None else self.high[:, start:stop],
            scales=self.scales[:, start // tall : -(-stop // tall)],
            levels=None if self.levels is None else self.levels[:, start:stop],
        )

    def decode(self, dtype: torch.dtype) -> Tensor:
        """All weights as numbers, [out, in]: the bits of `Weight.dequantize`, a few rows at a time."""
        rows, cols = self.shape
        out = torch.empty(rows, cols, dtype=dtype, device=self.codes.device)
        for start, stop in pieces_of(rows, cols, self.codes.device, self.layout.tall):
            out[start:stop] = self.rows(start, stop)._numbers()
        return out

    def _numbers(self) -> Tensor:
        layout, cols = self.layout, self.layout.padded(self.shape[1])
        codes = read_plane(self.codes, layout.bits, has_signs=layout.has_signs)
        if self.high is not None:
            codes |= read_plane(self.high, layout.high) << layout.bits
        of = torch.arange(cols, device=codes.device)
        scale, offset = self._scales(of)
        numbers = decode_codes(codes, layout, self.table)
        if layout.scales == "zeros" and self.levels is not None:  # as its own formula: one rounding less
            numbers = (numbers - self.levels.T.float()[:, of // layout.group]) * scale
        else:
            numbers = scale * numbers if offset is None else scale * numbers + offset
        numbers = numbers[:, : self.shape[1]]
        if self.order is None:
            return numbers
        back = torch.empty_like(numbers)
        back[:, self.order.long()] = numbers
        return back

    def _scales(self, of: Tensor) -> tuple[Tensor, Tensor | None]:
        """(scales, offsets) of some columns, float32 [out, columns] each."""
        layout = self.layout
        scales = self.scales.T
        if layout.tall > 1:
            scales = scales.repeat_interleave(layout.tall, 0)[: self.shape[0]]
        levels = None if self.levels is None else self.levels.T[:, of // layout.entry]
        scales = scales[:, of // layout.block]
        match layout.scales:
            case "plain" | "zeros":
                return scales.float(), None
            case "levels":
                assert levels is not None
                return scales * levels.float(), None
            case "e5m3":
                assert levels is not None
                level = (levels >> (8 * (of // layout.group % 4))) & 255
                return scales * ((level.int() + E5M3_WORD) << 20).view(torch.float32), None
        low, high = (
            half.float() for half in scales.contiguous().view(torch.float16).unflatten(1, (-1, 2)).unbind(-1)
        )
        if levels is None:
            return low, high
        wide = 8 if layout.scales == "mins" else 4
        first, second = levels.int() & ((1 << wide) - 1), levels.int() >> wide & ((1 << wide) - 1)
        return low * first.float(), -(high * second.float())


def pieces_of(rows: int, cols: int, device: torch.device, tall: int = 1) -> Iterator[tuple[int, int]]:
    """Ranges of rows that are laid out or decoded at a time."""
    step = max(1, 4 * piece_of(device) // max(1, cols) // tall) * tall
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


def decode_codes(codes: Tensor, layout: PlaneLayout, table: Tensor | None) -> Tensor:
    """What codes stand for, before their scale: uint8 [n, columns] -> float32."""
    match layout.value:
        case "integer":
            return codes.float() - layout.zero
        case "byte":
            return codes.view(torch.int8).float()
        case "e4m3":
            return codes.view(torch.float8_e4m3fn).float()
        case "table" | "iq4":
            assert table is not None
            return table[codes.int()]
    magnitudes = constants((0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0), torch.float32, codes.device)
    numbers = magnitudes[(codes & 7).int()] * (2.0 if layout.value == "e2m1 doubled" else 1.0)
    return torch.where(codes > 7, -numbers, numbers)


def fill_plane(plane: Tensor, codes: Tensor, bits: int, *, has_signs: bool = False) -> None:
    """Write codes of `bits` bits, uint8 [n, columns], columns whole units, into int16 [units, n, 16]."""
    fields = 16 // bits
    parts = codes.view(len(codes), -1, fields, LANES).int()
    field = torch.arange(fields, device=codes.device).view(1, 1, -1, 1)
    words = parts << (bits * field)
    if has_signs:
        words = ((parts & 7) << (3 * field)) | ((parts >> 3) << (12 + (field ^ 1)))
    plane.copy_(words.sum(2).to(torch.int16).transpose(0, 1))


def read_plane(plane: Tensor, bits: int, *, has_signs: bool = False) -> Tensor:
    """int16 [units, n, 16] -> codes, uint8 [n, columns]."""
    field = torch.arange(16 // bits, device=plane.device).view(1, 1, -1, 1)
    words = plane.transpose(0, 1).unsqueeze(2).int()
    if has_signs:
        codes = (words >> (3 * field)) & 7 | ((words >> (12 + (field ^ 1))) & 1) << 3
    else:
        codes = (words >> (bits * field)) & ((1 << bits) - 1)
    return codes.to(torch.uint8).flatten(1)
