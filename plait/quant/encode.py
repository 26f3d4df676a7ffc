"""Quantizes to GGUF's block formats, while a model is loaded.

For each block a grid is searched. The numbers are rounded to codes for a few widths of the grid around the
obvious one. For these codes the scale (and offset) of least squared error is solved for. Without an offset,
errors are weighed by the size of the number. The best pair is rounded as the format stores it, and the codes
are taken once more for exactly those values. Everything works on pieces of bounded size, with the elements of
a group along the first dimension: sums over groups are then sums of whole rows.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor

from plait.errors import BadFile, ShapeMismatch, UnsupportedFormat
from plait.quant.gguf import BlockType, Gguf, block_type

log = logging.getLogger("plait")

_PIECE = 1 << 15  # elements at a time on a CPU: torch leaves so few to one thread, and they stay in its cache
_DEVICE_PIECE = 1 << 22  # the same elsewhere, where small pieces are slow
_TINY = 1e-30  # what is smaller is no scale: its inverse would not be a number
_HALF_NORMAL = 2.0**-14  # smaller ones have fewer bits
ADVICE = ": load the model without quantize"
_HALF_MAX = 65504.0  # the largest scale or offset that a block can have
_NARROW = (0.0, -0.8, -0.6, -0.4, -0.2, 0.2, 0.4, 0.6)  # by how many codes a symmetric grid is made wider
_WIDE = (0.0, -1.2, -0.9, -0.6, -0.3, 0.3, 0.6, 0.9)  # the same for a grid with an offset


@dataclass(frozen=True, slots=True)
class Encoder:
    """How numbers become blocks of `kind`. `narrow`: the format of columns that are no whole blocks."""

    kind: BlockType
    pack: Callable[[Tensor], Tensor]  # float32 [n, elements] -> uint8 [n, bytes]
    narrow: str | None = None

    def __call__(self, weight: Tensor, name: str = "a weight", threads: int = 1) -> Gguf:
        """weight: [rows, cols] in any float dtype -> the same in blocks, on the same device.

        The bytes do not depend on `threads`, of which only a CPU has use; `name` is for errors.
        Raises ShapeMismatch if cols are no whole blocks, BadFile if a number is not finite or too large.
        """
        return _encode_rows(self, weight, name, threads)


def encoder(name: str) -> Encoder:
    """The encoder of a format, like 'q4_k'. Raises UnsupportedFormat, which lists all."""
    found = ENCODERS.get(name.lower())
    if found is None:
        raise UnsupportedFormat(f"quantize: {name!r} is not one of {', '.join(ENCODERS)}")
    return found


def find_encoder(name: str, cols: int) -> Encoder | None:
    """The encoder of a format for rows of `cols` numbers: it, else its narrow one, else None."""
    first = encoder(name)
    for option in (first, encoder(first.narrow) if first.narrow else None):
        if option and cols and cols % option.kind.elements == 0:
            return option
    return None


def list_encoded(name: str | None) -> list[str]:
    """The formats that weights are encoded to where one is requested: it, and its narrow one."""
    first = encoder(name) if name else None
    found = [] if first is None else [first, *([encoder(first.narrow)] if first.narrow else [])]
    return [how.kind.name for how in found]


def log_encoded(name: str | None, counts: Counter[str]) -> None:
    """Log how many linear layers were kept in what, where a block format was requested: None, if none was."""
    if name is None:
        return
    found = ", ".join(f"{count} in {kind}" for kind, count in counts.most_common())
    nothing = all(kind.endswith("as it was") for kind in counts)
    level, more = (logging.WARNING, "; nothing was encoded") if nothing else (logging.INFO, "")
    log.log(level, "quantize %s: of the linear layers, %s%s", name, found, more)


def _encode_rows(how: Encoder, weight: Tensor, name: str, threads: int) -> Gguf:
    kind = how.kind
    if weight.dim() != 2 or weight.shape[1] % kind.elements:
        raise ShapeMismatch(
            f"{name}: {kind.name} wants [rows, a multiple of {kind.elements}], got {list(weight.shape)}"
        )
    rows, cols = weight.shape
    blocks = weight.reshape(-1, kind.elements)
    data = torch.empty(len(blocks), kind.nbytes, dtype=torch.uint8, device=weight.device)

    def work(start: int) -> None:
        piece = blocks[start : start + step].float()
        data[start : start + step] = how.pack(_check_range(piece, kind, name))

    is_cpu = weight.device.type == "cpu"
    step = (_PIECE if is_cpu else _DEVICE_PIECE) // kind.elements
    starts = range(0, len(blocks), step)
    if is_cpu and min(threads, len(starts)) > 1:
        with ThreadPoolExecutor(threads) as workers:
            deque(workers.map(work, starts), maxlen=0)
    else:
        for start in starts:
            work(start)
    return Gguf(data.view(rows, cols // kind.elements * kind.nbytes), kind)


def _check_range(piece: Tensor, kind: BlockType, name: str) -> Tensor:
    largest = piece.abs().amax()
    if not bool(largest < _HALF_MAX):  # also where it is not a number
        raise BadFile(
            f"{name}: its largest number is {float(largest)}; {kind.name} takes only finite numbers below "
            f"{_HALF_MAX:g}{ADVICE}"
        )
    return piece


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 where x is as good as 0."""
    return torch.where(x.abs() > _TINY, 1 / x, 0.0)


