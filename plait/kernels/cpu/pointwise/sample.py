"""Choosing a token: the largest logit, and the draw among the likeliest without sorting a vocabulary.

Weights are float64, as in `ops.sample`. A row is computed by itself, in one order, whatever else is drawn.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Int, Ints
from plait.kernels.cpu.codegen.vec import (
    and_i32,
    bits_f64,
    bits_i32,
    get_f32,
    get_f64,
    get_i32,
    get_i64,
    largest,
    load_f32,
    load_some,
    or_i32,
    peak,
    put_f32,
    put_f64,
    put_i32,
    put_i64,
    right,
    spread,
    spread_int,
    sub_i32,
    sum_i32,
    where_below,
    where_less,
    words,
    zero_i32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import barrier, common_scratch, rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.kernels.cpu.runtime.row_launches import launch_draw, launch_largest
from plait.ops import sample

BLOCK = 512  # floats of which the largest is found first, and then where it is
GROUP = 64  # floats that are looked at one by one only if their largest can matter


Settings = tuple[Float, Float, Float, Float]  # temperature, top_p, min_p, the uniform number
Memory = tuple[int, int, int]  # addresses: values, ids, and spare memory or weights


def _pointer(kind: Any) -> Any:
    """An address as what Numba indexes: the one form of memory in which LLVM finds vectors by itself."""

    @intrinsic
    def pointer(_: object, address: object) -> tuple[object, object]:
        made = types.CPointer(kind)
        return made(types.int64), lambda context, builder, signature, values: builder.inttoptr(
            values[0], context.get_value_type(made)
        )

    return pointer


_floats, _doubles = _pointer(types.float32), _pointer(types.float64)


# ---- the largest logit ----
@inline
def _below_nan(bits: Ints) -> Ints:
    """Negative where the bits are those of a NaN."""
    return sub_i32(spread_int(np.int32(0x7F800000)), and_i32(bits, spread_int(np.int32(0x7FFFFFFF))))


@inline
def _top_of_block(x: Int, n: Int) -> tuple[float, bool]:
    """(the largest of n floats, whether one of them is a NaN)."""
    a = b = spread(np.float32(-np.inf))
    signs, full = zero_i32(), n // 16 * 64
    for at in range(0, full, 64):
        v = load_f32(x + at)
        a, b = b, where_less(a, v, v, a)
        signs = or_i32(signs, _below_nan(bits_i32(v)))
    left = np.int32(n % 16)
    if left > 0:
        v = where_below(left, load_some(x + full, left), spread(np.float32(-np.inf)))
        a = where_less(a, v, v, a)
        signs = or_i32(signs, _below_nan(bits_i32(v)))
    return peak(where_less(a, b, b, a)), sum_i32(right(signs, np.int32(31))) > 0


@inline
def _find(x: Int, value: Float, n: Int) -> int:
    """Where the first of n floats that equals `value` is; the first NaN, if that is what it is."""
    for i in range(n):
        v = get_f32(x + 4 * i)
        if v == value or (value != value and v != v):
            return i
    return 0


@inline
def _top_of_span(x: Int, first: Int, last: Int) -> tuple[Float, Int]:
    """(value, id) of the largest of floats first..last, the lowest id among equals; the first NaN wins."""
    best: Float = np.float32(-np.inf)
    where = first
    for start in range(first, last, BLOCK):
        n = min(BLOCK, last - start)
        top, broken = _top_of_block(x + 4 * start, n)
        if broken:
            return np.float32(np.nan), start + _find(x + 4 * start, np.float32(np.nan), n)
        if top > best:
            best, where = top, start
    return best, where + _find(x + 4 * where, best, min(BLOCK, last - where))


@kernel
def largest_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, vocab, ids (int64), values (float32): every row is shared out to all threads."""
    x, row_bytes, vocab, ids, values = words(args, 2, 7)
    rows, found = rows_of(frame, args), common_scratch(frame)
    first = vocab // 16 * thread // threads * 16
    last = vocab if thread == threads - 1 else vocab // 16 * (thread + 1) // threads * 16
    for r in range(rows):
        value, at = _top_of_span(x + r * row_bytes, first, last)
        put_f32(found + 16 * (r * threads + thread), value)
        put_i64(found + 16 * (r * threads + thread) + 8, at)
    barrier(frame, threads)
    for r in range(thread, rows, threads):
        best: Float = np.float32(-np.inf)
        where: Int = np.int64(0)
        for t in range(threads):
            part = found + 16 * (r * threads + t)
            there = get_f32(part)
            if there > best or (there != there and best == best):
                best, where = there, get_i64(part + 8)
        put_f32(values + 4 * r, best)
        put_i64(ids + 8 * r, where)


# ---- pairs (logit, id): float32 values and int32 ids, side by side in memory ----
@inline
def _digit(bits: Int, shift: Int) -> Int:
    """Eight bits of a number that rises where the float with these bits falls."""
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return ((rising ^ 0x7FFFFFFF) >> shift) & 255


