"""Which entries a token reads: scores of them in one launch, and the best of these in another.

    score_entries   token × programs   every P-th tile of the entries that the token sees
    choose_best     token              see `attention.choose`

A tile is scored by itself, so a score depends on no grid. The same launch stores the entries of windows that
end in this step; tiles with some of them read these where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.choose import (
    allocate_scores,
    choose_from,
    part_rows,
    programs_of_row,
)
from plait.kernels.triton.attention.compressed.rows import find_row, row_size
from plait.kernels.triton.attention.place import _as_entry
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, as_half, split_options, with_float16
from plait.kernels.triton.row_views import pack_rows
from plait.ops.compressed import add_open_block, choose_entries, spread_windows
from plait.ops.launch import launch

NAME = "triton"
MOST_HEADS, FEW_HEADS = 64, 16  # of a tile; few in float32, which has no matrix units
ENTRIES, FEW_ENTRIES = 64, 16
MOST_COLUMNS = 256  # of queries, of which a tile has many heads


@triton.jit(do_not_specialize=["first_row", "num_seqs", "most"])
def score_entries(
    q, weights, entries, cache, table, slot_mapping, query_start, seq_lens, scores, ends,
    first_row, num_seqs, most, q_row, q_head, weight_row, entry_row, table_row, score_row,
    S: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    RATE: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Σ_h weight_h · relu(q_h · entry). scores: [rows of this part, most] float32, ends: [rows of this part]
    int32, the entries that each sees. Grid: (rows of this part, P)."""
    await_previous()
    own, p = tl.program_id(0), tl.program_id(1)
    row = first_row + own
    seq, position = find_row(query_start, seq_lens, row, num_seqs, S)
    first = row if S == 1 else tl.load(query_start + seq).to(tl.int32)
    past, known = position - (row - first), tl.minimum((position + 1) // RATE, most)
    h, d, wide = tl.arange(0, HB), tl.arange(0, DP), row.to(tl.int64)
    if p == 0:
        tl.store(ends + own, known)
        is_last = (position + 1) % RATE == 0
        to = tl.load(slot_mapping + row).to(tl.int64) // STEP * D
        made = tl.load(entries + wide * entry_row + d, mask=(d < D) & is_last, other=0.0)
        tl.store(cache + to + d, _as_entry(made, cache), mask=(d < D) & is_last)
    line, out = table + seq.to(tl.int64) * table_row, scores + own.to(tl.int64) * score_row
    own_q, own_weights = q + wide * q_row, weights + wide * weight_row
    heads = tl.load(
        own_q + h[:, None] * q_head + d[None, :], mask=(h < H)[:, None] & (d < D)[None, :], other=0.0
    )
    weight = tl.load(own_weights + h, mask=h < H, other=0.0).to(tl.float32)
    for i in range(p, (known + BN - 1) // BN, tl.num_programs(1)):
        e = (i + tl.zeros([], tl.int32)) * BN + tl.arange(0, BN)
        t = (e + 1) * RATE - 1
        old, new, r = (e < known) & (t < past), (e < known) & (t >= past), t // STEP
        place = tl.load(line + r // (PAGE // STEP), mask=old, other=0).to(tl.int64)
        at = (place * (PAGE // STEP) + r % (PAGE // STEP)) * D
        kept = tl.load(cache + at[:, None] + d[None, :], mask=old[:, None] & (d < D)[None, :], other=0.0)
        at = (first + t - past).to(tl.int64) * entry_row
        made = tl.load(entries + at[:, None] + d[None, :], mask=new[:, None] & (d < D)[None, :], other=0.0)
        made = _as_entry(made, cache).to(heads.dtype)
        keys = tl.trans(tl.where(new[:, None], made, kept.to(heads.dtype)))
        found = tl.maximum(tl.dot(heads, keys, input_precision="ieee"), 0.0)
        total = tl.sum(found * weight[:, None], 0)
        for some in range(HB, H, HB):
            g = some + h
            more = tl.load(
                own_q + g[:, None] * q_head + d[None, :], mask=(g < H)[:, None] & (d < D)[None, :], other=0.0
            )
            found = tl.maximum(tl.dot(more, keys, input_precision="ieee"), 0.0)
            other = tl.load(own_weights + g, mask=g < H, other=0.0).to(tl.float32)
            total += tl.sum(found * other[:, None], 0)
        tl.store(out + e, total, mask=e < known)


def _constants(heads: int, dim: int, dtype: torch.dtype) -> dict[str, int]:
    """What `score_entries` is compiled for."""
    is_wide = dtype == torch.float32 or dim > MOST_COLUMNS
    wide = max(16, triton.next_power_of_2(dim))
    return {
        "H": heads,
        "HB": max(16, min(triton.next_power_of_2(heads), FEW_HEADS if is_wide else MOST_HEADS)),
        "D": dim,
        "DP": wide,
        "BN": FEW_ENTRIES if is_wide else ENTRIES,
        "num_warps": 4,
        "num_stages": 1 if is_wide else 2,
    }


@choose_entries.variant(NAME, on="cuda")
def choose(
    q: Tensor,
    weights: Tensor,
    entries: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
    rate: int,
    step: int,
) -> Tensor:
    """`choose_entries`: the same arguments and result."""
    (tokens, heads, dim), num_seqs = q.shape, len(seq_lens)
    q, weights, entries = (pack_rows(x) for x in (q, weights, entries))
    page = cache.shape[1] * step
    most = max(1, block_table.shape[1] * page // rate)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=q.device)
    sizes = {"S": row_size(tokens, num_seqs), **_constants(heads, dim, q.dtype)}
    part = part_rows(tokens, most)
    for first in range(0, tokens, part):
        rows = min(part, tokens - first)
        scores = allocate_scores(rows, most, q.device)
        ends = torch.empty(rows, dtype=torch.int32, device=q.device)
        grid = rows, programs_of_row(q.device, rows, -(-most // sizes["BN"]))
        launch(
            score_entries, grid, q, weights, entries, cache, block_table, slot_mapping, query_start, seq_lens,
            scores, ends, first, num_seqs, most, q.stride(0), q.stride(1), weights.stride(0),
            entries.stride(0), block_table.stride(0), scores.stride(0), RATE=rate, STEP=step, PAGE=page,
            **sizes,
        )  # fmt: skip
        choose_from(scores, ends, top_k, chosen[first : first + rows])
    return chosen


@triton.jit
def list_blocks(
    chosen, positions, out, K: tl.constexpr, KP: tl.constexpr, RATE: tl.constexpr, H: tl.constexpr
):
    """chosen: [T, K], then each token's open block -> out [T, H, K + 1]. Grid: (T,)."""
    await_previous()
    row, i = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    found = tl.load(chosen + row * K + i, mask=i < K, other=-1)
    position = tl.load(positions + row).to(tl.int32)
    own = tl.where((position + 1) % RATE != 0, position // RATE, -1)
    found = tl.where(i == tl.sum((found >= 0).to(tl.int32), 0), own, found)
    for h in range(H):
        tl.store(out + (row * H + h) * (K + 1) + i, found, mask=i <= K)


@triton.jit
def list_tokens(
    chosen, positions, out, K: tl.constexpr, KP: tl.constexpr, RATE: tl.constexpr, BN: tl.constexpr
):
    """The tokens of K windows and of the open one -> out [T, (K + 1) RATE - 1]. Grid: (T, blocks of BN)."""
    await_previous()
    row, k = tl.program_id(0).to(tl.int64), tl.arange(0, KP)
    found = tl.load(chosen + row * K + k, mask=k < K, other=-1)
    count = tl.sum((found >= 0).to(tl.int32), 0) * RATE
    i = tl.program_id(1) * BN + tl.arange(0, BN)
    window = tl.load(chosen + row * K + i // RATE, mask=i < count, other=0)
    seen = tl.load(positions + row).to(tl.int32) + 1
    own = seen // RATE * RATE + i - count
    token = tl.where(i < count, window * RATE + i % RATE, tl.where(own < seen, own, -1))
    size = (K + 1) * RATE - 1
    tl.store(out + row * size + i, token, mask=i < size)


def _list_sizes(count: int, rate: int) -> dict[str, int]:
    return {"K": count, "KP": triton.next_power_of_2(count + 1), "RATE": rate}


@add_open_block.variant(NAME, on="cuda")
def add_block(chosen: Tensor, positions: Tensor, rate: int, heads: int) -> Tensor:
    """`add_open_block`: the same arguments and result."""
    tokens, count = chosen.shape
    out = torch.empty(tokens, heads, count + 1, dtype=torch.int32, device=chosen.device)
    launch(list_blocks, (tokens,), chosen, positions, out, H=heads, **_list_sizes(count, rate))
    return out


@spread_windows.variant(NAME, on="cuda")
def spread(chosen: Tensor, positions: Tensor, rate: int) -> Tensor:
    """`spread_windows`: the same arguments and result."""
    (tokens, count), tile = chosen.shape, 512
    out = torch.empty(tokens, (count + 1) * rate - 1, dtype=torch.int32, device=chosen.device)
    grid = tokens, -(-out.shape[1] // tile)
    launch(list_tokens, grid, chosen, positions, out, BN=tile, **_list_sizes(count, rate))
    return out


POINTERS = {
    **dict.fromkeys(("q", "weights", "entries", "cache"), "bf16*"),
    **dict.fromkeys(("table", "slot_mapping", "query_start", "seq_lens", "positions"), "i64*"),
    **dict.fromkeys(("q_row", "q_head", "weight_row", "entry_row", "table_row", "score_row"), "i32!"),
    **dict.fromkeys(("ends", "chosen", "out"), "i32*"),
    "scores": "fp32*",
}
SHAPES = {"DeepSeek-V4": (64, 4), "Qwen4-Exp": (8, 128)}  # heads of 128 columns, tokens of an entry


@with_float16
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, and entries that are kept in another dtype."""
    float32 = POINTERS | dict.fromkeys(("q", "weights", "entries", "cache"), "fp32*")
    kept = {
        "": (torch.bfloat16, POINTERS),
        " over float32": (torch.bfloat16, POINTERS | {"cache": "fp32*"}),
        ", float32": (torch.float32, float32),
        ", float32 over bfloat16": (torch.float32, float32 | {"cache": "bf16*"}),
        " of float16 over bfloat16": (torch.float16, as_half(POINTERS) | {"cache": "bf16*"}),
    }
    for (suffix, (dtype, types)), (name, (heads, rate)) in product(kept.items(), SHAPES.items()):
        constants, more = split_options(_constants(heads, 128, dtype))
        for size in (1, 64) if types is POINTERS else (1,):
            sizes = constants | {"S": size, "RATE": rate, "STEP": 4, "PAGE": 64}
            words = f"score_entries, {name}{', prompts' if size > 1 else ''}{suffix}"
            demands = (("HMMA", "HGMMA"),) if dtype != torch.float32 else ()
            yield KernelForm(words, score_entries, types, sizes, demands=demands, **more)
    yield KernelForm("list_blocks", list_blocks, POINTERS, _list_sizes(16, 128) | {"H": 2})
    yield KernelForm("list_tokens", list_tokens, POINTERS, _list_sizes(512, 4) | {"BN": 512})
