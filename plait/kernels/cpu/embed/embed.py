"""Embedding lookup: rows of a table, decoded from their stored bytes; which kernel reads which storage.

Plain numbers and blocks are read by the kernels of `gguf`, packed safetensors by those here: integers in
groups, small floats, codebooks. The operations are those of `quant`, in float32 and in the same order: so are
the bits. Kernels take the words of `skeleton` and n; then their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen import vec
from plait.kernels.cpu.codegen.kernel import Kernel, inline
from plait.kernels.cpu.codegen.kinds import Float, Floats, Int, Ints
from plait.kernels.cpu.embed.gguf import E4M3
from plait.kernels.cpu.embed.skeleton import KERNELS, PIECE, by_piece, get_byte, put
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import word
from plait.kernels.cpu.runtime.row_checks import float32_rows
from plait.ops.registry import OpFacts
from plait.ops.rows import embed
from plait.quant.codebook import Codebook
from plait.quant.fp4 import VALUES, Fp4
from plait.quant.fp8 import Fp8
from plait.quant.gguf import Gguf
from plait.quant.gguf_iq import grid
from plait.quant.grouped import Grouped
from plait.quant.weight import Dense, Weight

_GRIDS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
GRIDS = {**{name: name for name in _GRIDS}, "IQ1_M": "IQ1_S"}
PACKED = re.compile(r"int\d(_g\d+)?|fp8(_b\d+)?|mxfp4|nvfp4|bnb_\w+")
E2M1 = np.array(VALUES, np.float32)
E8M0 = np.array([2.0 ** (e - 127) for e in range(255)] + [np.nan], np.float32)
LARGEST = np.float32(448.0)  # of E4M3: what would be more is none
FROM_E4M3, FROM_E2M1 = np.float32(2.0**120), np.float32(2.0**126)  # of bits put where float32 has its own


@inline
def _put(to: int, x: Floats, by: Float, scale: Float) -> None:
    put(to, vec.mul(x, vec.spread(by)), scale)


@inline
def _put_eights(row: Int, c: Int, stop: Int, zero: Int, by: Float, scale: Float, to: Int) -> Int:
    """Integers of a byte each; the column where it ended."""
    while c + 16 <= stop:
        _put(
            to + 4 * c,
            vec.to_f32(vec.sub_i32(vec.load_u8(row + c), vec.spread_int(np.int32(zero)))),
            by,
            scale,
        )
        c += 16
    return c


@inline
def _put_fours(row: Int, c: Int, stop: Int, zero: Int, by: Float, scale: Float, to: Int) -> Int:
    """Integers of four bits, the low ones first, from an even column on; the column where it ended."""
    while c + 32 <= stop:
        packed, shift = vec.load_u8(row + c // 2), vec.spread_int(np.int32(zero))
        low = vec.to_f32(vec.sub_i32(vec.and_i32(packed, vec.spread_int(np.int32(15))), shift))
        high = vec.to_f32(vec.sub_i32(vec.right(packed, np.int32(4)), shift))
        _put(to + 4 * c, vec.interleave_low(low, high), by, scale)
        _put(to + 4 * c + 64, vec.interleave_high(low, high), by, scale)
        c += 32
    return c


@inline
def _float(address: Int, kind: Int) -> float:
    """A number stored as half (0), bfloat16 (1) or float32 (2)."""
    return vec.get_f16(address) if kind == 0 else vec.get_bf16(address) if kind == 1 else vec.get_f32(address)


@by_piece
def groups(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
    """Own words: scales, bytes of their rows, which float they are (0 half, 1 bfloat16, 2 float32); zeros or
    0, bytes of their rows; bits, group, order or 0."""
    scales, scale_bytes, float_kind, zeros, zero_bytes, bits = vec.words(args, 9, 15)
    group, order, size = word(args, 15), word(args, 16), 4 if word(args, 11) == 2 else 2
    c: Int = start
    while c < end:
        g = c // group
        stop, by = min((g + 1) * group, end), _float(scales + token * scale_bytes + size * g, float_kind)
        zero = get_byte(zeros + token * zero_bytes + g) if zeros != 0 else np.int64(1) << (bits - 1)
        if order == 0 and bits == 8:
            c = _put_eights(row, c, stop, zero, by, scale, to)
        elif order == 0 and bits == 4 and c & 1 == 0:
            c = _put_fours(row, c, stop, zero, by, scale, to)
        while c < stop:
            at, shift = row + (c * bits >> 3), c * bits & 7
            code: Int = get_byte(at) >> shift
            if shift + bits > 8:
                code |= get_byte(at + 1) << (8 - shift)
            code &= (1 << bits) - 1
            column = np.int64(vec.get_i32(order + 4 * c)) if order != 0 else c
            vec.put_f32(to + 4 * column, np.float32(code - zero) * by * scale)
            c += 1


@inline
def _e4m3(codes: Ints) -> Floats:
    """Sixteen of them, one in each lane, as float32."""
    size = vec.bits_f32(vec.left(vec.and_i32(codes, vec.spread_int(np.int32(127))), np.int32(20)))
    size = vec.mul(size, vec.spread(FROM_E4M3))
    size = vec.where_less(vec.spread(LARGEST), size, vec.spread(np.float32(np.nan)), size)
    sign = vec.left(vec.and_i32(codes, vec.spread_int(np.int32(128))), np.int32(24))
    return vec.bits_f32(vec.or_i32(vec.bits_i32(size), sign))


@by_piece
def eights(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
    """Own words: scales (float32), how many there are in a row, rows and columns of a block."""
    scales, count, tall, wide = vec.words(args, 9, 13)
    c = start
    above = scales + 4 * (token // tall * count)
    while c < end:
        block = c // wide
        stop, by = min((block + 1) * wide, end), vec.get_f32(above + 4 * block)
        while c + 16 <= stop:
            _put(to + 4 * c, _e4m3(vec.load_u8(row + c)), by, scale)
            c += 16
        while c < stop:
            vec.put_f32(to + 4 * c, E4M3[vec.get_u8(row + c)] * by * scale)
            c += 1


@inline
def _e2m1(codes: Ints) -> Floats:
    """Sixteen of them, one in each lane, as float32."""
    size = vec.bits_f32(vec.left(vec.and_i32(codes, vec.spread_int(np.int32(7))), np.int32(22)))
    sign = vec.left(vec.and_i32(codes, vec.spread_int(np.int32(8))), np.int32(28))
    return vec.bits_f32(vec.or_i32(vec.bits_i32(vec.mul(size, vec.spread(FROM_E2M1))), sign))


@inline
def _small(scales: Int, c: Int, group: Int, factor: Float) -> Float:
    """What multiplies column c: a power of two for groups of 32, E4M3 for those of 16; then the factor."""
    byte = vec.get_u8(scales + c // group)
    return np.float32(E8M0[byte] if group == 32 else E4M3[byte]) * factor


@by_piece
def fours(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
    """Own words: scales (a byte each), bytes of their rows, columns of a group: 32 for powers of two, 16 for
    E4M3; factors or 0, bytes between them."""
    scales, scale_bytes, group = word(args, 9), word(args, 10), word(args, 11)
    factors, factor_bytes, nibble = word(args, 12), word(args, 13), np.int32(15)
    c = start
    factor = vec.get_f32(factors + token * factor_bytes) if factors != 0 else np.float32(1.0)
    above = scales + token * scale_bytes
    while c + 32 <= end:
        packed = vec.load_u8(row + c // 2)
        low, high = _e2m1(vec.and_i32(packed, vec.spread_int(nibble))), _e2m1(vec.right(packed, np.int32(4)))
        _put(to + 4 * c, vec.interleave_low(low, high), _small(above, c, group, factor), scale)
        _put(to + 4 * c + 64, vec.interleave_high(low, high), _small(above, c + 16, group, factor), scale)
        c += 32
    while c < end:
        code = get_byte(row + c // 2) >> (4 * (c & 1)) & 15
        vec.put_f32(to + 4 * c, E2M1[code] * _small(above, c, group, factor) * scale)
        c += 1


@by_piece
def places(args: int, token: int, row: int, start: int, end: int, to: int, scale: float) -> None:
    """Own words: table, blocks' magnitudes (float32, or bytes that stand for places in a table), bytes of
    their rows, columns of a block; that table or 0, scales, bytes of their rows, bytes under a scale,
    offsets, bytes between them."""
    table, absmax, absmax_bytes, block, nested, scales, scale_bytes, under, offsets = vec.words(args, 9, 18)
    offset_bytes = word(args, 18)
    c = start
    at = absmax + token * absmax_bytes
    while c < end:
        b = c // block
        stop = min((b + 1) * block, end)
        if nested != 0:
            by = vec.get_f32(scales + token * scale_bytes + 4 * (b // under))
            by = vec.get_f32(nested + 4 * get_byte(at + b)) * by + vec.get_f32(offsets + token * offset_bytes)
        else:
            by = vec.get_f32(at + 4 * b)
        while c < stop:
            code = get_byte(row + c // 2) >> (4 - 4 * (c & 1)) & 15
            vec.put_f32(to + 4 * c, vec.get_f32(table + 4 * code) * by * scale)
            c += 1


def why_unknown_format(facts: OpFacts) -> str | None:
    kind = facts.sizes.get("kind", "float32")
    return float32_rows(facts) if kind in KERNELS or PACKED.fullmatch(kind) else f"it cannot read {kind}"


def _rows(data: Tensor) -> tuple[Tensor, int]:
    """A matrix and the bytes between its rows. Raises ShapeMismatch if these are not dense."""
    if data.shape[1] > 1 and data.stride(1) != 1:
        raise ShapeMismatch(
            f"the rows of an embedding's table must be dense, its strides are {data.stride()}"
        )
    return data, data.stride(0) * data.element_size()


@dataclass(frozen=True, slots=True)
class RowReader:
    """What reads rows of a table: a kernel, the rows' bytes and the bytes between them, pieces of a row, and
    the kernel's words behind n. `table`: what these point into."""

    kernel: Kernel
    source: tuple[Tensor, int]
    pieces: int
    more: tuple[object, ...]
    table: Weight