def _groups(blocks: Tensor, size: int) -> Tensor:
    """[n, elements] -> [size, n * elements / size], contiguous."""
    return blocks.view(-1, size).t().contiguous()


def _codes(x: Tensor, inverse: Tensor, low: int, high: int) -> Tensor:
    """round(x * inverse), within low..high."""
    return (x * inverse).round_().clamp_(low, high)


def _largest(x: Tensor) -> Tensor:
    """The number of the largest size in every column, with its sign."""
    least, most = torch.aminmax(x, dim=0)
    return torch.where(most > -least, most, least)


def _symmetric(x: Tensor, low: int) -> Tensor:
    """The scale d of x ~ d * q, q in low..-low-1, for every column of x: [size, n] -> [n]. It has a sign.

    Errors count by the size of the number: with plain squares the many small numbers make the scale smaller,
    and the few large ones, which no code reaches then, are what a model notices.
    """
    signed = _largest(x)
    per_unit = _inverse(signed)
    scale, best = torch.zeros_like(signed), torch.zeros_like(signed)
    weight = x.abs()
    weighted = weight * x
    for wider in _NARROW:
        q = _codes(x, per_unit * (low - wider), low, -low - 1)
        xq, qq = (weighted * q).sum(0), q.square_().mul_(weight).sum(0)
        found = xq * _inverse(qq)
        gain = xq * found  # by how much the weighed squared error is less than that of zeros
        better = gain > best
        scale, best = torch.where(better, found, scale), torch.where(better, gain, best)
    return scale


def _affine(x: Tensor, top: int, *, downward: bool) -> tuple[Tensor, Tensor]:
    """Scale d and offset m of x ~ d * q + m, q in 0..top, for every column of x: [size, n] -> [n], [n].

    downward: only an offset of 0 or below.
    """
    size = x.shape[0]
    least, most = torch.aminmax(x, dim=0)
    least = least.clamp_(max=0) if downward else least
    per_unit, sums = _inverse(most - least), x.sum(0)
    from_least = x - least
    scale, offset = torch.zeros_like(least), sums / size
    offset = offset.clamp_(max=0) if downward else offset
    best = offset * sums
    for wider in _WIDE:
        q = _codes(from_least, per_unit * (top + wider), 0, top)
        total, xq = q.sum(0), (x * q).sum(0)
        qq = q.square_().sum(0)
        spread = size * qq - total * total
        d = torch.where(spread > 0, (size * xq - sums * total) / spread.clamp(min=1), 0.0)
        m = (sums - d * total) / size
        if downward:
            through_zero = m > 0
            d, m = torch.where(through_zero, xq / qq.clamp_(min=1), d), m.clamp_(max=0)
        gain = d * xq + m * sums
        better = gain > best
        best = torch.where(better, gain, best)
        scale, offset = torch.where(better, d, scale), torch.where(better, m, offset)
    return scale, offset


def _half(values: Tensor) -> tuple[Tensor, Tensor]:
    """[n] -> (its float16 as bytes [n, 2], what these say in float32 [n])."""
    half = values.to(torch.float16)
    return half.view(torch.uint8).view(-1, 2), half.float()


def _scale(values: Tensor) -> tuple[Tensor, Tensor]:
    """`_half` of scales. Where float16 is coarse (subnormal) they are rounded up: codes must reach."""
    half = values.to(torch.float16)
    short = (half.float().abs() < values.abs()) & (values.abs() < _HALF_NORMAL)
    return _half((half.view(torch.int16) + short).view(torch.float16))


def _by_byte(q: Tensor) -> Tensor:
    """Codes, elements first [32, n] uint8 -> nibbles [n, 16]: element j is next to element j + 16."""
    return (q[:16] | (q[16:] << 4)).t()


def _high_bits(q: Tensor) -> Tensor:
    """The fifth bits of codes [32, n] uint8 -> [n, 4], element 8 b + j at bit j of byte b."""
    shifts = torch.arange(8, dtype=torch.uint8, device=q.device).view(1, 8, 1)
    return ((q >> 4).view(4, 8, -1) << shifts).sum(1, dtype=torch.uint8).t()


def _pack_q8_0(blocks: Tensor) -> Tensor:
    scale, d = _scale(blocks.abs().amax(1) / 127)
    q = _codes(blocks, _inverse(d).unsqueeze(1), -127, 127)
    return torch.cat((scale, q.to(torch.int8).view(torch.uint8)), 1)


