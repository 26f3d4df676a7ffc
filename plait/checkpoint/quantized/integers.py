"""Integers with scales and zero points, out of the layouts of GPTQ, AWQ, compressed-tensors and int8."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

from plait.checkpoint.quantized.parts import FLOATS, StoredWeight, WeightParts
from plait.errors import BadFile, ShapeMismatch, UnsupportedFormat
from plait.quant.bits import pack, unpack
from plait.quant.grouped import Grouped
from plait.quant.weight import PIECE

# Where AWQ puts eight neighbouring outputs in a word: output i is in nibble _AWQ[i].
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)


def gptq(parts: WeightParts) -> StoredWeight:
    """qweight int32 [in * bits / 32, out]: columns as streams of bits; qzeros [groups, out * bits / 32]."""
    words, rows = parts.need("qweight", "int32")
    groups, _ = parts.need("scales", *FLOATS)
    bits = _gptq_bits(parts, words)
    cols = words * 32 // bits
    if "g_idx" in parts:
        parts.expect("g_idx", (cols,), "int32", "int64")
    parts.expect("scales", (groups, rows), *FLOATS)
    if rows * bits % 32 or cols * bits != words * 32:
        raise ShapeMismatch(f"{parts.name}: {rows} x {cols} integers of {bits} bits do not fill 32-bit words")
    parts.expect("qzeros", (groups, rows * bits // 32), "int32")
    group = _group(parts, cols, groups)

    def read() -> Grouped:
        codes = _bytes(parts.read("qweight").t())
        zeros = unpack(_bytes(parts.read("qzeros")), bits, rows).t()
        if _is_one_less(parts, zeros, bits):
            zeros = (zeros + 1) & ((1 << bits) - 1)
        return _sort_columns(
            parts, "g_idx", _make_grouped(codes, parts.finite("scales").t(), zeros, bits, group)
        )

    return StoredWeight((rows, cols), _name(bits, group, cols), read)


def _gptq_bits(parts: WeightParts, words: int) -> int:
    """From the number of inputs, which g_idx shows; without it the config must say."""
    said = parts.options.bits
    if "g_idx" not in parts:
        if said is None:
            raise UnsupportedFormat(
                f"{parts.name}: neither a g_idx nor a quantization config has its number of bits"
            )
        return said
    (cols,) = parts.need("g_idx", "int32", "int64", dims=(1,))
    if words * 32 % cols or not 2 <= words * 32 // cols <= 8:
        raise ShapeMismatch(
            f"{parts.name}: {words} words of 32 bits for {cols} inputs are no whole bits each"
        )
    return parts.agree("bits", words * 32 // cols, said)


def _is_one_less(parts: WeightParts, zeros: Tensor, bits: int) -> bool:
    """Whether zero points are one too small, as in GPTQ's first version.

    Where the config has no word on it, they are, unless all are in the middle.
    """
    said = parts.options.plus_one
    return not bool((zeros == 1 << (bits - 1)).all()) if said is None else said


def awq(parts: WeightParts) -> StoredWeight:
    """qweight int32 [in, out / 8]: eight outputs in a word, shuffled; qzeros [groups, out / 8] alike."""
    cols, words = parts.need("qweight", "int32")
    groups, rows = parts.need("scales", *FLOATS)
    if rows != words * 8 or cols % 8:
        raise ShapeMismatch(
            f"{parts.names['qweight']}: {[cols, words]} with scales {[groups, rows]} is not AWQ of 4 bits"
        )
    parts.agree("bits", 4, parts.options.bits)
    parts.expect("qzeros", (groups, words), "int32")
    group = _group(parts, cols, groups)

    def read() -> Grouped:
        packed = parts.read("qweight")
        even, odd = packed[0::2].contiguous(), packed[1::2].contiguous()  # the halves of each byte to be
        codes = torch.empty(rows, cols // 2, dtype=torch.uint8)
        for i, place in enumerate(_AWQ):
            both = (even >> 4 * place & 15) | (odd >> 4 * place & 15) << 4
            codes[i::8] = both.to(torch.uint8).t()
        zeros = _awq_numbers(parts.read("qzeros")).t()
        return _make_grouped(codes, parts.finite("scales").t(), zeros, 4, group)

    return StoredWeight((rows, cols), _name(4, group, cols), read)


def _awq_numbers(packed: Tensor) -> Tensor:
    """int32 [n, words] -> uint8 [n, words * 8], outputs in their order."""
    nibbles = unpack(_bytes(packed), 4, packed.shape[1] * 8)
    numbers: Tensor = nibbles.unflatten(1, (-1, 8))[:, :, list(_AWQ)].flatten(1)
    return numbers


def packed_integers(parts: WeightParts) -> StoredWeight:
    """compressed-tensors: weight_packed int32 [..., out, words], a row a stream, 2**(bits - 1) added."""
    shape, words = _true_shape(parts), parts.shape("packed")[-1]
    rows, cols = prod(shape[:-1]), shape[-1]
    bits = _find_bits(parts, cols, words)
    if cols % 8 and bits != 8:
        raise UnsupportedFormat(f"{parts.name}: {cols} inputs of {bits} bits; they must be a multiple of 8")
    groups = _scale_columns(parts, rows, cols)
    group = _group(parts, cols, groups)

    def read() -> Grouped:
        codes = _bytes(parts.read("packed").flatten(0, -2))[:, : cols * bits // 8].contiguous()
        scales = parts.finite("scale").reshape(-1, groups).expand(rows, groups)
        zeros = _read_zeros(parts, bits, rows, groups) if "zero_point" in parts else None
        return _sort_columns(parts, "weight_g_idx", _make_grouped(codes, scales, zeros, bits, group))

    return StoredWeight(shape, _name(bits, group, cols), read)


def _true_shape(parts: WeightParts) -> tuple[int, ...]:
    packed = parts.need("packed", "int32", dims=(2, 3))
    parts.expect("shape", (len(packed),), "int64", "int32")
    shape = tuple(int(n) for n in parts.read("shape"))
    if shape[:-1] != packed[:-1] or not 0 < shape[-1] <= packed[-1] * 16:
        raise ShapeMismatch(
            f"{parts.names['shape']}: says {list(shape)}, which {list(packed)} words of "
            f"{parts.names['packed']} cannot be"
        )
    return shape


def _find_bits(parts: WeightParts, cols: int, words: int) -> int:
    fitting = [bits for bits in range(2, 9) if -(-cols * bits // 32) == words]
    said = parts.options.bits
    if (said is not None and said not in fitting) or not fitting:
        raise ShapeMismatch(
            f"{parts.names['packed']}: {words} words of 32 bits cannot hold {cols} integers of "
            f"{said or 'two to eight'} bits"
        )
    return said or fitting[0]


def _scale_columns(parts: WeightParts, rows: int, cols: int) -> int:
    """How many scales a row has: one number for all, one per channel, or one per group."""
    shape = parts.need("scale", *FLOATS, dims=(0, 1, 2, 3))
    if prod(shape) == 1 or shape in ((rows,), (rows, 1)):
        return 1
    if len(shape) < 2 or prod(shape[:-1]) != rows or shape[-1] > cols:
        raise ShapeMismatch(f"{parts.names['scale']}: {list(shape)} are no scales of {[rows, cols]} integers")
    return shape[-1]


def _read_zeros(parts: WeightParts, bits: int, rows: int, groups: int) -> Tensor:
    """int32 packed along the outputs, or plain int8."""
    if parts.dtype("zero_point") == "int32":
        parts.expect("zero_point", (-(-rows * bits // 32), groups), "int32")
        return unpack(_bytes(parts.read("zero_point").t()), bits, rows).t()
    return _plain_zeros(parts, bits, rows, groups)


def _plain_zeros(parts: WeightParts, bits: int, rows: int, groups: int) -> Tensor:
    shape, half = parts.need("zero_point", "int8", "float8_e4m3fn", dims=(0, 1, 2)), 1 << (bits - 1)
    if prod(shape) not in (1, rows * groups):
        raise ShapeMismatch(f"{parts.names['zero_point']}: {list(shape)} for {rows} rows of {groups} groups")
    numbers = parts.read("zero_point").float().reshape(-1, groups if prod(shape) > 1 else 1) + half
    if not bool(((numbers >= 0) & (numbers < 2 * half)).all()):
        raise BadFile(f"{parts.names['zero_point']}: zero points beyond {bits} bits")
    return numbers.to(torch.uint8).expand(rows, groups)


def plain_int8(parts: WeightParts) -> StoredWeight:
    """weight int8 [..., out, in] with weight_scale: for all, by row or by group; zero points perhaps."""
    shape = parts.need("plain", "int8", dims=(2, 3))
    rows, cols = prod(shape[:-1]), shape[-1]
    groups = _scale_columns(parts, rows, cols)
    group = _group(parts, cols, groups)

    def read() -> Grouped:
        scales = parts.finite("scale").reshape(-1, groups).expand(rows, groups)
        zeros = _plain_zeros(parts, 8, rows, groups) if "zero_point" in parts else None
        return _make_grouped(_int8_codes(parts), scales, zeros, 8, group)

    return StoredWeight(shape, _name(8, group, cols), read)


def bnb_int8(parts: WeightParts) -> StoredWeight:
    """bitsandbytes: weight int8 [out, in], SCB float32 [out]: w = q * SCB / 127."""
    rows, cols = parts.need("plain", "int8")
    parts.expect("scb", (rows,), "float32")
    if "weight_format" in parts and bool(parts.read("weight_format").any()):
        raise UnsupportedFormat(f"{parts.name}: its weight_format is not 'row'; it was packed for one GPU")

    def read() -> Grouped:
        scales = parts.finite("scb").view(rows, 1) / 127
        return _make_grouped(_int8_codes(parts), scales, None, 8, cols)

    return StoredWeight((rows, cols), "int8", read)


def _int8_codes(parts: WeightParts) -> Tensor:
    return parts.read("plain").flatten(0, -2).view(torch.uint8) ^ 0x80


def _group(parts: WeightParts, cols: int, groups: int) -> int:
    """Columns of a group: as the config says, else all equal. Raises ShapeMismatch if they do not fit."""
    said = parts.options.group
    size = -(-cols // groups) if said is None or groups == 1 else said or cols
    if -(-cols // size) != groups:
        raise ShapeMismatch(
            f"{parts.name}: {groups} scale(s) for each of its rows of {cols}"
            + (f"; the config says groups of {said or cols}" if said is not None else "")
        )
    return min(size, cols)


def _name(bits: int, group: int, cols: int) -> str:
    return f"int{bits}" + (f"_g{group}" if group < cols else "")


def _bytes(words: Tensor) -> Tensor:
    """int32 [n, words] -> uint8 [n, words * 4], least significant byte first."""
    return words.contiguous().view(torch.uint8)


def _make_grouped(codes: Tensor, scales: Tensor, zeros: Tensor | None, bits: int, group: int) -> Grouped:
    """Zero points that are all in the middle are left out."""
    if zeros is not None and bool((zeros == 1 << (bits - 1)).all()):
        zeros = None
    return Grouped(codes, scales.contiguous(), None if zeros is None else zeros.contiguous(), bits, group)


def _sort_columns(parts: WeightParts, part: str, weight: Grouped) -> Grouped:
    """With its columns sorted by group, if they are not. Raises BadFile for groups that cannot be."""
    if part not in parts:
        return weight
    cols = weight.shape[1]
    parts.expect(part, (cols,), "int32", "int64")
    of = parts.read(part).long()
    usual = torch.arange(cols) // weight.group
    if torch.equal(of, usual) or bool((of == -1).all()):
        return weight
    order = of.argsort(stable=True)
    if not torch.equal(of[order], usual):
        low, high = int(of.min()), int(of.max())
        raise BadFile(
            f"{parts.names[part]}: groups {low}..{high} of {weight.scales.shape[1]}, not {weight.group} "
            "inputs in each; the file is damaged"
        )
    step = max(1, PIECE // cols)
    codes = torch.empty_like(weight.codes)
    for start in range(0, len(codes), step):
        numbers = unpack(weight.codes[start : start + step], weight.bits, cols)
        codes[start : start + step] = pack(numbers[:, order], weight.bits)
    return Grouped(codes, weight.scales, weight.zeros, weight.bits, weight.group, order.int())
