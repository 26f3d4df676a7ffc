"""How a token's keys, values or latents lie in a paged cache: as numbers of its dtype, or as codes.

An entry of int8 is bytes: [codes, one for each of the first `columns` numbers; scales, bfloat16, one for
each `group` of columns; the rest as bfloat16; padding]. A number is its code times its scale, which float32
holds exactly. The scale is the group's largest magnitude / 127, and codes are rounded under the scale as it
is stored, so that bfloat16 there costs nothing, and has a range that float16 has not.

An entry of int4 is bytes: [sixteen for each group of 32 columns, byte i having the code of column i in its
low half and that of column i + 16 in its high half; a step and an offset for each group, bfloat16; the rest
as bfloat16; padding]. A number is offset + code · step, codes being 0 to 15: columns of keys lie around means
of their own, so that steps from the smallest number to the largest are shorter than steps around 0.

An entry of int7 is int16 words. Keys are as those of int8. Values are bytes: [sixteen for each group of 32
columns, byte i having the lower half of column i's code in its low half and that of column i + 16 in its
high half; the upper three bits of the codes, for each sixteen columns a word of each bit, column i's at i; a
scale, bfloat16, for each `group` of columns]. Codes are -63 to 63. Latents lie so, too. What is rotated of
them comes behind the scales as codes of eight bits, in sixteens, and then its own scale.

Keys of heads, and values of int8 and int7, are mixed before they become codes. A few of their columns are far
larger than the others, and under a common scale such a column has nearly all the error. A Walsh-Hadamard
transform H spreads them evenly (QuaRot: Ashkboos et al. 2024). H is symmetric and H · H = n. So q · k is
(H q) · (H k) / n, and a sum of values is H / n times that of mixed ones. A kernel mixes its queries and
turns its outputs back; never keys or values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LARGEST = 127  # code; -128 is not used, so that x and -x are rounded alike
SCALE_NBYTES = 2
KEY_GROUP = 32  # columns of a mixed key under one scale
LATENT_GROUP = 64  # columns of a latent under one scale
LATENT_ALIGN = 16  # bytes; kernels read that many at a time
NIBBLE_GROUP, NIBBLE_MOST = 32, 15  # columns under one step and offset, and the largest code
SEVEN_GROUP, SEVEN_NBYTES, SEVEN_LARGEST = 32, 28, 63  # columns that are packed together, bytes, largest code
UPPER_BITS = (4, 5, 6)  # of a code of seven bits, which lie apart from the others


@dataclass(frozen=True, slots=True)
class _Scaled:
    """What forms with a scale for each group of columns are made of."""

    columns: int
    group: int
    rest: int = 0
    align: int = 1
    mixed: int = 1  # neighbouring columns that are mixed, a power of two


@dataclass(frozen=True, slots=True)
class Codes(_Scaled):
    """The form of an int8 entry, and of keys of int7."""

    dtype: torch.dtype = torch.int8  # of caches

    @property
    def rest_at(self) -> int:
        """The byte at which the rest begins."""
        return self.columns + SCALE_NBYTES * -(-self.columns // self.group)

    @property
    def width(self) -> int:
        """Numbers of `dtype` of an entry."""
        return _round_up(self.rest_at + 2 * self.rest, self.align, self.dtype)

    def encode(self, x: Tensor) -> Tensor:
        """[..., columns + rest] floats -> [..., width] of `dtype`."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.width, dtype=self.dtype)
        parts = _round_groups(mix_columns(x[..., : self.columns].float(), self.mixed), self.group, LARGEST)
        rest = x[..., self.columns :].bfloat16()
        return _join_bytes([*(c for c, _ in parts), *(scale for _, scale in parts), rest], self)

    def decode(self, entry: Tensor) -> Tensor:
        """[..., width] of `dtype` -> [..., columns + rest] float32."""
        entry = entry.contiguous().view(torch.int8) if self.dtype != torch.int8 else entry
        end = self.rest_at + 2 * self.rest
        scales, rest = entry[..., self.columns : self.rest_at], entry[..., self.rest_at : end]
        steps = _bfloat16(scales).repeat_interleave(self.group, -1)[..., : self.columns]
        known = mix_columns(entry[..., : self.columns].float() * steps, self.mixed) / self.mixed
        return torch.cat([known, _bfloat16(rest)], -1)


