"""Scores of index keys over paged memory, and the choice by them: `choose_keys` and `choose_blocks`.

    score_keys     a program has one row, all its heads, and every P-th tile of its sequence's keys
    score_blocks   some (row, head) pairs, and every P-th tile of blocks: the largest score of each block
    choose_best    one program for each row, or (row, head): see `choose`

Each tile of keys is scored by itself, so a score depends on no grid. Keys are read from their pages up to the
last that a row sees, and scores are all that is written: [rows, keys] float32, in parts of rows of
`MOST_SCORES` at most. The same launch stores the new keys; tiles with some of them read these where they come
from (`choose.load_index_keys`).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.choose import (
    allocate_scores,
    as_kept,
    choose_from,
    count_sequences,
    find_sequence,
    load_index_keys,
    part_rows,
    programs_of_row,
)
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, as_half, with_float16
from plait.kernels.triton.row_views import pack_rows
from plait.ops.block_sparse import choose_blocks
from plait.ops.entry import CODED
from plait.ops.indexer import choose_keys
from plait.ops.launch import launch
from plait.ops.registry import OpFacts

NAME = "triton"
KEYS = 64  # of a tile
MOST_HEADS, MOST_COLUMNS = 64, 256  # of queries that a program keeps
WIDE_KEYS, COLUMNS = 32, 32  # of float32, which has no matrix units: keys of a tile, columns at a time
WARPS, STAGES = 4, 2
BLOCK_REGISTERS = 255  # of a thread: left to itself, ptxas spills to have one block more on a processor
PAIRS = 16  # (row, head) pairs of a tile, which matrix units have at least


@triton.jit
def _store_key(
    k, cache, slot_mapping, row, k_row, there, D: tl.constexpr, DP: tl.constexpr
):  # fmt: skip
    """A token's new key into its slot."""
    d = tl.arange(0, DP)
    slot = tl.load(slot_mapping + row, mask=there, other=0).to(tl.int64)
    own = tl.load(k + row * k_row + d, mask=(d < D) & there, other=0.0)
    tl.store(cache + slot * D + d, as_kept(own, cache), mask=(d < D) & there)


