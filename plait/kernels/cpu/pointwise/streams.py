"""Native kernels for what is between layers with several streams; every row is computed by one thread."""

from __future__ import annotations

import math

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.kinds import Float, Int
from plait.kernels.cpu.codegen.vec import (
    fma,
    get_f32,
    get_i64,
    largest,
    load_some,
    mul,
    put_f32,
    spread,
    store_some,
    sub,
    total,
    word,
    words,
    zero_f32,
)
from plait.kernels.cpu.pointwise.norm import sum_of, sum_squares
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import rows_of, scratch_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, dense, float32_rows
from plait.ops.streams import keep_largest, match_size, mix_sources, mix_streams, weigh_streams

PIECE = 256  # numbers of a row that a thread takes at a time, where rows are few


@kernel
def mix_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row and stream strides, streams, n, by, its row stride, streams of the result, out (dense)."""
    x, row_bytes, stream_bytes, streams, n, by, by_bytes, count, out = words(args, 2, 11)
    items = rows_of(frame, args) * count
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        row, k = i // count, i % count
        start, factors = x + row * row_bytes, by + row * by_bytes + 4 * k * streams
        for c in range(0, n, 16):
            left, mixed = np.int32(n - c), zero_f32()
            for j in range(streams):
                one = load_some(start + j * stream_bytes + 4 * c, left)
                mixed = fma(one, spread(get_f32(factors + 4 * j)), mixed)
            store_some(out + 4 * (i * n + c), mixed, left)


@kernel
def match_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, like, its row stride, n, the least mean square, out (dense)."""
    x, x_bytes, like, like_bytes, n = words(args, 2, 7)
    least, out, rows = get_f32(args + 56), word(args, 8), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        at = x + r * x_bytes
        own = max(np.float64(sum_squares(at, zero_f32(), n)) / n, np.float64(least))
        wanted = np.float64(sum_squares(like + r * like_bytes, zero_f32(), n)) / n
        factor = spread(np.float32(math.sqrt(wanted / own)))
        for c in range(0, n, 16):
            left = np.int32(n - c)
            store_some(out + 4 * (r * n + c), mul(load_some(at + 4 * c, left), factor), left)


