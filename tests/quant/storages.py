"""Random weights of the storages that quantized safetensors files hold."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from plait.quant.bits import pack
from plait.quant.codebook import Codebook, Nested
from plait.quant.fp4 import Fp4
from plait.quant.fp8 import Fp8
from plait.quant.grouped import Grouped
from plait.quant.weight import Weight


def grouped(
    bits: int, group: int, *, zeros: bool = False, order: bool = False, rows: int = 7, cols: int = 64
) -> Grouped:
    codes = torch.randint(0, 1 << bits, (rows, cols), dtype=torch.uint8)
    groups = -(-cols // group)
    shifts = torch.randint(0, 1 << bits, (rows, groups), dtype=torch.uint8) if zeros else None
    places = torch.randperm(cols).int() if order else None
    scales = (torch.rand(rows, groups) / 8 + 0.01).half()
    return Grouped(pack(codes, bits), scales, shifts, bits, group, places)


def fp8(block: tuple[int, int], rows: int = 7, cols: int = 64) -> Fp8:
    codes = e4m3(rows, cols)
    scale = torch.rand(-(-rows // block[0]), -(-cols // block[1])) / 64 + 1e-3
    return Fp8(codes, scale, block)


def e4m3(rows: int, cols: int) -> Tensor:
    """Random bytes, none of them NaN."""
    raw = torch.randint(0, 256, (rows, cols), dtype=torch.uint8)
    raw[(raw & 127) == 127] = 0x7E
    return raw.view(torch.float8_e4m3fn)


def mxfp4(rows: int = 7, cols: int = 64) -> Fp4:
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    return Fp4(codes, torch.randint(118, 126, (rows, cols // 32), dtype=torch.uint8))


def nvfp4(rows: int = 7, cols: int = 64) -> Fp4:
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    return Fp4(codes, e4m3(rows, cols // 16), torch.rand(1) / 100)


def codebook(*, nested: bool = False, rows: int = 7, cols: int = 64, block: int = 16) -> Codebook:
    codes = torch.randint(0, 256, (rows, cols // 2), dtype=torch.uint8)
    table, blocks = torch.linspace(-1, 1, 16), cols // block
    if not nested:
        return Codebook(codes, table, torch.rand(rows, blocks) / 10, block, "nf4")
    inner = Nested(torch.linspace(-1, 1, 256), torch.rand(rows, blocks // 2) / 10, torch.rand(rows), 2)
    absmax = torch.randint(0, 256, (rows, blocks), dtype=torch.uint8)
    return Codebook(codes, table, absmax, block, "nf4", inner)


STORAGES: dict[str, Callable[[], Weight]] = {
    **{f"int{bits}": lambda bits=bits: grouped(bits, 16) for bits in (2, 3, 4, 5, 6, 7)},
    "int4 with zeros": lambda: grouped(4, 16, zeros=True),
    "int4 with order": lambda: grouped(4, 16, zeros=True, order=True),
    "int3 with a short last group": lambda: grouped(3, 24, zeros=True),
    "int8 by row": lambda: grouped(8, 64),
    "fp8 for all": lambda: fp8((7, 64)),
    "fp8 by row": lambda: fp8((1, 64)),
    "fp8 in blocks": lambda: fp8((3, 24)),
    "mxfp4": mxfp4,
    "nvfp4": nvfp4,
    "nf4": codebook,
    "nf4, nested": lambda: codebook(nested=True),
}
CUTS = {"int3 with a short last group": 24, "fp8 in blocks": 24, "fp8 for all": 5, "fp8 by row": 5} | {
    "mxfp4": 32,
    "int8 by row": 5,
    "int4 with order": None,
}
"""Where columns may be cut, if not at 16; None: nowhere."""


def made(name: str, seed: int = 0) -> Weight:
    torch.manual_seed(seed)
    return STORAGES[name]()
