"""IQ1, IQ2 and IQ3 blocks: eight or four numbers at a time are a row of a published grid, with signs.

The grids come from the `gguf` package, which is imported when the first such block is met. What a row says is
kept as places in a small table of whole numbers (`gguf_parts`): all magnitudes with both signs.

Every function takes uint8 [n, bytes of a block of 256]. Layouts: the ggml tensor library.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from plait.errors import UnsupportedFormat
from plait.quant.bits import bits, constants, fields, half, words
from plait.quant.gguf_parts import BlockParts

IQ1_VALUES = (-9, -7, -1, 1, 7, 9)  # eight times (-1, 0 or 1, less or plus an eighth)
IQ2_VALUES = (-43, -25, -8, 8, 25, 43)
IQ3_XXS_VALUES = (-62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)
IQ3_S_VALUES = (-15, -13, -11, -9, -7, -5, -3, -1, 1, 3, 5, 7, 9, 11, 13, 15)


@cache
def grid(name: str) -> Tensor:
    """uint8 [rows, 8 or 4]: which of the grid's values, the least is 0. Raises UnsupportedFormat."""
    try:
        from gguf import quants
    except ImportError as e:
        raise UnsupportedFormat(f"{name} blocks need the tables of the gguf package: pip install gguf") from e
    kind = getattr(quants, name)
    kind.init_grid()
    numbers = kind.grid.reshape(kind.grid_shape)
    return torch.from_numpy(np.searchsorted(np.array(sorted(kind.grid_map)), numbers).astype(np.uint8))


@cache
def _grid_on(name: str, device: torch.device) -> Tensor:
    return grid(name).to(device)


@cache
def _sign_bytes(device: torch.device) -> Tensor:
    """uint8 [128]: seven sign bits -> eight, of which an even number is set."""
    numbers = torch.arange(128, device=device)
    parity = (numbers.unsqueeze(1) >> torch.arange(7, device=device)).sum(1) & 1
    return (numbers | parity << 7).to(torch.uint8)


def _rows(name: str, index: Tensor) -> Tensor:
    """Rows of a grid one behind the other. index: [n, rows] -> uint8 [n, rows * 8 or 4]."""
    return _grid_on(name, index.device)[index].flatten(1)


def _apply_signs(magnitudes: Tensor, signs: Tensor, count: int) -> Tensor:
    """Places in a table of `count` magnitudes of both signs; a bit of `signs` for each, set is minus."""
    return torch.where(bits(signs) == 1, count - 1 - magnitudes, count + magnitudes)


def _sevens(packed: Tensor) -> Tensor:
    """[n, words] of four seven-bit signs each -> sign bytes [n, words * 4]."""
    index = (packed.unsqueeze(-1) >> constants((0, 7, 14, 21), torch.int64, packed.device)) & 127
    return _sign_bytes(packed.device)[index].flatten(1)


def _odd(levels: Tensor) -> Tensor:
    return (2 * levels + 1).float()


def _low_high(packed: Tensor) -> Tensor:
    """Nibbles of neighbours: [n, bytes] -> [n, 2 * bytes]."""
    return fields(packed.unsqueeze(-1), 4).flatten(1)


def iq2_xxs(blocks: Tensor) -> BlockParts:
    """8 groups of 32: four rows of the grid, four times seven signs, a level in the top four bits."""
    packed = words(blocks, 2, 66, torch.int32).view(-1, 8, 2)
    index = blocks[:, 2:].reshape(-1, 8, 8)[:, :, :4].reshape(len(blocks), -1).long()
    codes = _apply_signs(_rows("IQ2_XXS", index), _sevens(packed[:, :, 1]), 3)
    return BlockParts(codes, _odd(packed[:, :, 1] >> 28), half(blocks, 0) / 8)


def iq2_xs(blocks: Tensor) -> BlockParts:
    """16 groups of 16; nine bits of a row and seven signs in each two bytes; a nibble for each level."""
    packed = words(blocks, 2, 66, torch.int16)
    signs = _sign_bytes(blocks.device)[packed >> 9]
    return BlockParts(
        _apply_signs(_rows("IQ2_XS", packed & 511), signs, 3),
        _odd(_low_high(blocks[:, 66:])),
        half(blocks, 0) / 8,
    )


def iq2_s(blocks: Tensor) -> BlockParts:
    """16 groups of 16: ten bits of a row, two of them apart; a sign for each number; nibbles as levels."""
    high = fields(blocks[:, 66:74].unsqueeze(-1), 2).flatten(1).long()
    index = blocks[:, 2:34].long() | high << 8
    codes = _apply_signs(_rows("IQ2_S", index), blocks[:, 34:66], 3)
    return BlockParts(codes, _odd(_low_high(blocks[:, 74:])), half(blocks, 0) / 8)


def iq3_xxs(blocks: Tensor) -> BlockParts:
    """8 groups of 32: eight rows of four; signs and level as in IQ2_XXS."""
    packed = words(blocks, 66, 98, torch.int32)
    codes = _apply_signs(_rows("IQ3_XXS", blocks[:, 2:66].long()), _sevens(packed), 8)
    return BlockParts(codes, _odd(packed >> 28), half(blocks, 0) / 4)


def iq3_s(blocks: Tensor) -> BlockParts:
    """8 groups of 32: nine bits of a row of four, one of them apart; a sign for each number."""
    index = blocks[:, 2:66].long() | bits(blocks[:, 66:74]).long() << 8
    codes = _apply_signs(_rows("IQ3_S", index), blocks[:, 74:106], 8)
    return BlockParts(codes, _odd(_low_high(blocks[:, 106:])), half(blocks, 0))


def iq1_s(blocks: Tensor) -> BlockParts:
    """8 groups of 32: eleven bits of a row, three of them apart; an eighth to add or take; a level."""
    packed = words(blocks, 34, 50, torch.int16)  # [n, 8]: four times three bits, the level, the sign
    high = (packed.unsqueeze(-1) >> constants((0, 3, 6, 9), torch.int64, blocks.device)) & 7
    rows = _rows("IQ1_S", blocks[:, 2:34].long() | high.flatten(1) << 8)
    plus = (packed < 0x8000).to(torch.uint8).repeat_interleave(32, 1)
    return BlockParts(2 * rows + plus, _odd(packed >> 12 & 7), half(blocks, 0) / 8)


def iq1_m(blocks: Tensor) -> BlockParts:
    """16 groups of 16 as in IQ1_S, an eighth for every eight; the float16 is in the tops of the levels."""
    tops = words(blocks, 48, 56, torch.int16)  # [n, 4]: four times three bits, four bits of the float16
    bits16 = sum(tops[:, i] >> 12 << 4 * i for i in range(4))
    unit = torch.as_tensor(bits16).to(torch.int16).view(torch.float16).float().unsqueeze(1)
    levels = (tops.unsqueeze(-1) >> constants((0, 3, 6, 9), torch.int64, blocks.device)) & 7
    high = _low_high(blocks[:, 32:48]).long()  # [n, 32]: three bits of a row, one of the sign
    rows = _rows("IQ1_S", blocks[:, :32].long() | (high & 7) << 8)
    plus = (high < 8).to(torch.uint8).repeat_interleave(8, 1)
    return BlockParts(2 * rows + plus, _odd(levels.flatten(1)), unit / 8)
