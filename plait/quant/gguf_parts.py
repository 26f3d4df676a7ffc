"""Blocks with numbers from a small table: a code for each, under whole scales and one number above.

w = unit · level of its group · table[code]. Ternary, one- and two-bit blocks and those of four-bit floats are
here; `gguf_iq` has those with codes from grids. Kernels keep the same three parts, so that nothing is
rounded on the way. The products are exact in float32: their order does not matter.

Every function takes uint8 [n, bytes of a block]. Layouts: the ggml tensor library.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from plait.quant.bits import bits, constants, fields, half, nibbles

E2M1_TWICE = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)  # four-bit floats, doubled
TERNARY = (-1, 0, 1, 2)


@dataclass(frozen=True, slots=True)
class BlockParts:
    """n blocks, taken apart. codes: uint8 [n, elements], places in the table; levels: float32 [n, groups];
    unit: float32 [n, 1]."""

    codes: Tensor
    levels: Tensor
    unit: Tensor

    def numbers(self, table: tuple[int, ...]) -> Tensor:
        """float32 [n, elements]."""
        values = constants(table, torch.float32, self.codes.device)[self.codes.int()]
        scale = (self.unit * self.levels).unsqueeze(-1)
        return (scale * values.view(len(values), self.levels.shape[1], -1)).flatten(1)


def _one_level(codes: Tensor, unit: Tensor) -> BlockParts:
    return BlockParts(codes, torch.ones_like(unit), unit)


def _trits(packed: Tensor, count: int) -> Tensor:
    """[n, runs, bytes] -> [n, runs * count, bytes]: base-3 digits, the first in the top of a byte."""
    powers = constants((1, 3, 9, 27, 81)[:count], torch.uint8, packed.device).view(1, 1, -1, 1)
    shifted = (packed.unsqueeze(2) * powers).int()  # modulo 256: digits before this one are gone
    return ((shifted * 3) >> 8).to(torch.uint8).flatten(1, 2)


def tq1_0(blocks: Tensor) -> BlockParts:
    """256 ternary numbers: five to a byte in runs of 32 and 16 bytes, then four to a byte."""
    runs = ((blocks[:, None, :32], 5), (blocks[:, None, 32:48], 5), (blocks[:, None, 48:52], 4))
    return _one_level(torch.cat([_trits(run, n).flatten(1) for run, n in runs], 1), half(blocks, 52))


def tq2_0(blocks: Tensor) -> BlockParts:
    """256 numbers -1 … 2: four two-bit fields to a byte in runs of 32."""
    return _one_level(fields(blocks[:, :64].reshape(-1, 2, 32), 2).flatten(1), half(blocks, 64))


def q1_0(blocks: Tensor) -> BlockParts:
    """128 bits: d or -d."""
    return _one_level(bits(blocks[:, 2:]) * 2, half(blocks, 0))


def q2_0(blocks: Tensor) -> BlockParts:
    """64 numbers -1 … 2, neighbours in one byte, the lowest bits first."""
    return _one_level(fields(blocks[:, 2:].unsqueeze(-1), 2).flatten(1), half(blocks, 0))


def half_power(exponents: Tensor) -> Tensor:
    """E8M0 bytes -> 2^(e - 128), float32: half of what they say, for tables of doubled numbers."""
    e = exponents.int()
    return torch.where(e < 2, 0x00200000 << e.clamp(max=1), (e - 1) << 23).view(torch.float32)


def mxfp4(blocks: Tensor) -> BlockParts:
    """32 four-bit floats under a power of two."""
    return _one_level(nibbles(blocks[:, None, 1:]).flatten(1), half_power(blocks[:, :1]))


def _half_ue4m3(scales: Tensor) -> Tensor:
    """Half of unsigned E4M3 bytes; what would be no number is 0, and the top bit is not looked at."""
    exponent, mantissa = (scales >> 3) & 15, (scales & 7).float()
    normal = (1 + mantissa / 8) * torch.exp2(exponent.float() - 8)
    value = torch.where(exponent == 0, mantissa * 2.0**-10, normal)
    return torch.where((scales == 0) | (scales == 0x7F), 0.0, value)


def nvfp4(blocks: Tensor) -> BlockParts:
    """Four groups of 16 four-bit floats, each under an eight-bit float."""
    codes = nibbles(blocks[:, 4:].reshape(-1, 4, 8)).flatten(1)
    return BlockParts(codes, _half_ue4m3(blocks[:, :4]), torch.ones(len(blocks), 1, device=blocks.device))
