"""Multi-head latent attention, absorbed: every head reads the same latent, as its key and as its value.

The cache is [block][token][column]: what the values want. Keys want tokens in lanes, so the latents of a span
are turned once for all heads and rows of a unit of work. The rest is `attention.py` with one kv head.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.attention import APART, check_cache, check_index, kept_dtype
from plait.kernels.cpu.attention_source import TILES, Form, module, record_bytes
from plait.kernels.cpu.executor import Executor
from plait.kernels.cpu.frame import rows_of, word
from plait.kernels.cpu.kernel import Kernel, kernel
from plait.kernels.cpu.rows import Rows
from plait.kernels.cpu.vec import get_f32, get_i64, load_some, put_bf16, store_some
from plait.ops.attention import paged_latent_attention
from plait.ops.registry import Facts

SPAN = 128  # tokens; their latents, turned, have to stay in L2


@kernel
def store_latents(frame, args, thread, threads):
    """latent, its row stride, cache, slots, columns, bytes of a cached number."""
    latent, row_bytes, cached, slots = word(args, 2), word(args, 3), word(args, 4), word(args, 5)
    n, size = word(args, 6), word(args, 7)
    rows = rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        x, to = latent + r * row_bytes, cached + get_i64(slots + 8 * r) * n * size
        if size == 4:
            for i in range(0, n, 16):
                left = np.int32(n - i)
                store_some(to + 4 * i, load_some(x + 4 * i, left), left)
        else:
            for i in range(n):
                put_bf16(to + 2 * i, get_f32(x + 4 * i))


def _turn(size: int) -> str:
    """The text of `unfold`: copies of a span's latents as [group of sixteen][column][token].

    A square of sixteen by sixteen is turned by four rounds of interleaving rows i and i + 8.
    """
    load = "load_some({}, left)" if size == 4 else "widened(load_some({}, left // np.int32(2)))"
    text = ["    for c in range(0, columns, 16):", "        left = np.int32(min(columns - c, 16))"]
    text += [f"        a0_{i} = {load.format(f'at + {i} * stride + {size} * c')}" for i in range(16)]
    for turn in range(4):
        for i in range(8):
            pair = f"(a{turn}_{i}, a{turn}_{i + 8})"
            text += [f"        a{turn + 1}_{2 * i} = interleave_low{pair}"]
            text += [f"        a{turn + 1}_{2 * i + 1} = interleave_high{pair}"]
    text += [f"        store_f32(to + 64 * (c + {i}), a4_{i})" for i in range(16)]
    return _UNFOLD.format(body="\n".join(text), size=size, groups=SPAN // 16)


_UNFOLD = '''
@inline
def turn(at, stride, columns, to):
    """Sixteen rows, `stride` bytes apart, as [column][row], columns rounded up to sixteen."""
{body}


@inline
def unfold(args, s, span, first, end, to, copies):
    """Where the groups of a span lie: turned copies as keys, the latents themselves as values."""
    size, width = word(args, BLOCK), word(args, K_DIM)
    table = word(args, TABLE) + s * word(args, TABLE_ROW)
    for g in range(first, end):
        position = span + 16 * g
        place = get_i64(table + 8 * (position // size)) * size + position % size
        source, copy = word(args, KEYS) + place * width * {size}, copies + g * ((width + 15) // 16 * 1024)
        turn(source, width * {size}, width, copy)
        put_i64(to + 8 * g, copy)
        put_i64(to + 8 * ({groups} + g), source)
'''


def form_of(dtype: torch.dtype) -> Form:
    size = dtype.itemsize
    return Form(
        name=f"latent_{str(dtype).removeprefix('torch.')}",
        span=SPAN,
        key_size=4,
        value_size=size,
        value_stride=f"word(args, K_DIM) * {size}",
        locate="unfold(args, s, at, first, end, scratch, copies)",
        least=TILES,
        prelude=_turn(size),
    )


@cache
def attend_of(dtype: torch.dtype) -> Kernel:
    """The kernel for caches of this dtype."""
    made: Kernel = module(form_of(dtype)).attend
    return made


def served(facts: Facts) -> str | None:
    """Why the native kernels cannot serve these facts, if so."""
    for name in ("kv_rank", "rope_dim"):
        if facts.sizes.get(name, 2) % 2:
            return f"it wants an even {name}, not {facts[name]}"
    return kept_dtype(facts)


@paged_latent_attention.variant("native", on="cpu", when=served, native=True)
def _paged_latent_attention(
    cpu: Executor,
    q: Tensor,
    latent: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    scale: float,
    kv_rank: int,
) -> Tensor:
    rows, new = Rows.of(q), Rows.of(latent)
    size, width = cache.shape[1:]
    check_cache("cache", cache, (size, width))
    check_index(block_table, slot_mapping, query_start, seq_lens)
    same = new.count == rows.count and new.width == rows.width == width and q.dim() == 3
    if not same or latent.dim() != 2 or not 0 < kv_rank <= width or kv_rank % 2 or width % 2:
        raise ShapeMismatch(
            f"q {list(q.shape)} and latent {list(latent.shape)} do not fit a cache of {width} columns with a "
            f"kv_rank of {kv_rank}: all have to end in its width, and both numbers are even"
        )
    cpu.launch(
        store_latents, latent, new.row_bytes, cache, slot_mapping, width, cache.element_size(), rows=new.count
    )
    out = cpu.empty(rows.count, rows.heads, kv_rank)
    spans = -(-block_table.shape[1] * size // SPAN)
    apart = min(APART, rows.count * rows.heads * spans * record_bytes(kv_rank))
    copies = SPAN // 16 * -(-width // 16) * 1024
    cpu.launch(
        attend_of(cache.dtype), q, *rows.strides, out, cache, cache, block_table, block_table.stride(0) * 8,
        query_start, seq_lens, rows.heads, 1, width, kv_rank, size, 0, float(scale), 0.0, apart, None,
        rows=rows.count, seqs=seq_lens.shape[0], shared=apart,
        scratch=form_of(cache.dtype).scratch(width, kv_rank) + copies,
    )  # fmt: skip
    return out