@dataclass(frozen=True, slots=True)
class Nibbles:
    """The form of an int4 entry."""

    columns: int
    rest: int = 0
    align: int = 1
    mixed: int = 1  # neighbouring columns that are mixed, a power of two
    dtype: torch.dtype = torch.uint8  # of caches

    @property
    def groups(self) -> int:
        return -(-self.columns // NIBBLE_GROUP)

    @property
    def rest_at(self) -> int:
        """The byte at which the rest begins."""
        return self.groups * (NIBBLE_GROUP // 2 + 2 * SCALE_NBYTES)

    @property
    def width(self) -> int:
        """Bytes of an entry."""
        return _round_up(self.rest_at + 2 * self.rest, self.align, self.dtype)

    def encode(self, x: Tensor) -> Tensor:
        """[..., columns + rest] floats -> [..., width] uint8."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.width, dtype=torch.uint8)
        more = self.groups * NIBBLE_GROUP - self.columns
        known = mix_columns(x[..., : self.columns].float(), self.mixed)
        groups = torch.cat([known, known[..., -1:].expand(*known.shape[:-1], more)], -1)
        groups = groups.unflatten(-1, (self.groups, NIBBLE_GROUP))
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step, offset = ((high - low) / NIBBLE_MOST).bfloat16(), low.bfloat16()
        codes = torch.where(step > 0, (groups - offset.float()) / step.float(), 0).round()
        codes = codes.clamp(0, NIBBLE_MOST).nan_to_num().to(torch.uint8)
        packed = (codes[..., :16] | codes[..., 16:] << 4).flatten(-2)
        scales = torch.cat([step, offset], -1).flatten(-2)
        return _join_bytes([packed, scales, x[..., self.columns :].bfloat16()], self)

    def decode(self, entry: Tensor) -> Tensor:
        """[..., width] uint8 -> [..., columns + rest] float32."""
        codes_end, end = self.groups * NIBBLE_GROUP // 2, self.rest_at + 2 * self.rest
        packed = entry[..., :codes_end].unflatten(-1, (self.groups, NIBBLE_GROUP // 2))
        codes = torch.cat([packed & NIBBLE_MOST, packed >> 4], -1).float()
        scales = _bfloat16(entry[..., codes_end : self.rest_at]).unflatten(-1, (self.groups, 2))
        numbers = torch.addcmul(scales[..., 1:], codes, scales[..., :1]).flatten(-2)[..., : self.columns]
        known = mix_columns(numbers, self.mixed) / self.mixed
        return torch.cat([known, _bfloat16(entry[..., self.rest_at : end])], -1)


@dataclass(frozen=True, slots=True)
class Sevens(_Scaled):
    """The form of values and latents of int7."""

    dtype: torch.dtype = torch.int16  # of caches

    @property
    def scales_at(self) -> int:
        """The byte at which scales begin."""
        return -(-self.columns // SEVEN_GROUP) * SEVEN_NBYTES

    @property
    def rest_at(self) -> int:
        """The byte at which the rest begins."""
        return self.scales_at + SCALE_NBYTES * -(-self.columns // self.group)

    @property
    def rest_scale_at(self) -> int:
        """The byte at which the scale of the rest is, if there is a rest."""
        return self.rest_at + -(-self.rest // 16) * 16

    @property
    def width(self) -> int:
        """Words of an entry."""
        end = self.rest_scale_at + SCALE_NBYTES if self.rest else self.rest_at
        return _round_up(end, self.align, self.dtype)

    def encode(self, x: Tensor) -> Tensor:
        """[..., columns + rest] floats -> [..., width] int16."""
        if not x.numel():
            return x.new_zeros(*x.shape[:-1], self.width, dtype=self.dtype)
        known = mix_columns(x[..., : self.columns].float(), self.mixed)
        parts = _round_groups(known, self.group, SEVEN_LARGEST)
        found = [_pack_sevens(torch.cat([codes for codes, _ in parts], -1)), *(scale for _, scale in parts)]
        if self.rest:
            ((codes, scale),) = _round_groups(x[..., self.columns :].float(), self.rest, LARGEST)
            found += [F.pad(codes, (0, -self.rest % 16)), scale]
        return _join_bytes(found, self)

    def decode(self, entry: Tensor) -> Tensor:
        """[..., width] int16 -> [..., columns + rest] float32."""
        entry = entry.contiguous().view(torch.int8)
        codes = _unpack_sevens(entry[..., : self.scales_at])[..., : self.columns]
        scales = _bfloat16(entry[..., self.scales_at : self.rest_at])
        steps = scales.repeat_interleave(self.group, -1)[..., : self.columns]
        known = mix_columns(codes.float() * steps, self.mixed) / self.mixed
        scale = _bfloat16(
            entry[..., self.rest_scale_at : self.rest_scale_at + SCALE_NBYTES * bool(self.rest)]
        )
        return torch.cat([known, entry[..., self.rest_at : self.rest_at + self.rest].float() * scale], -1)


def _round_up(nbytes: int, align: int, dtype: torch.dtype) -> int:
    """Numbers of `dtype` in so many bytes and those that fill them up to a multiple of `align`."""
    align = max(align, dtype.itemsize)
    return -(-nbytes // align) * align // dtype.itemsize


def _round_groups(x: Tensor, group: int, largest: int) -> list[tuple[Tensor, Tensor]]:
    """float32 [..., n] -> of each group: int8 codes up to `largest`, and a bfloat16 scale [..., 1]."""
    found = []
    for part in x.split(group, -1):
        scale = (part.abs().amax(-1, keepdim=True) / largest).bfloat16()
        codes = torch.where(scale > 0, part / scale.float(), 0).round().clamp(-largest, largest)
        found.append((codes.to(torch.int8), scale))
    return found


def _join_bytes(parts: list[Tensor], form: Codes | Nibbles | Sevens) -> Tensor:
    """Tensors [..., n] next to each other, as bytes, then zeros -> [..., form.width] of form.dtype."""
    known = [t.contiguous().view(torch.int8) for t in parts if t.numel()]
    nbytes = form.width * form.dtype.itemsize
    padding = known[0].new_zeros(*known[0].shape[:-1], nbytes - sum(t.shape[-1] for t in known))
    return torch.cat([*known, padding], -1).view(form.dtype)


def _pack_sevens(codes: Tensor) -> Tensor:
    """int8 [..., n], -64 to 63 -> uint8 [..., SEVEN_NBYTES for each SEVEN_GROUP of n]."""
    codes = F.pad(codes, (0, -codes.shape[-1] % SEVEN_GROUP)).int() & 127
    halves = codes.unflatten(-1, (-1, 2, SEVEN_GROUP // 2))
    low = halves[..., 0, :] & 15 | (halves[..., 1, :] & 15) << 4
    places = 1 << torch.arange(SEVEN_GROUP // 2, device=codes.device)
    words = torch.stack([((halves >> bit & 1) * places).sum(-1) for bit in UPPER_BITS], -1).flatten(-3)
    upper = torch.stack([words & 255, words >> 8], -1).flatten(-2)
    return torch.cat([low.flatten(-2), upper], -1).to(torch.uint8)


def _unpack_sevens(packed: Tensor) -> Tensor:
    """Bytes [..., SEVEN_NBYTES m] -> int32 [..., SEVEN_GROUP m] codes."""
    count = packed.shape[-1] // SEVEN_NBYTES
    low, upper = (packed.int() & 255).split([count * 16, count * 12], -1)
    low = low.unflatten(-1, (count, 16))
    words = upper.unflatten(-1, (count, 2, len(UPPER_BITS), 2))
    words = words[..., 0] | words[..., 1] << 8
    codes = torch.stack([low & 15, low >> 4], -2)
    places = torch.arange(16, device=packed.device)
    for i, bit in enumerate(UPPER_BITS):
        codes = codes | (words[..., i, None] >> places & 1) << bit
    return torch.where(codes > SEVEN_LARGEST, codes - 128, codes).flatten(-3)


def count_mixed(dim: int) -> int:
    """How many neighbouring columns of a head's key are mixed: the largest power of two dividing `dim`."""
    return dim & -dim


def mix_columns(x: Tensor, count: int) -> Tensor:
    """[..., n] floats -> the Walsh-Hadamard transform of every `count` neighbours, without a factor.

    `count`: a power of two that divides n. Additions are in the order in which kernels make them, columns
    farthest apart first, so that float32 has the same bits here and there.
    """
    shape, half = x.shape, count // 2
    while half:
        pairs = x.unflatten(-1, (shape[-1] // (2 * half), 2, half))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        x, half = torch.stack([first + second, first - second], -2).reshape(shape), half // 2
    return x


def _bfloat16(bits: Tensor) -> Tensor:
    """[..., 2n] bytes -> [..., n] float32."""
    return bits.contiguous().view(torch.bfloat16).float() if bits.shape[-1] else bits.float()


Form = Codes | Nibbles | Sevens | None
CODED = ("int8", "int7", "int4")
CODED_DTYPES = {"int8": torch.int8, "int7": torch.int16, "int4": torch.uint8}  # of their caches


def key_codes(dim: int, dtype: torch.dtype = torch.int8) -> Codes:
    """The form of one head's key of `dim` columns, of int8 and, in int16 words, of int7."""
    return Codes(dim, KEY_GROUP, mixed=count_mixed(dim), dtype=dtype)


def value_codes(dim: int) -> Codes:
    """The int8 form of one head's value of `dim` columns."""
    return Codes(dim, dim, mixed=count_mixed(dim))


def latent_codes(kv_rank: int, rope_dim: int) -> Codes:
    """The int8 form of MLA's latents. What is rotated stays bfloat16: docs/precision.md has the reason."""
    return Codes(kv_rank, LATENT_GROUP, rope_dim, LATENT_ALIGN)


def head_forms(dim: int, kept: torch.dtype) -> tuple[Form, Form]:
    """The forms of one head's key and value in a cache of that dtype; None: as numbers."""
    if kept == torch.uint8:
        return Nibbles(dim, mixed=count_mixed(dim)), Nibbles(dim)
    if kept == torch.int16:
        return key_codes(dim, kept), Sevens(dim, dim, mixed=count_mixed(dim))
    return (key_codes(dim), value_codes(dim)) if kept == torch.int8 else (None, None)


def latent_form(kv_rank: int, rope_dim: int, kept: torch.dtype) -> Form:
    """The form of MLA's latents in a cache of that dtype; None: as numbers."""
    if kept == torch.uint8:
        return Nibbles(kv_rank, rope_dim, LATENT_ALIGN)
    if kept == torch.int16:
        return Sevens(kv_rank, LATENT_GROUP, rope_dim, LATENT_ALIGN)
    return latent_codes(kv_rank, rope_dim) if kept == torch.int8 else None


def stored_dtype(kv_dtype: str) -> torch.dtype:
    """The dtype of tensors that keep `kv_dtype`, one of `memory.DTYPE_BYTES`."""
    found: torch.dtype = CODED_DTYPES.get(kv_dtype) or getattr(torch, kv_dtype)
    return found


def head_widths(dim: int, kv_dtype: str) -> tuple[int, int]:
    """Numbers of `kv_dtype` that a head's key and its value take."""
    if kv_dtype not in CODED:
        return dim, dim
    key, value = head_forms(dim, stored_dtype(kv_dtype))
    return key.width if key else dim, value.width if value else dim


def latent_width(kv_rank: int, rope_dim: int, kv_dtype: str) -> int:
    """Numbers of `kv_dtype` that a token's latent takes."""
    form = latent_form(kv_rank, rope_dim, stored_dtype(kv_dtype)) if kv_dtype in CODED else None
    return form.width if form else kv_rank + rope_dim