def reader(table: Weight) -> RowReader:
    """The kernel that reads this table, and how. Raises ShapeMismatch if none can."""
    n = table.shape[1]
    if isinstance(table, Dense | Gguf) and table.format in KERNELS:
        source = _rows(table.data if isinstance(table, Gguf) else table.tensor)
        more = (grid(GRIDS[table.format]) if table.format in GRIDS else None,)
        pieces = n // table.kind.elements if isinstance(table, Gguf) else -(-n // PIECE)
        return RowReader(KERNELS[table.format], source, pieces, more, table)
    made, source, words = _packed_kernel(table)
    return RowReader(made, source, -(-n // PIECE), words, table)


def _packed_kernel(table: Weight) -> tuple[Kernel, tuple[Tensor, int], tuple[object, ...]]:
    """The kernel of a packed table, its codes, and the words behind n."""
    if isinstance(table, Grouped):
        floats = (torch.float16, torch.bfloat16, torch.float32).index(table.scales.dtype)
        zeros = (None, 0) if table.zeros is None else _rows(table.zeros)
        words = (*_rows(table.scales), floats, *zeros, table.bits, table.group, table.order)
        return groups, _rows(table.codes), words
    if isinstance(table, Fp8):
        scale, scale_bytes = _rows(table.scale)
        return eights, _rows(table.codes), (scale, scale_bytes // 4, *table.block)
    if isinstance(table, Fp4):
        factor = table.factor
        each = 0 if factor is None or len(factor) == 1 else factor.stride(0) * 4
        return fours, _rows(table.codes), (*_rows(table.scales), table.group, factor, each)
    if isinstance(table, Codebook):
        own, more = (table.table, *_rows(table.absmax), table.block), table.nested
        if more is None:
            return places, _rows(table.codes), (*own, None, None, 0, 1, None, 0)
        nested = (more.table, *_rows(more.scale), more.block, more.offset, more.offset.stride(0) * 4)
        return places, _rows(table.codes), (*own, *nested)
    raise ShapeMismatch(f"the embedding's kernel cannot read {table.format}")


@embed.variant("native", on="cpu", when=why_unknown_format, native=True)
def _embed(cpu: Executor, token_ids: Tensor, table: Weight, scale: float, dtype: torch.dtype) -> Tensor:
    """Rows of a table by token id. Ids are trusted, because they were checked when the batch was made."""
    if token_ids.dtype != torch.int64 or token_ids.dim() not in (1, 2) or not token_ids.is_contiguous():
        raise ShapeMismatch(
            f"token ids must be dense int64 [T] or [T, k], got {token_ids.dtype} {list(token_ids.shape)}"
        )
    if dtype != torch.float32:
        raise ShapeMismatch(f"the embedding's kernel makes float32, not {dtype}")
    how, n, tokens = reader(table), table.shape[1], token_ids.shape[0]
    each = 1 if token_ids.dim() == 1 else token_ids.shape[1]
    out = cpu.empty(tokens, each * n)
    words = (*how.source, how.pieces * each, float(scale), out, n, *how.more)
    cpu.launch(how.kernel, token_ids, *words, rows=tokens)
    return out
