"""Rows of an embedding's table, decoded from the bytes they are stored as: which kernel reads which storage.

Kernels of GGUF's blocks and of plain numbers are in `embed_blocks` and `embed_parts`; those of packed
safetensors are here. The operations are those of `quant`, in float32 and in the same order: so are the bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu import embed_blocks, embed_parts
from plait.kernels.cpu.embed_blocks import PIECE
from plait.kernels.cpu.executor import Executor
from plait.kernels.cpu.frame import rows_of, word
from plait.kernels.cpu.kernel import Kernel, inline, kernel
from plait.kernels.cpu.rows import float32_rows
from plait.kernels.cpu.vec import get_bf16, get_f16, get_f32, get_i32, get_i64, get_u8, put_f32
from plait.ops.registry import Facts
from plait.ops.rows import embed
from plait.quant.codebook import Codebook
from plait.quant.fp4 import VALUES, Fp4
from plait.quant.fp8 import Fp8
from plait.quant.gguf import Gguf
from plait.quant.gguf_iq import grid
from plait.quant.grouped import Grouped
from plait.quant.weight import Dense, Weight

KERNELS: Mapping[str, Kernel] = {**embed_blocks.KERNELS, **embed_parts.KERNELS}
"""The name of a block format, or of plain numbers -> the kernel that reads it."""

GRIDS = {name: name for name in ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")} | {
    "IQ1_M": "IQ1_S"
}
PACKED = re.compile(r"int\d(_g\d+)?|fp8(_b\d+)?|mxfp4|nvfp4|bnb_\w+")
E2M1 = np.array(VALUES, np.float32)
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()  # by the byte
E8M0 = np.array([2.0 ** (e - 127) for e in range(255)] + [np.nan], np.float32)


@inline
def _share(frame, args, thread, threads):
    """The pieces of this thread: every row has as many as word 5 says."""
    pieces = rows_of(frame, args) * word(args, 5)
    return pieces * thread // threads, pieces * (thread + 1) // threads


@inline
def _byte(address):
    return np.int64(get_u8(address))


@kernel
def groups(frame, args, thread, threads):
    """token ids, codes, bytes of their rows, pieces of a row, scale, out (dense), n; scales, bytes of their
    rows, which float they are (0 half, 1 bfloat16, 2 float32); zeros or 0, bytes of their rows; bits,
    group, order or 0."""
    ids, codes, row_bytes, per_row = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    scale, out, n = get_f32(args + 48), word(args, 7), word(args, 8)
    scales, scale_bytes, float_kind = word(args, 9), word(args, 10), word(args, 11)
    zeros, zero_bytes, bits, group, order = (
        word(args, 12),
        word(args, 13),
        word(args, 14),
        word(args, 15),
        word(args, 16),
    )
    first, last = _share(frame, args, thread, threads)
    for i in range(first, last):
        token, start = get_i64(ids + 8 * (i // per_row)), i % per_row * 256
        for c in range(start, min(start + 256, n)):
            at = codes + token * row_bytes + (c * bits >> 3)
            shift, g = c * bits & 7, c // group
            code = _byte(at) >> shift
            if shift + bits > 8:
                code |= _byte(at + 1) << (8 - shift)
            code &= (1 << bits) - 1
            zero = _byte(zeros + token * zero_bytes + g) if zeros != 0 else np.int64(1) << (bits - 1)
            place = scales + token * scale_bytes
            if float_kind == 0:
                by = get_f16(place + 2 * g)
            elif float_kind == 1:
                by = get_bf16(place + 2 * g)
            else:
                by = get_f32(place + 4 * g)
            column = np.int64(get_i32(order + 4 * c)) if order != 0 else c
            put_f32(out + 4 * (i // per_row * n + column), np.float32(code - zero) * by * scale)


@kernel
def eights(frame, args, thread, threads):
    """As `groups`, up to n; scales (float32), how many there are in a row, rows and columns of a block."""
    ids, codes, row_bytes, per_row = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    scale, out, n = get_f32(args + 48), word(args, 7), word(args, 8)
    scales, count, tall, wide = word(args, 9), word(args, 10), word(args, 11), word(args, 12)
    first, last = _share(frame, args, thread, threads)
    for i in range(first, last):
        token, start = get_i64(ids + 8 * (i // per_row)), i % per_row * 256
        for c in range(start, min(start + 256, n)):
            by = get_f32(scales + 4 * (token // tall * count + c // wide))
            value = E4M3[get_u8(codes + token * row_bytes + c)] * by
            put_f32(out + 4 * (i // per_row * n + c), value * scale)


@kernel
def fours(frame, args, thread, threads):
    """As `groups`, up to n; scales (a byte each), bytes of their rows, columns of a group: 32 for powers of
    two, 16 for E4M3; factors or 0, bytes between them."""
    ids, codes, row_bytes, per_row = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    scale, out, n = get_f32(args + 48), word(args, 7), word(args, 8)
    scales, scale_bytes, group, factors, factor_bytes = (
        word(args, 9),
        word(args, 10),
        word(args, 11),
        word(args, 12),
        word(args, 13),
    )
    first, last = _share(frame, args, thread, threads)
    for i in range(first, last):
        token, start = get_i64(ids + 8 * (i // per_row)), i % per_row * 256
        for c in range(start, min(start + 256, n)):
            byte = get_u8(scales + token * scale_bytes + c // group)
            by = E8M0[byte] if group == 32 else E4M3[byte]
            if factors != 0:
                by = by * get_f32(factors + token * factor_bytes)
            code = _byte(codes + token * row_bytes + c // 2) >> (4 * (c & 1)) & 15
            put_f32(out + 4 * (i // per_row * n + c), E2M1[code] * by * scale)


@kernel
def places(frame, args, thread, threads):
    """As `groups`, up to n; table, blocks' magnitudes (float32, or bytes that stand for places in a table),
    bytes of their rows, columns of a block; that table or 0, scales, bytes of their rows, bytes under a
    scale, offsets, bytes between them."""
    ids, codes, row_bytes, per_row = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    scale, out, n = get_f32(args + 48), word(args, 7), word(args, 8)
    table, absmax, absmax_bytes, block = word(args, 9), word(args, 10), word(args, 11), word(args, 12)
    nested, scales, scale_bytes, under = word(args, 13), word(args, 14), word(args, 15), word(args, 16)
    offsets, offset_bytes = word(args, 17), word(args, 18)
    first, last = _share(frame, args, thread, threads)
    for i in range(first, last):
        token, start = get_i64(ids + 8 * (i // per_row)), i % per_row * 256
        for c in range(start, min(start + 256, n)):
            at, b = absmax + token * absmax_bytes, c // block
            if nested != 0:
                by = get_f32(nested + 4 * _byte(at + b)) * get_f32(
                    scales + token * scale_bytes + 4 * (b // under)
                )
                by = by + get_f32(offsets + token * offset_bytes)
            else:
                by = get_f32(at + 4 * b)
            code = _byte(codes + token * row_bytes + c // 2) >> (4 * (1 - (c & 1))) & 15
            put_f32(out + 4 * (i // per_row * n + c), get_f32(table + 4 * code) * by * scale)


def known_format(facts: Facts) -> str | None:
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
class Reader:
    """What reads rows of a table: a kernel, the rows' bytes and the bytes between them, pieces of a row, and
    the kernel's words behind n. `table`: what these point into."""

    kernel: Kernel
    source: tuple[Tensor, int]
    pieces: int
    more: tuple[Any, ...]
    table: Weight


