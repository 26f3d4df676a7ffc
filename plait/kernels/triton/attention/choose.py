"""The largest numbers of each row, without a sort: which keys, entries or blocks a query attends to.

    scores  [rows, most] float32      what a kernel of the op wrote; of a row the first `ends` numbers count
    some    [rows, LISTED]            those that the search has not decided yet, once they are few
    chosen  [rows, top_k] int32       numbers of columns in rising order, then NONE

A row has one program. It searches for the threshold by the bits of float32, eight at a time: a histogram of
the next eight bits of all numbers that share the bits known so far. A row that has as many numbers left as it
needs is done. Of a long row only those numbers are searched that are near the threshold of a sample, which
one pass lists; should the threshold not be among them, all are. A last pass writes what is above it, and of
what equals it the first ones; where each goes follows from sums over all in front. Only integers are added,
so nothing depends on tiles.

`find_sequence` and `load_index_keys` are for the kernels that make scores: the sequence of
a row, and keys of a paged cache. A token's new key is not read from the cache, because another program of
the same launch may not have stored it yet.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.attention.attention import count_programs
from plait.kernels.triton.attention.layout import SEQS
from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, split_options
from plait.ops.launch import launch

MOST_SCORES = 1 << 26  # in memory at a time, with what is listed; rows with more are scored in parts
SHORT = 4096  # columns up to which a row has a small program
PROGRAMS = 4  # of scores, for each that the device holds: those of short rows end early
MANY: tl.constexpr = tl.constexpr(4)  # tiles up to which all numbers of a row are searched
STAGES: tl.constexpr = tl.constexpr(4)  # of a pass over a row: tiles that are copied ahead, and one
# LISTED: numbers of a row that a search lists at most.
LONG_TILE = {"TILE": 4096, "LISTED": 8192, "num_warps": 16}
SHORT_TILE = {"TILE": 1024, "LISTED": 1024, "num_warps": 4}


@triton.jit
def _order_bits(value):
    """Integers of which the bits, as unsigned ones, are in the order of floats: equal for both zeros, and the
    largest for what is no number."""
    bits = tl.where(value == 0, 0, value.to(tl.int32, bitcast=True))
    order = tl.where(bits < 0, ~bits, bits ^ -0x80000000)
    return tl.where(value != value, -1, order)


@triton.jit
def _load_order(line, own, listed, i, size):
    """`_order_bits` of numbers i, of a row or of what was listed of it; some behind `size`, too."""
    there = _round_up(i, size)
    if listed:
        order = tl.load(own + i, mask=there, other=0)
    else:
        order = _order_bits(tl.load(line + i, mask=there, other=0.0))
    return order


@triton.jit
def _round_up(i, size):
    """Whether there is memory for number i of so many: with this mask, loads are 16 bytes wide."""
    return i < (size + 15) // 16 * 16


@triton.jit
def _find_bin(value, low, high, rate):
    """Which of 256 equal steps from `low` to `high` numbers are in: the first or the last outside."""
    near = tl.minimum(tl.maximum(value, low), high) - low
    step = tl.where(value == value, near, high - low) * rate
    return tl.minimum(step, 255.0).to(tl.int32)


@triton.jit
def _list_likely(line, own, end, need, LISTED: tl.constexpr, TILE: tl.constexpr):
    """List the numbers of a long row that a sample of it leaves in doubt.

    Returns (whether the last of the `need` largest is among them, how many there are, how many are larger).
    """
    at = tl.arange(0, TILE)
    sample = tl.load(line + at * (end // TILE))
    finite = tl.abs(sample) < float("inf")
    low = tl.min(tl.where(finite, sample, 3e38), 0)
    high = tl.max(tl.where(finite, sample, low), 0)
    rate = tl.where(high > low, 255.0 / tl.where(high > low, high - low, 1.0), 0.0)
    behind = tl.cumsum(tl.histogram(_find_bin(sample, low, high, rate), 256), 0, reverse=True)
    share = need.to(tl.float32) * TILE / end.to(tl.float32)
    doubt = 4.0 * tl.sqrt(share) + 8.0
    first = tl.sum((behind >= tl.minimum(share + doubt, TILE).to(tl.int32)).to(tl.int32), 0) - 1
    last = tl.sum((behind > tl.maximum(share - doubt, 0.0).to(tl.int32)).to(tl.int32), 0) - 1
    filled, larger = tl.zeros([], tl.int32), tl.zeros([TILE], tl.int32)
    for t in tl.range(0, end, TILE, num_stages=STAGES):
        i = t + at
        value = tl.load(line + i, mask=_round_up(i, end), other=0.0)
        found = _find_bin(value, low, high, rate)
        kept = (i < end) & (found >= first) & (found <= last)
        larger += ((i < end) & (found > last)).to(tl.int32)
        to = filled + tl.cumsum(kept.to(tl.int32), 0) - 1
        tl.store(own + to, _order_bits(value), mask=kept & (to < LISTED))
        filled += tl.sum(kept.to(tl.int32), 0)
    tl.debug_barrier()  # threads read what others of this program wrote
    above = tl.sum(larger, 0)
    return (filled <= LISTED) & (above < need) & (need <= above + filled), filled, above


@triton.jit
def choose_best(
    scores, ends, chosen, some, score_row, top_k, LISTED: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """See the module. Grid: (rows,)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    end = tl.load(ends + row)
    line, own, out = scores + row * score_row, some + row * LISTED, chosen + row * top_k
    at, each = tl.arange(0, TILE), tl.arange(0, 256)
    need, left, size = tl.minimum(end, top_k), end, end
    prefix, known = tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    shift, listed = tl.full([], 24, tl.int32), end < 0
    if (left > need) & (end > MANY * TILE):
        listed, filled, above = _list_likely(line, own, end, need, LISTED, TILE)
        if listed:
            need, left, size = need - above, filled, filled
    is_part = listed  # so that others may share the bits, and all bits have to be known
    while ((left > need) | is_part) & (shift >= 0):
        counts = tl.zeros([256], tl.int32)
        for t in range(0, size, TILE):
            i = t + at
            order = _load_order(line, own, listed, i, size)
            counts += tl.histogram((order >> shift) & 255, 256, mask=(i < size) & ((order & known) == prefix))
        behind = tl.cumsum(counts, 0, reverse=True)
        digit = tl.sum((behind >= need).to(tl.int32), 0) - 1
        need -= tl.sum(tl.where(each > digit, counts, 0), 0)
        left = tl.sum(tl.where(each == digit, counts, 0), 0)
        prefix, known = prefix | (digit << shift), known | (tl.full([], 255, tl.int32) << shift)
        shift -= 8
        if (left > need) & (left <= LISTED) & (size > TILE) & (shift >= 0) & (not listed):
            filled = tl.zeros([], tl.int32)
            for t in range(0, size, TILE):
                i = t + at
                order = _load_order(line, own, listed, i, size)
                kept = (i < size) & ((order & known) == prefix)
                tl.store(own + filled + tl.cumsum(kept.to(tl.int32), 0) - 1, order, mask=kept)
                filled += tl.sum(kept.to(tl.int32), 0)
            tl.debug_barrier()  # threads read what others of this program wrote
            listed, size = end >= 0, left
    # Signed integers in the order of the unsigned ones; of those that equal the last, `need` are chosen.
    last, greater, equal = prefix ^ -0x80000000, tl.zeros([], tl.int32), tl.zeros([], tl.int32)
    for t in tl.range(0, end, TILE, num_stages=STAGES):
        i = t + at
        rank = _order_bits(tl.load(line + i, mask=_round_up(i, end), other=0.0)) ^ -0x80000000
        above, same = (i < end) & (rank > last), (i < end) & (rank == last)
        both = tl.cumsum(above.to(tl.int32) + (same.to(tl.int32) << 16), 0)
        ties = equal + (both >> 16)
        to = greater + (both & 0xFFFF) + tl.minimum(ties, need) - 1
        tl.store(out + to, i, mask=above | (same & (ties <= need)))
        greater += tl.sum(above.to(tl.int32), 0)
        equal += tl.sum(same.to(tl.int32), 0)
    for t in range(end, top_k, TILE):
        tl.store(out + t + at, tl.full([TILE], -1, tl.int32), mask=t + at < top_k)


