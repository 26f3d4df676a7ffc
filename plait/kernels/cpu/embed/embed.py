"""Embedding lookup: rows of a table, decoded from their stored bytes; which kernel reads which storage.

The kernels are in `gguf` (plain numbers, blocks) and `packed` (packed safetensors); loops in `skeleton`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import plait.kernels.cpu.embed.gguf  # noqa: F401  it fills KERNELS
from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel
from plait.kernels.cpu.embed.packed import eights, fours, groups, places
from plait.kernels.cpu.embed.skeleton import KERNELS, PIECE
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.row_checks import float32_rows
from plait.ops.registry import OpFacts
from plait.ops.rows import embed
from plait.quant.codebook import Codebook
from plait.quant.fp4 import Fp4
from plait.quant.fp8 import Fp8
from plait.quant.gguf import Gguf
from plait.quant.gguf_iq import grid
from plait.quant.grouped import Grouped
from plait.quant.weight import Dense, Weight

_GRIDS = ("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S")
GRIDS = {**{name: name for name in _GRIDS}, "IQ1_M": "IQ1_S"}
PACKED = re.compile(r"int\d(_g\d+)?|fp8(_b\d+)?|mxfp4|nvfp4|bnb_\w+")


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
    more: tuple[Any, ...]
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


def _packed_kernel(table: Weight) -> tuple[Kernel, tuple[Tensor, int], tuple[Any, ...]]:
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