def _pack_symmetric(blocks: Tensor, low: int) -> Tensor:
    """Q4_0 (low -8) and Q5_0 (low -16).

    In four bits the largest number becomes the lowest code, as ggml has it. A scale of least squares is as
    good for SmolLM2 (KL 0.397 to 0.401) and worse for Gemma 3 270M (0.686 to 0.503). In five it is better.
    """
    x = _groups(blocks, 32)
    scale, d = _scale(_largest(x) / low if low == -8 else _symmetric(x, low))
    q = _codes(x, _inverse(d), low, -low - 1).sub_(low).to(torch.uint8)
    high = [_high_bits(q)] if low == -16 else []
    return torch.cat((scale, *high, _by_byte(q & 15)), 1)


def _pack_affine(blocks: Tensor, top: int) -> Tensor:
    """Q4_1 (top 15) and Q5_1 (top 31)."""
    x = _groups(blocks, 32)
    found, offset = _affine(x, top, downward=False)
    scale, d = _scale(found)
    offset_bytes, m = _half(offset)
    q = _codes(x - m, _inverse(d), 0, top).to(torch.uint8)
    high = [_high_bits(q)] if top == 31 else []
    return torch.cat((scale, offset_bytes, *high, _by_byte(q & 15)), 1)


def _six_bits(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scales of 8 groups, [n, 8] >= 0, as six-bit codes under one float16: (its bytes, it [n, 1], codes)."""
    raw, unit = _scale(values.amax(1) / 63)
    unit = unit.unsqueeze(1)
    return raw, unit, _codes(values, _inverse(unit), 0, 63)


def _pack_scales(scales: Tensor, minima: Tensor) -> Tensor:
    """Six-bit codes of 8 groups, [n, 8] each -> [n, 12], as `gguf._k_scales` reads them."""
    s, m = scales.to(torch.uint8), minima.to(torch.uint8)
    first = (s[:, :4] & 63) | ((s[:, 4:] >> 4) << 6)
    second = (m[:, :4] & 63) | ((m[:, 4:] >> 4) << 6)
    return torch.cat((first, second, (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)), 1)


def _pack_k(blocks: Tensor, top: int) -> Tensor:
    """Q4_K (top 15) and Q5_K (top 31): 8 groups of 32 with six-bit scales and minima."""
    x = _groups(blocks, 32)
    scale, offset = _affine(x, top, downward=True)
    d_bytes, d, scales = _six_bits(scale.view(-1, 8))
    m_bytes, m, minima = _six_bits(-offset.view(-1, 8))
    q = _codes(x + (m * minima).view(-1), _inverse((d * scales).view(-1)), 0, top)
    codes = q.to(torch.uint8).view(32, -1, 8)
    packed = codes & 15
    nibbles = (packed[:, :, 0::2] | (packed[:, :, 1::2] << 4)).permute(1, 2, 0).flatten(1)
    high = []
    if top == 31:
        shifts = torch.arange(8, dtype=torch.uint8, device=x.device)
        high = [((codes >> 4) << shifts).sum(2, dtype=torch.uint8).t()]
    return torch.cat((d_bytes, m_bytes, _pack_scales(scales, minima), *high, nibbles), 1)


def _pack_q6_k(blocks: Tensor) -> Tensor:
    """16 groups of 16 with int8 scales under one float16 that has a sign."""
    x = _groups(blocks, 16)
    scale = _symmetric(x, -32).view(-1, 16)
    least, most = torch.aminmax(scale, dim=1)
    raw, d = _scale(torch.where(most > -least, most, least) / -128)
    scales = _codes(scale, _inverse(d).unsqueeze(1), -128, 127)
    q = _codes(x, _inverse((d.unsqueeze(1) * scales).view(-1)), -32, 31).add_(32).to(torch.uint8)
    codes = q.t().reshape(-1, 2, 4, 32)  # two halves of 128: four runs of 32
    low, high = codes & 15, codes >> 4
    nibbles = (low[:, :, :2] | (low[:, :, 2:] << 4)).flatten(1)
    pairs = high[:, :, 0] | (high[:, :, 1] << 2) | (high[:, :, 2] << 4) | (high[:, :, 3] << 6)
    return torch.cat((nibbles, pairs.flatten(1), scales.to(torch.int8).view(torch.uint8), raw), 1)


def _encoder(name: str, pack: Callable[[Tensor], Tensor], narrow: str | None = None) -> Encoder:
    return Encoder(block_type(name), pack, narrow)


ENCODERS: Mapping[str, Encoder] = MappingProxyType(
    {
        "q8_0": _encoder("Q8_0", _pack_q8_0),
        "q6_k": _encoder("Q6_K", _pack_q6_k, "q8_0"),
        "q5_k": _encoder("Q5_K", partial(_pack_k, top=31), "q5_1"),
        "q5_1": _encoder("Q5_1", partial(_pack_affine, top=31)),
        "q5_0": _encoder("Q5_0", partial(_pack_symmetric, low=-16)),
        "q4_k": _encoder("Q4_K", partial(_pack_k, top=15), "q5_0"),
        "q4_1": _encoder("Q4_1", partial(_pack_affine, top=15)),
        "q4_0": _encoder("Q4_0", partial(_pack_symmetric, low=-8)),
    }
)
"""The name an option has -> how numbers become that format."""
