"""How a token's keys, values or latents lie in a paged cache: as numbers of its dtype, or as int8 codes.

An entry of codes is bytes: [codes, one for each of the first `columns` numbers; scales, bfloat16, one for
each `group` of columns; the rest as bfloat16; padding]. A number is its code times its scale, which float32
holds exactly. The scale is the group's largest magnitude / 127, and codes are rounded under the scale as it
is stored, so that bfloat16 there costs nothing, and has a range that float16 has not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

LARGEST = 127  # code; -128 is not used, so that x and -x are rounded alike
SCALE_NBYTES = 2
KEY_GROUP = 32  # columns of a key under one scale: some columns of keys are far larger than the others
LATENT_GROUP = 64  # columns of a latent under one scale
LATENT_ALIGN = 16  # bytes; kernels read that many at a time


@dataclass(frozen=True, slots=True)
class Codes:
    """The form of an int8 entry."""

    columns: int
    group: int
    rest: int = 0
    align: int = 1

    @property
    def rest_at(self) -> int:
        """The byte at which the rest begins."""
        return self.columns + SCALE_NBYTES * -(-self.columns // self.group)

    @property
    def width(self) -> int:
        """Bytes of an entry."""
        return -(-(self.rest_at + 2 * self.rest) // self.align) * self.align

    def encode(self, x: Tensor) -> Tensor:
        """[..., columns + rest] floats -> [..., width] int8."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.width, dtype=torch.int8)
        parts = []
        for part in x[..., : self.columns].float().split(self.group, -1):
            scale = (part.abs().amax(-1, keepdim=True) / LARGEST).bfloat16()
            codes = torch.where(scale > 0, part / scale.float(), 0).round().clamp(-LARGEST, LARGEST)
            parts.append((codes.to(torch.int8), scale))
        rest = x[..., self.columns :].bfloat16()
        bits = [t.contiguous().view(torch.int8) for t in (*(scale for _, scale in parts), rest) if t.numel()]
        padding = x.new_zeros(*x.shape[:-1], self.width - self.rest_at - 2 * self.rest, dtype=torch.int8)
        return torch.cat([*(codes for codes, _ in parts), *bits, padding], -1)

    def decode(self, entry: Tensor) -> Tensor:
        """[..., width] int8 -> [..., columns + rest] float32."""
        end = self.rest_at + 2 * self.rest
        scales, rest = entry[..., self.columns : self.rest_at], entry[..., self.rest_at : end]
        steps = _bfloat16(scales).repeat_interleave(self.group, -1)[..., : self.columns]
        return torch.cat([entry[..., : self.columns].float() * steps, _bfloat16(rest)], -1)


def _bfloat16(bits: Tensor) -> Tensor:
    """[..., 2n] int8 -> [..., n] float32."""
    return bits.contiguous().view(torch.bfloat16).float() if bits.shape[-1] else bits.float()


def key_codes(dim: int) -> Codes:
    """The form of one head's key of `dim` columns."""
    return Codes(dim, KEY_GROUP)


def value_codes(dim: int) -> Codes:
    """The form of one head's value of `dim` columns."""
    return Codes(dim, dim)


def latent_codes(kv_rank: int, rope_dim: int) -> Codes:
    """The form of MLA's latents. What is rotated stays bfloat16: docs/precision.md has its error as codes."""
    return Codes(kv_rank, LATENT_GROUP, rope_dim, LATENT_ALIGN)


def head_widths(dim: int, kv_dtype: str) -> tuple[int, int]:
    """Numbers of `kv_dtype` that a head's key and its value take."""
    return (key_codes(dim).width, value_codes(dim).width) if kv_dtype == "int8" else (dim, dim)


def latent_width(kv_rank: int, rope_dim: int, kv_dtype: str) -> int:
    """Numbers of `kv_dtype` that a token's latent takes."""
    return latent_codes(kv_rank, rope_dim).width if kv_dtype == "int8" else kv_rank + rope_dim
