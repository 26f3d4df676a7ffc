"""Choosing tokens on a GPU: the largest logit, and the CPU's draw from the same (seed, position).

Nothing is sorted, and nothing depends on the order of sums: weights are whole numbers, 2^44 for the largest,
so their sums are exact in 64 bits on any grid. A draw is four launches over parts of the vocabulary:

1. `find_tops` finds the largest logit of each part. A logit and its id are one integer, of which the maximum
   has the lowest id among equal logits. A NaN is above all.
2. `weigh_parts` sums softmax weights, and counts those in each level (a factor of 2^0.75).
3. `list_candidates` lists the tokens that can decide the draw, by id. What is under the last level is outside
   of top-k or min-p, or weighs less in all than what top-p or the drawn point leaves.
4. `draw_tokens` has one program a row. The list in falling order reaches a count or a mass at some rank,
   which a search over the bits of logits finds: for top-k, for top-p, and for the drawn point. Tokens of
   equal logits count in the order of their ids.

Weights are computed in float64 and rounded to 2^-44 of the largest. `EXACT` makes them the same in each
launch: a list has the tokens that were counted for it. A draw is another one than the CPU's only where the
drawn point, or an end of top-p or min-p, is within 1e-8 of the mass of an edge between two tokens.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.ops.sample import largest, sample_at

NAME = "triton"
PART = 4096  # tokens of a program
FEW_ROWS, SMALL_PART = 8, 2048  # so many rows keep a device busy only in smaller parts
TILE = 1024  # tokens of a program at a time
LEVELS = 64  # of weights; the last one has the weights that are 0
MOST = 1 << 18  # tokens of a vocabulary: sums of weights have 62 bits
LISTED = 2048  # candidates of a row that there is always memory for
LIST_NBYTES = 64 << 20  # of all lists; a row with more candidates is read as it is
ENTRY_NBYTES = 16
WAYS = 4  # thresholds that a pass of `draw_tokens` tries at once
LIST_WARPS = 8
DRAW = {"num_warps": 8, "maxnreg": 128}  # left to itself, ptxas spills
EXACT = {"enable_fp_fusion": False}  # a compiler may not choose where products and sums are one instruction


@triton.jit
def _rank(value):
    """Integers in the order of floats: equal for both zeros, and a NaN above all."""
    bits = tl.where(value == 0, 0, value.to(tl.int32, bitcast=True))
    rank = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(value != value, 0x7FFFFFFF, rank)


@triton.jit
def _pack(value, token):
    """A logit and its id in one integer, of which the largest has the lowest id among equal logits."""
    return (_rank(value).to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _top_of(tops, row, parts, PARTS: tl.constexpr):
    """The id of a row's largest logit."""
    at = tl.arange(0, PARTS)
    found = tl.load(tops + row.to(tl.int64) * parts + at, mask=at < parts, other=-0x8000000000000000)
    return 0x7FFFFFFF - (tl.max(found, 0) & 0xFFFFFFFF).to(tl.int32)