@triton.jit
def _multiply_parts(
    q, at, there, cache, k, line, t, seen, past, first, k_row,
    D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr, DB: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """q · k of queries at `at`, [BM, BN], by DB columns at a time: without matrix units, whole ones take too
    many registers."""
    scores = tl.zeros([BM, BN], tl.float32)
    for start in range(0, DP, DB):
        d = start + tl.arange(0, DB)
        some = tl.load(q + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
        keys = load_index_keys(cache, k, line, t, seen, past, first, k_row, d, D, PAGE, NEW, q)
        scores = tl.dot(some, tl.trans(keys), scores, input_precision="ieee")
    return scores


@triton.jit
def _score_tile(
    own_q, own_weights, q, at, weights, cache, k, line, t, end, past, first, k_row, q_head,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
    HB: tl.constexpr, DB: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """Σ_h weight_h · relu(q_h · k) of keys `t`: of all heads at once (DB = DP), or of HB at a time."""
    seen = t < end
    if DB == DP:
        keys = load_index_keys(cache, k, line, t, seen, past, first, k_row, tl.arange(0, DP), D, PAGE, NEW, q)
        scores = tl.dot(own_q, tl.trans(keys), input_precision="ieee")
        total = tl.sum(tl.maximum(scores, 0.0) * own_weights[:, None], 0)
    else:
        total = tl.zeros([BN], tl.float32)
        for some in range(0, H, HB):
            h = some + tl.arange(0, HB)
            scores = _multiply_parts(
                q, at + h * q_head, h < H, cache, k, line, t, seen, past, first, k_row,
                D, DP, PAGE, NEW, DB, HB, BN,
            )  # fmt: skip
            weight = tl.load(weights + h, mask=h < H, other=0.0).to(tl.float32)
            total += tl.sum(tl.maximum(scores, 0.0) * weight[:, None], 0)
    return total


@triton.jit(do_not_specialize=["first_row", "num_seqs", "most"])
def score_keys(
    q, weights, k, cache, table, slot_mapping, query_start, seq_lens, scores, ends,
    first_row, num_seqs, most, q_row, q_head, weight_row, k_row, table_row, score_row,
    S: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    DB: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """scores: [rows of this part, most] float32, ends: [rows of this part] int32, the keys that each sees.
    Grid: (rows of this part, P)."""
    await_previous()
    own, p, programs = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    row = first_row + own
    seq = find_sequence(query_start, row, num_seqs, S)
    first, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
    length = tl.load(seq_lens + seq)
    past = (length - (stop - first)).to(tl.int32)
    end = tl.minimum(tl.where(row < stop, past + (row - first).to(tl.int32) + 1, 0), most)
    n = tl.arange(0, BN)
    if p == 0:
        tl.store(ends + own, tl.maximum(end, 0))
        _store_key(k, cache, slot_mapping, row, k_row, row < stop, D, DP)
    at, own_weights = row * q_row, weights + row * weight_row
    own_q, weight = 0.0, 0.0
    if DB == DP:
        h, d = tl.arange(0, HB), tl.arange(0, DP)
        there = (h < H)[:, None] & (d < D)[None, :]
        own_q = tl.load(q + at + h[:, None] * q_head + d[None, :], mask=there, other=0.0)
        weight = tl.load(own_weights + h, mask=h < H, other=0.0).to(tl.float32)
    line, to = table + seq.to(tl.int64) * table_row, scores + own * score_row
    tiles = (end + BN - 1) // BN
    old = tl.minimum(tl.maximum(past, 0) // BN, tiles)  # tiles in front of all new keys
    for i in range(p, old, programs):
        t = (i + tl.zeros([], tl.int32)) * BN + n
        found = _score_tile(
            own_q, weight, q, at, own_weights, cache, k, line, t, end, past, first, k_row, q_head,
            H, D, DP, PAGE, False, HB, DB, BN,
        )  # fmt: skip
        tl.store(to + t, found, mask=t < end)
    for i in range(_next_of(p, programs, old), tiles, programs):
        # 32 bits hold the tokens of a sequence
        t = (i + tl.zeros([], tl.int32)) * BN + n
        found = _score_tile(
            own_q, weight, q, at, own_weights, cache, k, line, t, end, past, first, k_row, q_head,
            H, D, DP, PAGE, True, HB, DB, BN,
        )  # fmt: skip
        tl.store(to + t, found, mask=t < end)


@triton.jit
def _next_of(p, step, least):
    """The first of p, p + step, p + 2 step… that is not below `least`."""
    return p + (tl.maximum(least - p, 0) + step - 1) // step * step


@triton.jit
def _score_block_tile(
    own_q, q, at, there, position, own, scores, pair, mine, local, score_row,
    cache, k, line, i, end, past, first, k_row,
    D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr, PAGE: tl.constexpr, SIZE: tl.constexpr,
    EACH: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr, NEW: tl.constexpr,
):  # fmt: skip
    """Store the largest q · k up to `position` of blocks NB · i…, and infinity for the last `local` ones.

    A tile has EACH keys of each block, and the next ones come in the next pass.
    """
    best = tl.full([BM, NB], -float("inf"), tl.float32)
    n = tl.arange(0, NB * EACH)
    for start in range(0, SIZE, EACH):
        within = start + n % EACH
        # 32 bits hold the tokens of a sequence
        t = (i * NB + n // EACH) * SIZE + within
        seen = (within < SIZE) & (t < end)
        if DB == DP:
            d = tl.arange(0, DP)
            keys = load_index_keys(cache, k, line, t, seen, past, first, k_row, d, D, PAGE, NEW, q)
            found = tl.dot(own_q, tl.trans(keys), input_precision="ieee")
        else:
            found = _multiply_parts(
                q, at, there, cache, k, line, t, seen, past, first, k_row,
                D, DP, PAGE, NEW, DB, BM, NB * EACH,
            )  # fmt: skip
        found = tl.where(seen[None, :] & (t[None, :] <= position[:, None]), found, -float("inf"))
        best = tl.maximum(best, tl.max(tl.reshape(found, [BM, NB, EACH]), 2))
    block = (i * NB + tl.arange(0, NB))[None, :]
    best = tl.where((block <= own[:, None]) & (block > own[:, None] - local), float("inf"), best)
    to = scores + pair[:, None] * score_row + block
    tl.store(to, best, mask=mine[:, None] & (block <= own[:, None]))


@triton.jit(do_not_specialize=["first_row", "end_row", "num_seqs", "most", "local"])
def score_blocks(
    q, k, cache, table, slot_mapping, query_start, seq_lens, scores, ends,
    first_row, end_row, num_seqs, most, local, q_row, q_head, k_row, table_row, score_row,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DB: tl.constexpr,
    PAGE: tl.constexpr, SIZE: tl.constexpr, EACH: tl.constexpr, NB: tl.constexpr, BM: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """scores: [rows of this part, H, most] float32, of blocks; ends: [rows of this part, H] int32.
    Grid: (tiles of ROWS rows, P)."""
    await_previous()
    p, programs = tl.program_id(1), tl.num_programs(1)
    tile_row = first_row + tl.program_id(0).to(tl.int64) * ROWS
    m = tl.arange(0, BM)
    row, head = tile_row + m // H, m % H
    there = (m // H < ROWS) & (row < end_row)
    at, own_q = row * q_row + head * q_head, 0.0
    if DB == DP:
        d = tl.arange(0, DP)
        own_q = tl.load(q + at[:, None] + d[None, :], mask=there[:, None] & (d < D)[None, :], other=0.0)
    pair = (row - first_row) * H + head
    if p == 0:
        for r in range(ROWS):
            new = tile_row + r
            _store_key(k, cache, slot_mapping, new, k_row, new < end_row, D, DP)
    last = tl.minimum(tile_row + ROWS, end_row) - 1
    for s in range(
        find_sequence(query_start, tile_row, num_seqs, S), find_sequence(query_start, last, num_seqs, S) + 1
    ):
        seq = s + tl.zeros([], tl.int64)
        first, stop = tl.load(query_start + seq), tl.load(query_start + seq + 1)
        past = (tl.load(seq_lens + seq) - (stop - first)).to(tl.int32)
        mine = there & (row >= first) & (row < stop)
        position = tl.where(mine, past + (row - first).to(tl.int32), -1)
        position = tl.where(position < most * SIZE, position, most * SIZE - 1)
        end = tl.max(position, 0) + 1
        own = tl.where(position < 0, -1, position // SIZE)
        if p == 0:
            tl.store(ends + pair, own + 1, mask=mine)
        line = table + seq * table_row
        tiles = ((end + SIZE - 1) // SIZE + NB - 1) // NB
        old = tl.minimum(tl.maximum(past, 0) // (NB * SIZE), tiles)  # tiles in front of all new keys
        for j in range(p, old, programs):
            _score_block_tile(
                own_q, q, at, there, position, own, scores, pair, mine, local, score_row,
                cache, k, line, j + tl.zeros([], tl.int32), end, past, first, k_row,
                D, DP, DB, PAGE, SIZE, EACH, NB, BM, False,
            )  # fmt: skip
        for j in range(_next_of(p, programs, old), tiles, programs):
            _score_block_tile(
                own_q, q, at, there, position, own, scores, pair, mine, local, score_row,
                cache, k, line, j + tl.zeros([], tl.int32), end, past, first, k_row,
                D, DP, DB, PAGE, SIZE, EACH, NB, BM, True,
            )  # fmt: skip


def _columns(dim: int, is_whole: bool) -> dict[str, int]:
    """A key's columns: all at once, or in parts."""
    wide = max(16, triton.next_power_of_2(dim))
    return {"D": dim, "DP": wide, "DB": wide if is_whole or wide <= COLUMNS else COLUMNS}


def _key_sizes(heads: int, dim: int, page: int, dtype: torch.dtype) -> dict[str, int]:
    """The constants of `score_keys`, for any number of sequences."""
    padded = max(16, triton.next_power_of_2(heads))
    is_whole = dtype != torch.float32 and padded <= MOST_HEADS and dim <= MOST_COLUMNS
    sizes = _columns(dim, is_whole)
    few = padded if is_whole or sizes["DB"] == sizes["DP"] else 16
    return {**sizes, "H": heads, "HB": few, "PAGE": page, "BN": KEYS if is_whole else WIDE_KEYS}


def _block_sizes(heads: int, dim: int, page: int, size: int, dtype: torch.dtype) -> dict[str, int]:
    """Those of `score_blocks`, but for ROWS."""
    is_whole = dtype != torch.float32 and dim <= MOST_COLUMNS
    keys = KEYS if is_whole else WIDE_KEYS
    each = min(triton.next_power_of_2(size), keys)
    tile = {"SIZE": size, "EACH": each, "NB": keys // each, "BM": max(PAIRS, triton.next_power_of_2(heads))}
    return {**_columns(dim, is_whole), "H": heads, "PAGE": page, **tile}


def why_coded(facts: OpFacts) -> str | None:
    """The `when` of kernels that read no codes: what they keep is bfloat16 if others are codes."""
    kept = facts.sizes.get("kv_dtype")
    return f"it keeps float32 or bfloat16, not {kept}" if kept in CODED else None


@choose_keys.variant(NAME, on="cuda")
def choose_best_keys(
    q: Tensor,
    weights: Tensor,
    k: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
) -> Tensor:
    """`choose_keys`: the same arguments and result."""
    (total, heads, dim), num_seqs = q.shape, len(seq_lens)
    q, weights, k = pack_rows(q), pack_rows(weights), pack_rows(k)
    page, most = cache.shape[1], block_table.shape[1] * cache.shape[1]
    chosen = torch.empty(total, top_k, dtype=torch.int32, device=q.device)
    sizes = {"S": count_sequences(num_seqs), **_key_sizes(heads, dim, page, q.dtype)}
    part = part_rows(total, most)
    for first in range(0, total, part):
        rows = min(part, total - first)
        scores, ends = _allocate(rows, most, q.device)
        grid = rows, programs_of_row(q.device, rows, -(-most // sizes["BN"]))
        launch(
            score_keys, grid, q, weights, k, cache, block_table, slot_mapping, query_start, seq_lens, scores,
            ends, first, num_seqs, most, q.stride(0), q.stride(1), weights.stride(0), k.stride(0),
            block_table.stride(0), scores.stride(0), **sizes, num_warps=WARPS,
            num_stages=STAGES,
        )  # fmt: skip
        choose_from(scores, ends, top_k, chosen[first : first + rows])
    return chosen


@choose_blocks.variant(NAME, on="cuda", when=why_coded)
def choose_best_blocks(
    q: Tensor,
    k: Tensor,
    cache: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    size: int,
    top_k: int,
    local: int,
) -> Tensor:
    """`choose_blocks`: the same arguments and result."""
    (total, heads, dim), num_seqs = q.shape, len(seq_lens)
    q, k = pack_rows(q), pack_rows(k)
    page, most = cache.shape[1], -(-block_table.shape[1] * cache.shape[1] // size)
    chosen = torch.empty(total, heads, top_k, dtype=torch.int32, device=q.device)
    sizes = {"S": count_sequences(num_seqs), **_block_sizes(heads, dim, page, size, q.dtype)}
    # A step of decodes has a row of each sequence: tiles of several would walk these one by one.
    sizes["ROWS"] = each = 1 if total == num_seqs else sizes["BM"] // heads
    part = max(1, part_rows(total * heads, most) // heads)
    for first in range(0, total, part):
        rows = min(part, total - first)
        scores, ends = _allocate(rows * heads, most, q.device)
        tiles = -(-rows // each)
        grid = tiles, programs_of_row(q.device, tiles, -(-most // sizes["NB"]))
        launch(
            score_blocks, grid, q, k, cache, block_table, slot_mapping, query_start, seq_lens, scores, ends,
            first, first + rows, num_seqs, most, local, q.stride(0), q.stride(1), k.stride(0),
            block_table.stride(0), scores.stride(0), **sizes, num_warps=WARPS,
            num_stages=STAGES, maxnreg=BLOCK_REGISTERS,
        )  # fmt: skip
        choose_from(scores, ends, top_k, chosen[first : first + rows])
    return chosen


def _allocate(rows: int, most: int, device: torch.device) -> tuple[Tensor, Tensor]:
    return allocate_scores(rows, most, device), torch.empty(rows, dtype=torch.int32, device=device)


POINTERS = {
    **dict.fromkeys(("q", "weights", "k", "cache"), "bf16*"),
    **dict.fromkeys(("table", "slot_mapping", "query_start", "seq_lens"), "i64*"),
    **dict.fromkeys(("q_row", "q_head", "weight_row", "k_row", "table_row", "score_row"), "i32!"),
    "scores": "fp32*",
    "ends": "i32*",
}
HEADS = {"DeepSeek-V3.2, 64 heads": 64, "GLM-5, 32 heads": 32, "A.X K2, 16 heads": 16}  # of 128 columns


@with_float16
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, and caches of another dtype."""
    float32 = POINTERS | dict.fromkeys(("q", "weights", "k", "cache"), "fp32*")
    kept = {
        "": (torch.bfloat16, POINTERS),
        " over float32": (torch.bfloat16, POINTERS | {"cache": "fp32*"}),
        ", float32": (torch.float32, float32),
        ", float32 over bfloat16": (torch.float32, float32 | {"cache": "bf16*"}),
        " of float16 over bfloat16": (torch.float16, as_half(POINTERS) | {"cache": "bf16*"}),
    }
    for suffix, (dtype, types) in kept.items():
        demands = (("HMMA", "HGMMA"),) if dtype != torch.float32 else ()
        for name, heads in HEADS.items():
            sizes = {"S": 64, **_key_sizes(heads, 128, 64, dtype)}
            yield KernelForm(
                f"score_keys, {name}{suffix}", score_keys, types, sizes, WARPS, STAGES, demands=demands
            )  # fmt: skip
        for rows in (1, 4):
            sizes = {"S": 64, **_block_sizes(4, 128, 64, 128, dtype), "ROWS": rows}
            name = f"score_blocks, MiniMax-M3, {rows} rows{suffix}"
            yield KernelForm(
                name, score_blocks, types, sizes, WARPS, STAGES, demands=demands,
                options={"maxnreg": BLOCK_REGISTERS},
            )  # fmt: skip