@inline
def _sort(values: Int, ids: Int, spare: Int, count: Int) -> None:
    """Falling values, equal ones in the order they came in: a radix sort, which has no branches to predict.

    Values and ids have space for as many as the vocabulary has, and so has `spare`, the other place of every
    pass; what lies behind the ids counts 256 digits (`draw_rows` lays it out).
    """
    size = ids - values
    counts = ids + size
    source, to = values, spare
    for shift in range(0, 32, 8):
        for digit in range(256):
            put_i32(counts + 4 * digit, np.int32(0))
        for i in range(count):
            at = counts + 4 * _digit(np.int64(get_i32(source + 4 * i)), shift)
            put_i32(at, np.int32(get_i32(at) + 1))
        before = 0
        for digit in range(256):
            here = get_i32(counts + 4 * digit)
            put_i32(counts + 4 * digit, np.int32(before))
            before += here
        for i in range(count):
            bits = get_i32(source + 4 * i)
            at = counts + 4 * _digit(np.int64(bits), shift)
            place = np.int64(get_i32(at))
            put_i32(at, np.int32(place + 1))
            put_i32(to + 4 * place, bits)
            put_i32(to + size + 4 * place, get_i32(source + size + 4 * i))
        source, to = to, source


@inline
def _top_of_group(x: Int, n: Int) -> Float:
    if n == GROUP:
        a, b = largest(load_f32(x), load_f32(x + 64)), largest(load_f32(x + 128), load_f32(x + 192))
        return peak(largest(a, b))
    if n == 16:
        return peak(load_f32(x))
    top: Float = np.float32(-np.inf)
    for j in range(n):
        top = max(top, get_f32(x + 4 * j))
    return top


@inline
def _keep_above(x: Int, vocab: Int, bound: Float, values: Int, ids: Int) -> int:
    """The floats of a row that are not below `bound`, in the order of their ids; how many there are."""
    count = 0
    for start in range(0, vocab, GROUP):
        n = min(GROUP, vocab - start)
        if _top_of_group(x + 4 * start, n) >= bound:
            for i in range(start, start + n):
                v = get_f32(x + 4 * i)
                if v >= bound:
                    put_f32(values + 4 * count, v + np.float32(0.0))  # no -0: it equals 0
                    put_i32(ids + 4 * count, np.int32(i))
                    count += 1
    return count


@inline
def _keep_top(x: Int, vocab: Int, k: Int, memory: Memory) -> Int:
    """The k largest of a row, in falling order; how many there are (fewer only among NaN)."""
    values, ids, spare = memory
    # The k-th largest of the maxima of groups is not above the k-th largest of all, and lets few by.
    size = GROUP if vocab // GROUP >= 2 * k else 16
    bound: Float = np.float32(-np.inf)
    groups = vocab // size
    if groups >= k:
        for g in range(groups):
            put_f32(values + 4 * g, _top_of_group(x + 4 * size * g, size))
            put_i32(ids + 4 * g, np.int32(0))
        _sort(values, ids, spare, groups)
        bound = get_f32(values + 4 * (k - 1))
    count = _keep_above(x, vocab, bound, values, ids)
    _sort(values, ids, spare, count)
    return min(k, count)


# ---- weights ----
@inline
def _exp(x: Float) -> Float:
    """e**x of x <= 0 in float64, within an ulp or two; 0 below -700. x = n ln 2 + r, then Taylor's series."""
    z = max(x, -700.0)
    n = math.floor(z * 1.4426950408889634 + 0.5)
    r = (z - n * 0.693147180369123816490) - n * 1.90821492927058770002e-10  # ln 2 in two parts
    p: Float = 1.0 / 6227020800
    p = p * r + 1.0 / 479001600
    p = p * r + 1.0 / 39916800
    p = p * r + 1.0 / 3628800
    p = p * r + 1.0 / 362880
    p = p * r + 1.0 / 40320
    p = p * r + 1.0 / 5040
    p = p * r + 1.0 / 720
    p = p * r + 1.0 / 120
    p = p * r + 1.0 / 24
    p = p * r + 1.0 / 6
    p = p * r + 0.5
    p = (p * r) * r + r + 1.0
    return p * bits_f64((np.int64(n) + 1023) << 52) if x >= -700.0 else 0.0