@triton.jit
def _mix(x):
    """The finalizer of SplitMix64, see `plait.ops.seed`."""
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(seed, position):
    """The random number of one token: 53 bits in [0, 1), float64."""
    stream = _mix(seed.to(tl.uint64) + 0x9E3779B97F4A7C15)
    bits = _mix(stream + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _is_drawn(top, heat):
    """Whether a row is not left to its largest logit: it has a temperature, and is not broken."""
    return (heat > 0) & (tl.abs(top) < float("inf"))


@triton.jit
def _double(number: tl.constexpr):
    """A constant in float64. Triton 3.7 rounds one to float32 where it is an argument, as of tl.fma."""
    return tl.full([], number, tl.float64)


@triton.jit
def _rate(temperature):
    """Octaves of weight for a unit of logits; finite, so that equal logits are 0 octaves apart."""
    return tl.minimum(1.4426950408889634 / temperature, 1e300)


@triton.jit
def _weigh(value, top, rate):
    """(weight as a whole number, 2^44 for the largest; its level): 2^y by Taylor's series in float64."""
    y = (value.to(tl.float64) - top.to(tl.float64)) * rate
    y = tl.maximum(y, -64.0)
    whole = tl.floor(y)
    r = (y - whole - 0.5) * 0.6931471805599453
    p = tl.fma(r, _double(2.505210838544172e-08), _double(2.755731922398589e-07))
    p = tl.fma(p, r, _double(2.7557319223985893e-06))
    p = tl.fma(p, r, _double(2.48015873015873e-05))
    p = tl.fma(p, r, _double(0.0001984126984126984))
    p = tl.fma(p, r, _double(0.001388888888888889))
    p = tl.fma(p, r, _double(0.008333333333333333))
    p = tl.fma(p, r, _double(0.041666666666666664))
    p = tl.fma(p, r, _double(0.16666666666666666))
    p = tl.fma(p, r, _double(0.5))
    p = tl.fma(p, r, _double(1.0))
    p = tl.fma(p, r, _double(1.0)) * 1.4142135623730951
    unit = ((whole.to(tl.int32) + 1067).to(tl.int64) << 52).to(tl.float64, bitcast=True)  # 2^(whole + 44)
    weight = (p * unit + 0.5).to(tl.int64)
    level = (tl.minimum(-y, 64.0).to(tl.float32) * 1.3333333333333333).to(tl.int32)
    level = tl.minimum(tl.maximum(level, 0), 62)
    return weight, tl.where(weight > 0, level, 63)


@triton.jit
def find_tops(logits, tops, row_stride, vocab, PART: tl.constexpr):
    """logits: [L, vocab] -> tops [L, parts] int64, packed. Grid: (L, parts)."""
    await_previous()
    row, part = tl.program_id(0), tl.program_id(1)
    token = part * PART + tl.arange(0, PART)
    value = tl.load(logits + row.to(tl.int64) * row_stride + token, mask=token < vocab, other=0.0)
    packed = tl.where(token < vocab, _pack(value.to(tl.float32), token), -0x8000000000000000)
    tl.store(tops + row.to(tl.int64) * tl.num_programs(1) + part, tl.max(packed, 0))


@triton.jit
def take_tops(logits, tops, ids, values, row_stride, parts, PARTS: tl.constexpr):
    """-> ids [L] int64, values [L]. Grid: (L,)."""
    await_previous()
    row = tl.program_id(0)
    top = _top_of(tops, row, parts, PARTS)
    tl.store(ids + row, top.to(tl.int64))
    tl.store(values + row, tl.load(logits + row.to(tl.int64) * row_stride + top))


@triton.jit
def weigh_parts(
    logits, tops, temperature, masses, counts, row_stride, vocab, parts,
    PARTS: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """-> masses [L, parts] int64, counts [L, parts, LEVELS] int32. Grid: (L, parts)."""
    await_previous()
    row, part = tl.program_id(0), tl.program_id(1)
    line = logits + row.to(tl.int64) * row_stride
    top, heat = tl.load(line + _top_of(tops, row, parts, PARTS)).to(tl.float32), tl.load(temperature + row)
    if _is_drawn(top, heat):
        rate = _rate(heat)
        mass, count = tl.zeros([TILE], tl.int64), tl.zeros([LEVELS], tl.int32)
        for at in range(0, PART, TILE):
            token = part * PART + at + tl.arange(0, TILE)
            value = tl.load(line + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
            weight, level = _weigh(value, top, rate)
            mass += weight
            count += tl.histogram(level, LEVELS)
        place = row.to(tl.int64) * parts + part
        tl.store(masses + place, tl.sum(mass, 0))
        tl.store(counts + place * LEVELS + tl.arange(0, LEVELS), count)


@triton.jit
def _last_level(counts, mass, k, top_p, min_p, point, LEVELS: tl.constexpr):
    """The last level that can decide the draw. counts: [LEVELS], mass: of the row; k: 0 is no limit."""
    level = tl.arange(0, LEVELS)
    # No weight of a level is above its bound: 2^-44 is what rounding adds, twice.
    bound = tl.exp2(-0.75 * level.to(tl.float32)) * 1.00001 + 5.7e-14
    own = tl.where(level < LEVELS - 1, counts.to(tl.float64) * bound.to(tl.float64), 0.0)
    behind = tl.cumsum(own, 0, reverse=True)
    rest = behind - own + behind * 1e-12
    total = mass.to(tl.float64) * 5.684341886080802e-14
    plain = k == 0
    enough = (tl.cumsum(counts, 0) >= k) & (k > 0)
    enough |= plain & (top_p < 1.0) & (rest < total * (1.0 - top_p))
    below = tl.exp2(-0.75 * (level + 1).to(tl.float32)) * 1.00001
    enough |= (below.to(tl.float64) < min_p) & (plain | (top_p >= 1.0))
    enough |= plain & (top_p >= 1.0) & (min_p <= 0.0) & (rest < total * (1.0 - point))
    return tl.min(tl.where(enough, level, LEVELS - 2), 0)


@triton.jit
def list_candidates(
    logits, tops, temperature, top_k, top_p, min_p, seed, position, masses, counts,
    sizes, sums, ids, ranks, weights, row_stride, vocab, parts, capacity,
    PARTS: tl.constexpr, PART: tl.constexpr, TILE: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """-> sizes [L] int32 and sums [L] int64 of rows; ids, ranks [L, capacity] int32, weights int64.

    A row with more candidates than `capacity` has no list. Grid: (L, parts).
    """
    await_previous()
    row, part = tl.program_id(0), tl.program_id(1)
    line = logits + row.to(tl.int64) * row_stride
    top, heat = tl.load(line + _top_of(tops, row, parts, PARTS)).to(tl.float32), tl.load(temperature + row)
    if _is_drawn(top, heat):
        rate = _rate(heat)
        at_part, level = tl.arange(0, PARTS), tl.arange(0, LEVELS)
        place = row.to(tl.int64) * parts + at_part
        mass = tl.sum(tl.load(masses + place, mask=at_part < parts, other=0), 0)
        table = tl.load(
            counts + place[:, None] * LEVELS + level[None, :], mask=(at_part < parts)[:, None], other=0
        )
        k = tl.load(top_k + row)
        k = tl.where((k > 0) & (k < vocab), k, 0)
        point = _uniform(tl.load(seed + row), tl.load(position + row))
        last = _last_level(
            tl.sum(table, 0), mass, k, tl.load(top_p + row), tl.load(min_p + row), point, LEVELS
        )
        table = tl.where((level <= last)[None, :], table, 0)
        before = tl.sum(tl.sum(tl.where((at_part < part)[:, None], table, 0), 1), 0)
        own = tl.sum(tl.sum(tl.where((at_part == part)[:, None], table, 0), 1), 0)
        size = tl.sum(tl.sum(table, 1), 0)
        if part == 0:
            tl.store(sizes + row, size)
            tl.store(sums + row, mass)
        if (size <= capacity) & (own > 0):
            start = row.to(tl.int64) * capacity + before
            for at in range(0, PART, TILE):
                token = part * PART + at + tl.arange(0, TILE)
                value = tl.load(line + token, mask=token < vocab, other=-float("inf")).to(tl.float32)
                weight, mine = _weigh(value, top, rate)
                kept = mine <= last
                to = start + tl.cumsum(kept.to(tl.int32), 0) - 1
                tl.store(ids + to, token, mask=kept)
                tl.store(ranks + to, _rank(value), mask=kept)
                tl.store(weights + to, weight, mask=kept)
                start += tl.sum(kept.to(tl.int32), 0)


@triton.jit
def _load_tile(line, ranks, weights, at, size, listed, top, rate, TILE: tl.constexpr):
    """(ranks, weights) of candidates at..: from the list, or of all tokens of a row."""
    i = at + tl.arange(0, TILE)
    if listed:
        rank = tl.load(ranks + i, mask=i < size, other=-0x80000000)
        weight = tl.load(weights + i, mask=i < size, other=0)
    else:
        value = tl.load(line + i, mask=i < size, other=-float("inf")).to(tl.float32)
        rank = _rank(value)
        weight, _ = _weigh(value, top, rate)
    return rank, weight


@triton.jit
def _measure(weight, least, COUNTS: tl.constexpr):
    """What a candidate adds: 1 or its weight, and nothing with a weight below `least`."""
    return tl.where(weight >= least, 1 if COUNTS else weight, 0).to(tl.int64)


@triton.jit
def _find(
    line, ranks, weights, size, listed, top, rate, low, high, need, least,
    COUNTS: tl.constexpr, WAYS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Where candidates in falling order reach `need`: (rank, how many of that rank are needed).

    need: at least 1, and at most what all candidates have; low, high: the lowest and the highest rank, int64.
    """
    way = tl.arange(0, WAYS).to(tl.int64)
    while low < high:
        step = (high - low) // (WAYS + 1) + 1
        marks = tl.minimum(low + step * (way + 1), high + 1).to(tl.int32)
        totals = tl.zeros([WAYS, TILE], tl.int64)
        for at in range(0, size, TILE):
            rank, weight = _load_tile(line, ranks, weights, at, size, listed, top, rate, TILE)
            own = _measure(weight, least, COUNTS)
            totals += tl.where(rank[None, :] >= marks[:, None], own[None, :], 0)
        passed = tl.sum((tl.sum(totals, 1) >= need).to(tl.int64), 0)
        low += passed * step
        high = tl.minimum(high, low + step - 1)
    above, each = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    for at in range(0, size, TILE):
        rank, weight = _load_tile(line, ranks, weights, at, size, listed, top, rate, TILE)
        own = _measure(weight, least, COUNTS)
        above += tl.where(rank > low, own, 0)
        each = tl.maximum(each, tl.where(rank == low, own, 0))
    one = tl.maximum(tl.max(each, 0), 1)
    return low, (need - tl.sum(above, 0) + one - 1) // one


@triton.jit
def _mass_until(
    line, ranks, weights, size, listed, top, rate, end, ties, least, TILE: tl.constexpr
):  # fmt: skip
    """The mass of candidates in falling order, up to so many of the rank `end`."""
    above, each = tl.zeros([TILE], tl.int64), tl.zeros([TILE], tl.int64)
    count = tl.zeros([TILE], tl.int64)
    for at in range(0, size, TILE):
        rank, weight = _load_tile(line, ranks, weights, at, size, listed, top, rate, TILE)
        own = tl.where(weight >= least, weight, 0)
        above += tl.where(rank > end, own, 0)
        each = tl.maximum(each, tl.where(rank == end, own, 0))
        count += ((rank == end) & (weight > 0)).to(tl.int64)
    return tl.sum(above, 0) + tl.max(each, 0) * tl.minimum(ties, tl.sum(count, 0))


@triton.jit
def _take(line, ids, ranks, weights, size, listed, top, rate, end, which, TILE: tl.constexpr):
    """The id of the which-th candidate of a rank, from 1, in the order of ids."""
    seen, found = tl.zeros([], tl.int64), tl.zeros([], tl.int32)
    for at in range(0, size, TILE):
        rank, weight = _load_tile(line, ranks, weights, at, size, listed, top, rate, TILE)
        token = at + tl.arange(0, TILE)
        if listed:
            token = tl.load(ids + token, mask=token < size, other=0)
        equal = ((rank == end) & (weight > 0)).to(tl.int32)
        hit = (equal > 0) & (tl.cumsum(equal, 0) + seen == which)
        found += tl.sum(tl.where(hit, token, 0), 0)
        seen += tl.sum(equal, 0).to(tl.int64)
    return found


@triton.jit
def draw_tokens(
    logits, tops, temperature, top_k, top_p, min_p, seed, position, sizes, sums, ids, ranks, weights,
    chosen, values, row_stride, vocab, parts, capacity,
    PARTS: tl.constexpr, TILE: tl.constexpr, WAYS: tl.constexpr,
):  # fmt: skip
    """-> chosen [L] int64, values [L], the largest logits. Grid: (L,)."""
    await_previous()
    row = tl.program_id(0)
    line = logits + row.to(tl.int64) * row_stride
    token = _top_of(tops, row, parts, PARTS)
    value = tl.load(line + token)
    tl.store(values + row, value)
    top, heat = value.to(tl.float32), tl.load(temperature + row)
    if _is_drawn(top, heat):
        rate, size = _rate(heat), tl.load(sizes + row)
        listed = size <= capacity
        size = tl.where(listed, size, vocab)
        own_ids, own_ranks = ids + row.to(tl.int64) * capacity, ranks + row.to(tl.int64) * capacity
        own_weights = weights + row.to(tl.int64) * capacity
        k, p, least_p = tl.load(top_k + row), tl.load(top_p + row), tl.load(min_p + row)
        limited = (k > 0) & (k < vocab)
        lowest, count = tl.full([TILE], 0x7FFFFFFF, tl.int32), tl.zeros([TILE], tl.int64)
        mass_here = tl.zeros([TILE], tl.int64)
        for at in range(0, size, TILE):
            rank, weight = _load_tile(line, own_ranks, own_weights, at, size, listed, top, rate, TILE)
            lowest = tl.minimum(lowest, tl.where(weight > 0, rank, 0x7FFFFFFF))
            count += (weight > 0).to(tl.int64)
            mass_here += weight
        low, high = tl.min(lowest, 0).to(tl.int64), _rank(top).to(tl.int64)
        end, ties, mass = low, tl.full([], 0x7FFFFFFF, tl.int64), tl.load(sums + row)
        least = tl.full([], 1, tl.int64)
        if limited:
            if k < tl.sum(count, 0):
                end, ties = _find(
                    line, own_ranks, own_weights, size, listed, top, rate, low, high, k, least,
                    True, WAYS, TILE,
                )  # fmt: skip
            mass = _mass_until(line, own_ranks, own_weights, size, listed, top, rate, end, ties, least, TILE)
        if p < 1.0:
            need = tl.maximum(tl.ceil(p * mass.to(tl.float64)).to(tl.int64), 1)
            if need <= tl.sum(mass_here, 0):
                end, ties = _find(
                    line, own_ranks, own_weights, size, listed, top, rate, low, high, need, least,
                    False, WAYS, TILE,
                )  # fmt: skip
        if least_p > 0.0:
            least = tl.maximum(tl.ceil(least_p * 17592186044416.0).to(tl.int64), 1)
        if limited | (p < 1.0) | (least_p > 0.0):
            mass = _mass_until(line, own_ranks, own_weights, size, listed, top, rate, end, ties, least, TILE)
        point = _uniform(tl.load(seed + row), tl.load(position + row)) * mass.to(tl.float64)
        need = tl.minimum(tl.floor(point).to(tl.int64) + 1, tl.minimum(mass, tl.sum(mass_here, 0)))
        end, which = _find(
            line, own_ranks, own_weights, size, listed, top, rate, low, high, need, least,
            False, WAYS, TILE,
        )  # fmt: skip
        token = _take(line, own_ids, own_ranks, own_weights, size, listed, top, rate, end, which, TILE)
    tl.store(chosen + row, token.to(tl.int64))


def why_unread(facts: OpFacts) -> str | None:
    """The `when` of both ops: a vocabulary of which 62 bits hold the sum of weights."""
    size = int(facts["vocab_size"])
    return None if size <= MOST else f"{size} tokens are more than {MOST}"


def part_constants(rows: int, vocab: int) -> dict[str, int]:
    """How a vocabulary is cut. It changes the grid, and no result."""
    size = SMALL_PART if rows <= FEW_ROWS else PART
    return {"PART": size, "PARTS": triton.next_power_of_2(triton.cdiv(vocab, size))}


def _row_tops(logits: Tensor, part: int) -> Tensor:
    rows, vocab = logits.shape
    tops = torch.empty(rows, triton.cdiv(vocab, part), dtype=torch.int64, device=logits.device)
    launch(find_tops, (rows, tops.shape[1]), logits, tops, logits.stride(0), vocab, PART=part, num_warps=8)
    return tops


def _as_rows(logits: Tensor) -> Tensor:
    """Rows of which the elements lie side by side."""
    return logits if logits.stride(1) == 1 else logits.contiguous()


@largest.variant(NAME, on="cuda", when=why_unread)
def find_largest(logits: Tensor) -> tuple[Tensor, Tensor]:
    """`largest`: the same argument and result."""
    logits, rows = _as_rows(logits), len(logits)
    ids, values = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
    if not rows:
        return ids, values
    cut = part_constants(rows, logits.shape[1])
    tops = _row_tops(logits, cut["PART"])
    launch(
        take_tops, (rows,), logits, tops, ids, values, logits.stride(0), tops.shape[1],
        PARTS=cut["PARTS"], num_warps=1,
    )  # fmt: skip
    return ids, values


@sample_at.variant(NAME, on="cuda", when=why_unread)
def draw_at(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    seed: Tensor,
    position: Tensor,
) -> tuple[Tensor, Tensor]:
    """`sample_at`: the same arguments and result."""
    logits = _as_rows(logits)
    rows, vocab = logits.shape
    chosen, values = logits.new_empty(rows, dtype=torch.int64), logits.new_empty(rows)
    if not rows:
        return chosen, values
    cut, capacity = part_constants(rows, vocab), list_capacity(rows, vocab)
    tops = _row_tops(logits, cut["PART"])
    parts = tops.shape[1]
    longs, ints = (
        [logits.new_empty(*shape, dtype=dtype) for shape in shapes]
        for dtype, shapes in (
            (torch.int64, ((rows, parts), (rows,), (rows, capacity))),
            (torch.int32, ((rows, parts, LEVELS), (rows,), (rows, capacity), (rows, capacity))),
        )
    )
    (masses, sums, weights), (counts, sizes, ids, ranks) = longs, ints
    how = (temperature, top_k, top_p, min_p, seed, position)
    shape = (logits.stride(0), vocab, parts)
    shared = {"PARTS": cut["PARTS"], "TILE": TILE, **EXACT}
    launch(
        weigh_parts, (rows, parts), logits, tops, temperature, masses, counts, *shape,
        PART=cut["PART"], LEVELS=LEVELS, **shared,
    )  # fmt: skip
    launch(
        list_candidates, (rows, parts), logits, tops, *how, masses, counts, sizes, sums, ids, ranks, weights,
        *shape, capacity, PART=cut["PART"], LEVELS=LEVELS, num_warps=LIST_WARPS, **shared,
    )  # fmt: skip
    launch(
        draw_tokens, (rows,), logits, tops, *how, sizes, sums, ids, ranks, weights, chosen, values,
        *shape, capacity, WAYS=WAYS, **DRAW, **shared,
    )  # fmt: skip
    return chosen, values


def list_capacity(rows: int, vocab: int) -> int:
    """Candidates of a row that are listed. It changes how fast a row is drawn, and no draw."""
    return min(triton.cdiv(vocab, 16) * 16, max(LISTED, LIST_NBYTES // (ENTRY_NBYTES * rows) // 16 * 16))


POINTERS = {
    "logits": "fp32*", "tops": "i64*", "ids": "i32*", "values": "fp32*", "chosen": "i64*",
    "temperature": "fp64*", "top_k": "i64*", "top_p": "fp64*", "min_p": "fp64*", "seed": "i64*",
    "position": "i64*", "masses": "i64*", "counts": "i32*", "sizes": "i32*", "sums": "i64*",
    "ranks": "i32*", "weights": "i64*", "row_stride": "i32!", "vocab": "i32!", "capacity": "i32!",
}  # fmt: skip
VOCABULARIES = (32000, 128256, 262144)  # Llama 2, Llama 3, Gemma 3
WIDE = (("LDG.128", "LDGSTS.128"),)


def forms() -> Iterator[KernelForm]:
    """What vocabularies of published sizes launch, for few rows and for many."""
    for rows in (FEW_ROWS, FEW_ROWS + 1):
        yield KernelForm(
            f"find_tops, {rows} rows", find_tops, POINTERS, {"PART": part_constants(rows, 1)["PART"]},
            num_warps=8, demands=WIDE,
        )  # fmt: skip
        for vocab in VOCABULARIES:
            yield from _forms_of(f"{vocab} tokens, {rows} rows", part_constants(rows, vocab))


def _forms_of(name: str, cut: dict[str, int]) -> Iterator[KernelForm]:
    tiles = {"PARTS": cut["PARTS"], "TILE": TILE}
    whole = tiles | {"PART": cut["PART"], "LEVELS": LEVELS}
    yield KernelForm(
        f"take_tops, {name}", take_tops, POINTERS | {"ids": "i64*"}, {"PARTS": cut["PARTS"]}, num_warps=1
    )
    yield KernelForm(f"weigh_parts, {name}", weigh_parts, POINTERS, whole, demands=WIDE, options=EXACT)
    yield KernelForm(
        f"list_candidates, {name}", list_candidates, POINTERS, whole, LIST_WARPS, demands=WIDE, options=EXACT
    )
    yield KernelForm(
        f"draw_tokens, {name}",
        draw_tokens,
        POINTERS,
        tiles | {"WAYS": WAYS},
        DRAW["num_warps"],
        options=EXACT | {"maxnreg": DRAW["maxnreg"]},
    )
