"""Which entries a token reads: scores of them in one launch, and the best of these in another.

    score_entries   token × programs   every P-th tile of the entries that the token sees, or of some blocks
    best_of_blocks  token × programs   a block's largest score, of which the best blocks are chosen
    choose_best     token              see `attention.choose`
    list_entries    token              numbers in blocks as those of entries

A tile is scored by itself, so a score depends on no grid. The same launch stores the entries of windows that
end in this step; tiles with some of them read these where they come from.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
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
from plait.ops.candidates import choose_among_blocks, choose_entry_blocks
from plait.ops.compressed import add_open_block, choose_entries, spread_windows
from plait.ops.launch import launch

NAME = "triton"
MOST_HEADS, FEW_HEADS = 64, 16  # of a tile; few in float32, which has no matrix units
ENTRIES, FEW_ENTRIES = 64, 16
MOST_COLUMNS = 256  # of queries, of which a tile has many heads
BEST_TILE = 1024  # scores of which a program takes the best of each block at a time
LIST_TILE = 512  # chosen entries of a program


@triton.jit(do_not_specialize=["first_row", "num_seqs", "most"])
def score_entries(
    q, weights, entries, cache, blocks, table, slot_mapping, query_start, seq_lens, scores, ends,
    first_row, num_seqs, most, q_row, q_head, weight_row, entry_row, table_row, score_row,
    S: tl.constexpr, H: tl.constexpr, HB: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    RATE: tl.constexpr, STEP: tl.constexpr, PAGE: tl.constexpr, BN: tl.constexpr, NEW: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCKSP: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """Σ_h weight_h · relu(q_h · entry). scores: [rows of this part, most] float32, ends: [rows of this part]
    int32, the entries that each sees. Grid: (rows of this part, P).

    NEW: `entries` of this step are stored; else the cache has them. BLOCKS: each row has scores of the
    entries of its own blocks alone, one behind the other: [T, BLOCKS], rising, then -1. Only the last may
    have fewer entries than SIZE.
    """
    await_previous()
    own, p = tl.program_id(0), tl.program_id(1)
    row = first_row + own
    seq, position = find_row(query_start, seq_lens, row, num_seqs, S)
    first = row if S == 1 else tl.load(query_start + seq).to(tl.int32)
    past, known = position - (row - first), tl.minimum((position + 1) // RATE, most)
    h, d, wide = tl.arange(0, HB), tl.arange(0, DP), row.to(tl.int64)
    count = known
    if BLOCKS:
        b = tl.arange(0, BLOCKSP)
        block = tl.load(blocks + wide * BLOCKS + b, mask=b < BLOCKS, other=-1)
        count = tl.sum(tl.where(block >= 0, tl.minimum(known - block * SIZE, SIZE), 0), 0)
    if p == 0:
        tl.store(ends + own, count)
    if NEW and p == 0:
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
    for i in range(p, (count + BN - 1) // BN, tl.num_programs(1)):
        n = (i + tl.zeros([], tl.int32)) * BN + tl.arange(0, BN)
        e = n
        if BLOCKS:
            e = tl.load(blocks + wide * BLOCKS + n // SIZE, mask=n < count, other=0) * SIZE + n % SIZE
        t = (e + 1) * RATE - 1
        old, r = n < count, t // STEP
        if NEW:
            old = old & (t < past)
        place = tl.load(line + r // (PAGE // STEP), mask=old, other=0).to(tl.int64)
        at = (place * (PAGE // STEP) + r % (PAGE // STEP)) * D
        kept = tl.load(cache + at[:, None] + d[None, :], mask=old[:, None] & (d < D)[None, :], other=0.0)
        kept = kept.to(heads.dtype)
        if NEW:
            new = (n < count) & (t >= past)
            at = (first + t - past).to(tl.int64) * entry_row
            made = tl.load(
                entries + at[:, None] + d[None, :], mask=new[:, None] & (d < D)[None, :], other=0.0
            )
            kept = tl.where(new[:, None], _as_entry(made, cache).to(heads.dtype), kept)
        keys = tl.trans(kept)
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
        tl.store(out + n, total, mask=n < count)


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


@dataclass(frozen=True, slots=True)
class EntryScores:
    """Scores of the entries that rows of a step see: of all, or of those in `blocks` [T, n], of `size` each.

    `entries`: new ones, which are stored; None: the cache has them. `seqs`: query_start, seq_lens.
    """

    q: Tensor
    weights: Tensor
    entries: Tensor | None
    cache: Tensor
    table: Tensor
    slot_mapping: Tensor
    seqs: tuple[Tensor, Tensor]
    rate: int
    step: int
    blocks: Tensor | None = None
    size: int = 1

    def parts(self) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(first row, scores, how many each row has) of parts of the step."""
        (tokens, heads, dim), num_seqs, cache = self.q.shape, len(self.seqs[1]), self.cache
        q, weights = pack_rows(self.q), pack_rows(self.weights)
        entries = q if self.entries is None else pack_rows(self.entries)
        page, count = cache.shape[1] * self.step, 0 if self.blocks is None else self.blocks.shape[1]
        most = max(1, self.table.shape[1] * page // self.rate)
        wide = count * self.size or most  # columns of scores
        sizes = {"S": row_size(tokens, num_seqs), **_constants(heads, dim, q.dtype)}
        sizes |= _block_sizes(count, self.size) | {"NEW": self.entries is not None}
        part = part_rows(tokens, wide)
        for first in range(0, tokens, part):
            rows = min(part, tokens - first)
            scores = allocate_scores(rows, wide, q.device)
            ends = torch.empty(rows, dtype=torch.int32, device=q.device)
            grid = rows, programs_of_row(q.device, rows, -(-wide // sizes["BN"]))
            launch(
                score_entries, grid, q, weights, entries, cache, ends if self.blocks is None else self.blocks,
                self.table, self.slot_mapping, *self.seqs, scores, ends, first, num_seqs, most, q.stride(0),
                q.stride(1), weights.stride(0), entries.stride(0), self.table.stride(0), scores.stride(0),
                RATE=self.rate, STEP=self.step, PAGE=page, **sizes,
            )  # fmt: skip
            yield first, scores, ends


def _block_sizes(count: int, size: int) -> dict[str, int]:
    return {"BLOCKS": count, "BLOCKSP": triton.next_power_of_2(max(count, 1)), "SIZE": size}


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
    chosen = torch.empty(len(q), top_k, dtype=torch.int32, device=q.device)
    seqs = query_start, seq_lens
    made = EntryScores(q, weights, entries, cache, block_table, slot_mapping, seqs, rate, step)
    for first, scores, ends in made.parts():
        choose_from(scores, ends, top_k, chosen[first : first + len(ends)])
    return chosen


@triton.jit
def best_of_blocks(
    scores, ends, out, out_ends, score_row, out_row, SIZE: tl.constexpr, SIZEP: tl.constexpr, BB: tl.constexpr
):  # fmt: skip
    """The largest score of each block of SIZE, infinite for the newest entry's. Grid: (rows, programs)."""
    await_previous()
    row, p = tl.program_id(0).to(tl.int64), tl.program_id(1)
    count = tl.load(ends + row)
    blocks, i = (count + SIZE - 1) // SIZE, tl.arange(0, SIZEP)[None, :]
    if p == 0:
        tl.store(out_ends + row, blocks)
    for tile in range(p, (blocks + BB - 1) // BB, tl.num_programs(1)):
        b = (tile + tl.zeros([], tl.int32)) * BB + tl.arange(0, BB)
        at = b[:, None] * SIZE + i
        seen = (i < SIZE) & (at < count)
        best = tl.max(tl.load(scores + row * score_row + at, mask=seen, other=-float("inf")), 1)
        best = tl.where(b == blocks - 1, float("inf"), best)
        tl.store(out + row * out_row + b, best, mask=b < blocks)


@triton.jit
def list_entries(
    blocks, chosen, N: tl.constexpr, SIZE: tl.constexpr, K: tl.constexpr, BK: tl.constexpr
):  # fmt: skip
    """Numbers in blocks [T, N] of SIZE as numbers of entries, in place: chosen [T, K]. Grid: (T, tiles)."""
    await_previous()
    row, k = tl.program_id(0).to(tl.int64), tl.program_id(1) * BK + tl.arange(0, BK)
    n = tl.load(chosen + row * K + k, mask=k < K, other=-1)
    block = tl.load(blocks + row * N + n // SIZE, mask=n >= 0, other=0)
    tl.store(chosen + row * K + k, tl.where(n < 0, -1, block * SIZE + n % SIZE), mask=k < K)


@choose_entry_blocks.variant(NAME, on="cuda")
def choose_block_rows(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    top_k: int,
    size: int,
    rate: int,
    step: int,
) -> Tensor:
    """`choose_entry_blocks`: the same arguments and result."""
    chosen = torch.empty(len(q), top_k, dtype=torch.int32, device=q.device)
    seqs = query_start, seq_lens
    made = EntryScores(q, weights, None, cache, block_table, seq_lens, seqs, rate, step)
    for first, scores, ends in made.parts():
        rows, most = len(ends), -(-scores.shape[1] // size)
        best, counts = allocate_scores(rows, most, q.device), torch.empty_like(ends)
        sizes = _best_sizes(size)
        grid = rows, programs_of_row(q.device, rows, -(-most // sizes["BB"]))
        launch(
            best_of_blocks, grid, scores, ends, best, counts, scores.stride(0), best.stride(0), **sizes
        )  # fmt: skip
        choose_from(best, counts, top_k, chosen[first : first + rows])
    return chosen


def _best_sizes(size: int) -> dict[str, int]:
    wide = triton.next_power_of_2(size)
    return {"SIZE": size, "SIZEP": wide, "BB": max(1, BEST_TILE // wide), "num_warps": 4}


@choose_among_blocks.variant(NAME, on="cuda")
def choose_among(
    q: Tensor,
    weights: Tensor,
    cache: Tensor,
    block_table: Tensor,
    query_start: Tensor,
    seq_lens: Tensor,
    blocks: Tensor,
    top_k: int,
    size: int,
    rate: int,
    step: int,
) -> Tensor:
    """`choose_among_blocks`: the same arguments and result."""
    tokens, count = blocks.shape
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=q.device)
    seqs = query_start, seq_lens
    made = EntryScores(q, weights, None, cache, block_table, seq_lens, seqs, rate, step, blocks, size)
    for first, scores, ends in made.parts():
        choose_from(scores, ends, top_k, chosen[first : first + len(ends)])
    if tokens:
        launch(
            list_entries, (tokens, -(-top_k // LIST_TILE)), blocks, chosen, **_entry_sizes(count, size, top_k)
        )
    return chosen


def _entry_sizes(count: int, size: int, top_k: int) -> dict[str, int]:
    return {"N": count, "SIZE": size, "K": top_k, "BK": LIST_TILE}


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
    **dict.fromkeys(("ends", "chosen", "out", "blocks", "out_ends"), "i32*"),
    "out_row": "i32!",
    "scores": "fp32*",
}
SHAPES = {  # heads of 128 columns, tokens of an entry, blocks of which it is, entries of one
    "DeepSeek-V4": (64, 4, 0, 1),
    "Qwen4-Exp": (8, 128, 0, 1),
    "DeepSeek-V4.1": (32, 1, 0, 1),
    "DeepSeek-V4.1, blocks": (32, 1, 2048, 8),
}


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
    for (suffix, (dtype, types)), (name, shape) in product(kept.items(), SHAPES.items()):
        heads, rate, count, size_of_block = shape
        constants, more = split_options(_constants(heads, 128, dtype))
        constants |= _block_sizes(count, size_of_block) | {"NEW": not count}
        for size in (1, 64) if types is POINTERS else (1,):
            sizes = constants | {"S": size, "RATE": rate, "STEP": min(rate, 4), "PAGE": 64}
            words = f"score_entries, {name}{', prompts' if size > 1 else ''}{suffix}"
            demands = (("HMMA", "HGMMA"),) if dtype != torch.float32 else ()
            yield KernelForm(words, score_entries, types, sizes, demands=demands, **more)
    yield KernelForm("list_blocks", list_blocks, POINTERS, _list_sizes(16, 128) | {"H": 2})
    best = POINTERS | {"out": "fp32*"}
    constants, more = split_options(_best_sizes(8))
    yield KernelForm("best_of_blocks", best_of_blocks, best, constants, **more)
    yield KernelForm("list_entries", list_entries, POINTERS, _entry_sizes(2048, 8, 2048))
    yield KernelForm("list_tokens", list_tokens, POINTERS, _list_sizes(512, 4) | {"BN": 512})