def reader(table: Weight) -> Reader:
    """The kernel that reads this table, and how. Raises ShapeMismatch if none can."""
    n = table.shape[1]
    if isinstance(table, Dense | Gguf) and table.format in KERNELS:
        source = _rows(table.data if isinstance(table, Gguf) else table.tensor)
        more = (grid(GRIDS[table.format]),) if table.format in GRIDS else ()
        pieces = n // table.kind.elements if isinstance(table, Gguf) else -(-n // PIECE)
        return Reader(KERNELS[table.format], source, pieces, more, table)
    made, source, words = _packed(table)
    return Reader(made, source, -(-n // PIECE), words, table)


def _packed(table: Weight) -> tuple[Kernel, tuple[Tensor, int], tuple[Any, ...]]:
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


@embed.variant("native", on="cpu", when=known_format, native=True)
def _embed(cpu: Executor, token_ids: Tensor, table: Weight, scale: float, dtype: torch.dtype) -> Tensor:
    """A token id is trusted: whoever made the batch has looked."""
    if token_ids.dtype != torch.int64 or token_ids.dim() != 1 or not token_ids.is_contiguous():
        raise ShapeMismatch(
            f"token ids must be dense int64 [T], got {token_ids.dtype} {list(token_ids.shape)}"
        )
    if dtype != torch.float32:
        raise ShapeMismatch(f"the embedding's kernel makes float32, not {dtype}")
    how, n, tokens = reader(table), table.shape[1], token_ids.shape[0]
    out = cpu.empty(tokens, n)
    words = (*how.source, how.pieces, float(scale), out, n, *how.more)
    cpu.launch(how.kernel, token_ids, *words, rows=tokens)
    return out