@inline
def _mass(x: Int, vocab: Int, top: Float, temperature: Float, memory: Int) -> float:
    """The sum of all weights of a row: block by block, so that LLVM can make vectors of the loop."""
    source, weights, total = _floats(x), _doubles(memory), 0.0
    for start in range(0, vocab, GROUP):
        n = min(GROUP, vocab - start)
        for i in range(n):
            weights[i] = _exp((np.float64(source[start + i]) - top) / temperature)
        a = b = c = d = 0.0  # four sums, so that no addition waits for another
        for i in range(0, n // 4 * 4, 4):
            a, b, c, d = a + weights[i], b + weights[i + 1], c + weights[i + 2], d + weights[i + 3]
        for i in range(n // 4 * 4, n):
            a += weights[i]
        total += (a + b) + (c + d)
    return total


@inline
def _choose_first(weights: Int, count: Int, target: Float) -> Int:
    """The first where the weights up to it exceed `target`; else the last that has any."""
    mass = 0.0
    last: Int = np.int64(0)
    for j in range(count):
        weight = get_f64(weights + 8 * j)
        if weight > 0.0:
            last = j
        mass += weight
        if mass > target:
            return last
    return last


@inline
def _draw_of_top(x: Int, vocab: Int, k: Int, settings: Settings, memory: Memory) -> Int:
    """With a limit of k: their order is needed whole, because their mass is."""
    temperature, top_p, min_p, uniform = settings
    values, ids, weights = memory
    k = _keep_top(x, vocab, k, memory)
    if k == 0:  # nothing but NaN, which `largest` reports
        return np.int32(0)
    total: Float = 0.0
    top = np.float64(get_f32(values))
    for j in range(k):
        weight = _exp((np.float64(get_f32(values + 4 * j)) - top) / temperature)
        put_f64(weights + 8 * j, weight)
        total += weight
    kept, mass = np.int64(0), 0.0
    for j in range(k):
        weight = get_f64(weights + 8 * j)
        if j > 0 and ((top_p < 1.0 and mass >= top_p * total) or weight < min_p):
            break
        mass += weight
        kept += 1
    return get_i32(ids + 4 * _choose_first(weights, kept, uniform * mass))


@inline
def _draw_of_all(x: Int, vocab: Int, settings: Settings, memory: Memory) -> Int:
    """Without a limit: the largest are taken until what they hold decides.

    What lies under `floor` weighs less together than the part that cannot be chosen.
    """
    temperature, top_p, min_p, uniform = settings
    values, ids, weights = memory
    top = np.float64(_top_of_span(x, 0, vocab)[0])
    total = _mass(x, vocab, top, temperature, weights)
    reached = top_p if top_p < 1.0 else uniform
    least = 0.5 * total * (1.0 - reached) / vocab
    floor = max(least, min_p) if top_p < 1.0 or min_p == 0.0 else min_p  # min_p alone: all of them count
    bound = top + temperature * math.log(floor) if floor > 0.0 else -np.inf
    bound = min(top, bound - 1e-6 * (1.0 + abs(bound)))  # some too many do no harm
    count = _keep_above(x, vocab, np.float32(bound), values, ids)
    if count == 0:  # there is a NaN in the row, which `largest` reports
        return np.int32(0)
    _sort(values, ids, weights, count)
    cut = top_p < 1.0 or min_p > 0.0
    mass: Float = 0.0
    kept = np.int64(0)
    while kept < count:
        weight = _exp((np.float64(get_f32(values + 4 * kept)) - top) / temperature)
        if kept > 0 and ((top_p < 1.0 and mass >= top_p * total) or weight < min_p or weight == 0.0):
            break
        put_f64(weights + 8 * kept, weight)
        mass += weight
        kept += 1
        if not cut and mass > uniform * total:
            break
    target = uniform * (mass if cut else total)
    return get_i32(ids + 4 * _choose_first(weights, kept, target))


@kernel
def draw_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, vocab, temperature, top_k, top_p, min_p, uniform, ids: float64 and int64."""
    x, row_bytes, vocab, heat, top_k, top_p, min_p, uniform, out = words(args, 2, 11)
    rows, scratch = rows_of(frame, args), scratch_of(frame, thread)
    memory = (scratch + 8 * vocab, scratch + 12 * vocab, scratch)  # values, ids, weights; then counts
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        k, at = get_i64(top_k + 8 * r), 8 * r
        settings = (get_f64(heat + at), get_f64(top_p + at), get_f64(min_p + at), get_f64(uniform + at))
        row = x + r * row_bytes
        if 0 < k < vocab:
            put_i64(out + at, np.int64(_draw_of_top(row, vocab, k, settings, memory)))
        else:
            put_i64(out + at, np.int64(_draw_of_all(row, vocab, settings, memory)))


def _rows(logits: Tensor) -> TensorRows:
    rows = TensorRows.of(logits)
    if logits.dim() != 2 or rows.width == 0:
        raise ShapeMismatch(f"logits must be [L, vocab] of at least one token, got {list(logits.shape)}")
    return rows


@sample.largest.variant("native", on="cpu", when=float32_rows, native=True)
def _largest(cpu: Executor, logits: Tensor) -> tuple[Tensor, Tensor]:
    rows = _rows(logits)
    ids, values = cpu.empty(rows.count, dtype=torch.int64), cpu.empty(rows.count)
    launch_largest(cpu, largest_rows, logits, rows.row_bytes, ids, values)
    return ids, values


@sample.sample.variant("native", on="cpu", when=float32_rows, native=True)
def _sample(
    cpu: Executor,
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
) -> Tensor:
    rows = _rows(logits)
    settings = (temperature, top_k, top_p, min_p, uniform)
    for name, setting in zip(("temperature", "top_k", "top_p", "min_p", "uniform"), settings, strict=True):
        dense(name, setting, rows.count, dtype=torch.int64 if name == "top_k" else torch.float64)
    out = cpu.empty(rows.count, dtype=torch.int64)
    launch_draw(cpu, draw_rows, logits, rows.row_bytes, settings, out)
    return out
