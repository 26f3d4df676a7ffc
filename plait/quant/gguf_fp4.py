"""GGUF's NVFP4 blocks under a factor for the whole map, which their own bytes have no place for."""

from __future__ import annotations

import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.quant.fp4 import Fp4
from plait.quant.gguf import Gguf
from plait.quant.gguf_parts import nvfp4


def scaled_nvfp4(weight: Gguf, factor: Tensor) -> Fp4:
    """The map times `factor`: one number, or one for each of equal parts of the rows (stacked experts).

    Raises ShapeMismatch if it is no NVFP4, or the rows are no such parts.
    """
    rows, cols = weight.shape
    by = factor.float().reshape(-1)
    if weight.format != "NVFP4" or not len(by) or rows % len(by):
        raise ShapeMismatch(f"{len(by)} factors of a {weight.format} weight of {[rows, cols]}")
    blocks = weight.data.reshape(-1, weight.kind.nbytes)
    codes = torch.empty(rows, cols // 2, dtype=torch.uint8)
    step = max(1, (1 << 20) // cols)
    for start in range(0, rows, step):
        stop = min(start + step, rows)
        some = nvfp4(weight.data[start:stop].reshape(-1, weight.kind.nbytes)).codes.view(stop - start, -1)
        codes[start:stop] = some[:, ::2] | some[:, 1::2] << 4
    scales = blocks[:, :4] & 0x7F
    scales = torch.where(blocks[:, :4] == 0x7F, 0, scales.clamp(max=0x7E))  # what is no number is 0 there
    each = by if len(by) == 1 else by.repeat_interleave(rows // len(by))
    return Fp4(codes, scales.view(rows, -1).view(torch.float8_e4m3fn), each)