@kernel
def keep_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x, its row stride, n, times, out (dense)."""
    x, row_bytes, n = words(args, 2, 5)
    times, out, rows = get_f32(args + 40), word(args, 6), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        at = x + r * row_bytes
        mean = np.float32(np.float64(sum_of(at, n)) / n)
        deviation = math.sqrt(np.float64(sum_squares(at, spread(mean), n)) / n)
        edge = spread(np.float32(mean + np.float32(deviation) * times))
        for c in range(0, n, 16):
            left = np.int32(n - c)
            kept = largest(sub(load_some(at + 4 * c, left), edge), zero_f32())
            store_some(out + 4 * (r * n + c), kept, left)


@inline
def divide_line(matrix: Int, step: Int, n: Int, eps: Float) -> None:
    """n numbers, `step` bytes apart, divided by their sum + eps."""
    whole: Float = np.float32(0.0)
    for j in range(n):
        whole = np.float32(whole + get_f32(matrix + step * j))
    whole = np.float32(whole + eps)
    for j in range(n):
        put_f32(matrix + step * j, np.float32(get_f32(matrix + step * j) / whole))


@inline
def weigh_matrix(logits: Int, n: Int, eps: Float, rounds: Int, matrix: Int) -> None:
    """`matrix` becomes [to, from]: the softmax of each row of logits [from, to], divided `rounds` times."""
    for i in range(n):
        top: Float = get_f32(logits + 4 * n * i)
        for j in range(1, n):
            top = max(top, get_f32(logits + 4 * (n * i + j)))
        whole: Float = np.float32(0.0)
        for j in range(n):
            e = np.float32(math.exp(np.float32(get_f32(logits + 4 * (n * i + j)) - top)))
            put_f32(matrix + 4 * (n * j + i), e)
            whole = np.float32(whole + e)
        for j in range(n):
            at = matrix + 4 * (n * j + i)
            put_f32(at, np.float32(np.float32(get_f32(at) / whole) + eps))
    for turn in range(rounds):
        if turn > 0:
            for i in range(n):
                divide_line(matrix + 4 * i, 4 * n, n, eps)
        for j in range(n):
            divide_line(matrix + 4 * n * j, 4, n, eps)


@kernel
def weigh_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """logits, their row stride, numbers of a row, streams, eps, magnitude, added, rounds, out (dense)."""
    logits, row_bytes, size, n = words(args, 2, 6)
    eps, magnitude, added = get_f32(args + 48), get_f32(args + 56), get_f32(args + 64)
    rounds, out, rows = word(args, 9), word(args, 10), rows_of(frame, args)
    for r in range(rows * thread // threads, rows * (thread + 1) // threads):
        at, to = logits + r * row_bytes, out + 4 * r * size
        for i in range(min(size, 2 * n)):
            share = np.float32(1.0 / (1.0 + math.exp(-np.float64(get_f32(at + 4 * i)))))
            if i < n:
                put_f32(to + 4 * i, np.float32(share + eps))
            else:
                put_f32(to + 4 * i, np.float32(np.float32(magnitude * share) + added))
        if size > 2 * n:
            weigh_matrix(at + 8 * n, n, eps, rounds, to + 8 * n)


@weigh_streams.variant("native", on="cpu", when=float32_rows, native=True)
def _weigh_streams(
    cpu: Executor, logits: Tensor, streams: int, eps: float, magnitude: float, added: float, rounds: int
) -> Tensor:
    rows = TensorRows.of(logits)
    if logits.dim() != 2 or rows.width not in (streams, 2 * streams, (2 + streams) * streams):
        raise ShapeMismatch(f"logits {list(logits.shape)} do not fit {streams} streams")
    out = cpu.empty(rows.count, rows.width)
    numbers = (float(eps), float(magnitude), float(added), rounds)
    cpu.launch(weigh_rows, logits, rows.row_bytes, rows.width, streams, *numbers, out, rows=rows.count)
    return out


@mix_streams.variant("native", on="cpu", when=float32_rows, native=True)
def _mix_streams(cpu: Executor, x: Tensor, by: Tensor) -> Tensor:
    rows, factors = TensorRows.of(x), TensorRows.of(by)
    if x.dim() != 3 or by.dim() != 2 or factors.width % rows.heads or factors.count not in (1, rows.count):
        raise ShapeMismatch(f"factors {list(by.shape)} do not fit streams {list(x.shape)}")
    count = factors.width // rows.heads
    out = cpu.empty(rows.count, count, rows.width)
    step = 0 if factors.count == 1 else factors.row_bytes
    where = (x, *rows.strides, rows.heads, rows.width, by, step, count, out)
    cpu.launch(mix_rows, *where, rows=rows.count)
    return out


@match_size.variant("native", on="cpu", when=float32_rows, native=True)
def _match_size(cpu: Executor, x: Tensor, like: Tensor, least: float) -> Tensor:
    a, b = TensorRows.of(x), TensorRows.of(like)
    if x.shape != like.shape or x.dim() != 2:
        raise ShapeMismatch(f"[T, n] is matched to its like, got {list(x.shape)} and {list(like.shape)}")
    out = cpu.empty(*x.shape)
    where = (x, a.row_bytes, like, b.row_bytes, a.width, float(least), out)
    cpu.launch(match_rows, *where, rows=a.count)
    return out


@kernel
def score_sources(frame: int, args: int, thread: int, threads: int) -> None:
    """queries (dense), n, eps, sources, queries' count, scores [rows, queries, sources], factors [rows,
    sources]: 1 / rms (both dense); then each source and its row stride."""
    queries, n, (count, reads, scores, factors) = word(args, 2), word(args, 3), words(args, 5, 9)
    eps, items = get_f32(args + 32), rows_of(frame, args) * count
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        row, k = i // count, i % count
        x = get_i64(args + 8 * (9 + 2 * k)) + row * get_i64(args + 8 * (10 + 2 * k))
        size = math.sqrt(np.float64(sum_squares(x, zero_f32(), n)) / n + np.float64(eps))
        put_f32(factors + 4 * i, np.float32(1.0 / size))
        for r in range(reads):
            product, query = zero_f32(), queries + 4 * n * r
            for c in range(0, n, 16):
                left = np.int32(n - c)
                product = fma(load_some(x + 4 * c, left), load_some(query + 4 * c, left), product)
            score = np.float32(np.float64(total(product)) / size)
            put_f32(scores + 4 * ((row * reads + r) * count + k), score)


@kernel
def share_sources(frame: int, args: int, thread: int, threads: int) -> None:
    """scores and factors (dense; factors 0: none), n, sources, queries' count, out (dense); then each source
    and its row stride. What a query reads is cut into pieces, so that one row is enough for all threads."""
    scores, factors, n, count, reads, out = words(args, 2, 8)
    pieces, shares = (n + PIECE - 1) // PIECE, scratch_of(frame, thread)
    items = rows_of(frame, args) * reads * pieces
    for i in range(items * thread // threads, items * (thread + 1) // threads):
        read, start = i // pieces, i % pieces * PIECE
        row, at = read // reads, scores + 4 * read * count
        top: Float = get_f32(at)
        for k in range(1, count):
            top = max(top, get_f32(at + 4 * k))
        whole: Float = np.float32(0.0)
        for k in range(count):
            e = np.float32(math.exp(np.float32(get_f32(at + 4 * k) - top)))
            put_f32(shares + 4 * k, e)
            whole = np.float32(whole + e)
        for k in range(count):
            share = np.float32(get_f32(shares + 4 * k) / whole)
            if factors != 0:
                share = np.float32(share * get_f32(factors + 4 * (row * count + k)))
            put_f32(shares + 4 * k, share)
        for c in range(start, min(start + PIECE, n), 16):
            left, y = np.int32(n - c), zero_f32()
            for k in range(count):
                x = get_i64(args + 8 * (8 + 2 * k)) + row * get_i64(args + 8 * (9 + 2 * k))
                y = fma(load_some(x + 4 * c, left), spread(get_f32(shares + 4 * k)), y)
            store_some(out + 4 * (read * n + c), y, left)


@mix_sources.variant("native", on="cpu", when=float32_rows, native=True)
def _mix_sources(cpu: Executor, queries: Tensor, eps: float, of_normed: bool, *sources: Tensor) -> Tensor:
    rows = [TensorRows.of(x) for x in sources]
    count, reads, (tokens, n) = len(sources), len(queries), sources[0].shape
    dense("queries", queries, reads, n)
    if any(x.shape != (tokens, n) for x in sources):
        raise ShapeMismatch(f"sources {[list(x.shape) for x in sources]} are not of one shape")
    each = [part for x, at in zip(sources, rows, strict=True) for part in (x, at.row_bytes)]
    scores, factors = cpu.empty(tokens, reads * count), cpu.empty(tokens, count)
    out = cpu.empty(tokens, reads * n)
    cpu.launch(score_sources, queries, n, float(eps), count, reads, scores, factors, *each, rows=tokens)
    by = factors if of_normed else None
    cpu.launch(share_sources, scores, by, n, count, reads, out, *each, rows=tokens, scratch=4 * count)
    return out


@keep_largest.variant("native", on="cpu", when=float32_rows, native=True)
def _keep_largest(cpu: Executor, x: Tensor, times: float) -> Tensor:
    rows = TensorRows.of(x)
    if x.dim() != 2:
        raise ShapeMismatch(f"rows [T, n] are wanted, got {list(x.shape)}")
    out = cpu.empty(*x.shape)
    cpu.launch(keep_rows, x, rows.row_bytes, rows.width, float(times), out, rows=rows.count)
    return out