def choose_from(scores: Tensor, ends: Tensor, top_k: int, out: Tensor | None = None) -> Tensor:
    """The columns of the `top_k` largest of each row, rising, then NONE; of equal ones the earlier is taken.

    scores: [rows, most] float32 from `allocate_scores`, ends: [rows] int32, how many of them a row has: no
    number behind matters -> [rows, top_k] int32, which is `out` if that is given: dense, of as many numbers.
    """
    rows, most = scores.shape
    chosen = torch.empty(rows, top_k, dtype=torch.int32, device=scores.device) if out is None else out
    tile = _find_tile(most)
    some = torch.empty(rows, tile["LISTED"], dtype=torch.int32, device=scores.device)
    launch(choose_best, (rows,), scores, ends, chosen, some, scores.stride(0), top_k, **tile)
    return chosen


def allocate_scores(rows: int, most: int, device: torch.device) -> Tensor:
    """[rows, most or some more] float32: a row is a multiple of 64 bytes."""
    return torch.empty(rows, -(-most // 16) * 16, device=device)


def _find_tile(most: int) -> dict[str, int]:
    return SHORT_TILE if most <= SHORT else LONG_TILE


@triton.jit
def find_sequence(query_start, row, num_seqs, S: tl.constexpr):
    """The sequence of a row: as many end in front of it. S: of `count_sequences`."""
    s = tl.arange(0, S)
    after = tl.load(query_start + 1 + tl.minimum(s, num_seqs - 1))
    behind = tl.sum(((s < num_seqs) & (after <= row)).to(tl.int32), 0)
    return tl.minimum(behind, num_seqs - 1)


def count_sequences(num_seqs: int) -> int:
    """The constant S of kernels for that many sequences."""
    return next((size for size in SEQS if num_seqs <= size), triton.next_power_of_2(num_seqs))


@triton.jit
def load_index_keys(
    cache, k, line, t, seen, past, first, k_row, d, D: tl.constexpr, PAGE: tl.constexpr, NEW: tl.constexpr,
    like,
):  # fmt: skip
    """Columns `d` of keys at positions `t` of a sequence, [positions, columns], in the dtype of `like`.

    line: the sequence's row of the block table; past: how many positions are in the cache, those behind being
    rows `first`.. of k, which get the cache's precision. NEW: whether some of `t` are among these.
    """
    d = d[None, :]
    old = seen & (t < past) if NEW else seen
    block = tl.load(line + t // PAGE, mask=old, other=0).to(tl.int64)
    at = (block * PAGE + t % PAGE)[:, None] * D + d
    keys = tl.load(cache + at, mask=old[:, None] & (d < D), other=0.0).to(like.dtype.element_ty)
    if NEW:
        fresh = seen & (t >= past)
        own = tl.load(
            k + (first + t - past).to(tl.int64)[:, None] * k_row + d, mask=fresh[:, None] & (d < D), other=0.0
        )
        keys = tl.where(fresh[:, None], as_kept(own, cache).to(like.dtype.element_ty), keys)
    return keys


@triton.jit
def as_kept(x, cache):
    """Numbers as a cache has them; bfloat16 by its bits, since the interpreter rounds it towards zero."""
    if cache.dtype.element_ty == tl.bfloat16 and x.dtype != tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        rounded = tl.where(x == x, (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16, 0x7FC0)
        y = rounded.to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(cache.dtype.element_ty)
    return y


def part_rows(rows: int, most: int) -> int:
    """How many of the rows are scored at a time, each having `most` scores."""
    return max(1, min(rows, MOST_SCORES // (most + _find_tile(most)["LISTED"])))


def programs_of_row(device: torch.device, rows: int, tiles: int) -> int:
    """How many programs score a row, or a tile of rows. It follows from sizes, and changes no score."""
    return max(1, min(tiles, -(-PROGRAMS * count_programs(device) // rows)))


def forms() -> Iterator[KernelForm]:
    """Rows of keys, and rows of blocks or entries."""
    types = {"scores": "fp32*", "ends": "i32*", "chosen": "i32*", "some": "i32*", "score_row": "i32!"}
    for name, tile in (("short rows", SHORT_TILE), ("long rows", LONG_TILE)):
        constants, fields = split_options(tile)
        yield KernelForm(f"choose_best, {name}", choose_best, types, constants, **fields)
