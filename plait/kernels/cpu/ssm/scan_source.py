"""Generates the source of the Mamba2 scan's kernels: one per state size N, made when a model needs it.

Two forms of the same recurrence, which give the same bits. *Narrow*, for a token or a few: the lanes are
sixteen of a row's N numbers, and memory is read as it lies. *Wide*, for prompts: sixteen rows are turned, so
that lanes are rows, a few columns stay in registers while sixteen tokens pass by, and nothing is summed
across lanes. Both add what belongs to y in one order: columns n, n + 16, n + 32, … one after the other by
fma, then these sixteen sums in the tree of `vec.total`. The wide form visits columns in that tree's order.
"""

from __future__ import annotations

from functools import cache
from string import Template
from typing import Any

from plait.kernels.cpu.codegen.kernel import Kernel, load_generated
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, digest, straight
from plait.kernels.cpu.codegen.vec import F

LANES = 16
ROWS = 64  # of a head's state that one thread takes at a time
TOKENS = 16  # that pass by the registers of the wide form before the next columns come
WIDE_TOKENS = 12  # of a sequence, from which on turning its state pays off
REGISTERS = 16  # vectors of state that the wide form holds; the rest is for sums and products
LARGEST = 1024  # N: every vector of a row is a line of the text
TREE = (0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15)  # lanes, in the order `vec.total` joins them
LEVELS = 5  # sums that wait for their partners, at most

_SOURCE = Template('''"""Mamba2 scan: made by plait, from $digest."""
import numpy as np

from plait.kernels.cpu.ssm import scan_source
from plait.kernels.cpu.runtime.frame import SEQS, scratch_of
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.maths import exp
from plait.kernels.cpu.codegen.vec import (
    add, atomic_add, get_f32, get_i64, get_u8, load_f32, load_some, mul, put_f32, spread, spread_f32,
    store_f32, store_some, word, zero_f32,
)

row_of, move_row, copy_row = scan_source.row_of($n), scan_source.move_row($n), scan_source.copy_row($n)
turn, move_columns = scan_source.turn(), scan_source.move_columns($n)


@inline
def _load(a, left):
    if left >= 16:
        return load_f32(a)
    return load_some(a, np.int32(left))


@inline
def _store(a, x, left):
    if left >= 16:
        store_f32(a, x)
    else:
        store_some(a, x, np.int32(left))


@inline
def _clear(state, rows):
    for i in range(0, rows * $n, 16):
        _store(state + 4 * i, zero_f32(), rows * $n - i)


@inline
def _narrow(state, rows, x, x_bytes, dt, dt_bytes, a, b, b_bytes, c, c_bytes, skip, skips, out, out_bytes,
            tokens):
    """Walk all tokens; lanes are columns."""
    for t in range(tokens):
        step = get_f32(dt + t * dt_bytes)
        decay = exp(spread(step * a))
        bs, cs = row_of(b + t * b_bytes), row_of(c + t * c_bytes)
        for p in range(rows):
            u = get_f32(x + t * x_bytes + 4 * p)
            z, = move_row(state + $row * p, decay, spread(u * step), bs, cs)
            put_f32(out + t * out_bytes + 4 * p, z + skip * u if skips else z)


@inline
def _pack(rows, row_bytes, tokens, to):
    """B or C of some tokens, side by side: far apart they would share too few lines of the cache."""
    for t in range(tokens):
        copy_row(rows + t * row_bytes, to + $packed * t)


@inline
def _columns(h, bs, cs, decays, vs, stack, tokens):
    """Let tokens pass by sixteen turned rows. The sums come to lie at `stack`, a vector per token."""
    height = 0
    for g in range($groups):
        lane = (g & 1) * $bit0 + (g >> 1 & 1) * $bit1 + (g >> 2 & 1) * $bit2 + (g >> 3 & 1) * $bit3
        at, b, c, y = h + 64 * lane, bs + 4 * lane, cs + 4 * lane, stack + height * $level
        move_columns(at, b, c, y, decays, vs, tokens)
        height += 1
        whole = g
        while whole & 1:
            height -= 1
            low, high = stack + (height - 1) * $level, stack + height * $level
            for t in range(tokens):
                store_f32(low + 64 * t, add(load_f32(low + 64 * t), load_f32(high + 64 * t)))
            whole >>= 1


@inline
def _wide(state, rows, x, x_bytes, dt, dt_bytes, a, b, b_bytes, c, c_bytes, skip, skips, out, out_bytes,
          tokens, scratch):
    """Walk all tokens; lanes are rows."""
    bs, cs = scratch, scratch + $tokens * $packed
    steps, decays, vs = cs + $tokens * $packed, cs + $tokens * $packed + 64, cs + $tokens * $packed + 128
    stack = vs + $level
    turned = stack + $levels * $level
    for p in range(0, rows, 16):
        for j in range($vectors):
            for i in range(16):
                z = zero_f32()
                if p + i < rows:
                    z = _load(state + $row * (p + i) + 64 * j, $n - 16 * j)
                store_f32(stack + 64 * i, z)
            turn(stack, turned + $tile * (p // 16) + 1024 * j)
    for start in range(0, tokens, $tokens):
        size = min(tokens - start, $tokens)
        _pack(b + start * b_bytes, b_bytes, size, bs)
        _pack(c + start * c_bytes, c_bytes, size, cs)
        store_f32(steps, zero_f32())
        for t in range(size):
            put_f32(steps + 4 * t, get_f32(dt + (start + t) * dt_bytes))
        store_f32(decays, exp(mul(load_f32(steps), spread(a))))
        for p in range(0, rows, 16):
            u, y = x + start * x_bytes + 4 * p, out + start * out_bytes + 4 * p
            for t in range(size):
                store_f32(vs + 64 * t, mul(_load(u + t * x_bytes, rows - p), spread_f32(steps + 4 * t)))
            _columns(turned + $tile * (p // 16), bs, cs, decays, vs, stack, size)
            for t in range(size):
                z = load_f32(stack + 64 * t)
                if skips:
                    z = add(z, mul(spread(skip), _load(u + t * x_bytes, rows - p)))
                _store(y + t * out_bytes, z, rows - p)
    for p in range(0, rows, 16):
        for j in range($vectors):
            turn(turned + $tile * (p // 16) + 1024 * j, stack)
            for i in range(min(rows - p, 16)):
                _store(state + $row * (p + i) + 64 * j, load_f32(stack + 64 * i), $n - 16 * j)


@kernel
def mamba2_$n(frame, args, thread, threads):
    """heads, rows of a head, heads of a group; x and its strides; dt and its; A, D or 0; B and its strides,
    C and its; state and its slot stride; slots, query_start, has_history; out (dense)."""
    heads, dim, ratio = word(args, 2), word(args, 3), word(args, 4)
    x, x_bytes, x_head = word(args, 5), word(args, 6), word(args, 7)
    dt, dt_bytes, decay, skip = word(args, 8), word(args, 9), word(args, 10), word(args, 11)
    b, b_bytes, b_group = word(args, 12), word(args, 13), word(args, 14)
    c, c_bytes, c_group = word(args, 15), word(args, 16), word(args, 17)
    state, slot_bytes, slots = word(args, 18), word(args, 19), word(args, 20)
    starts, history, out = word(args, 21), word(args, 22), word(args, 23)
    seqs, counter, scratch = get_i64(frame + 8 * SEQS), word(args, 1), scratch_of(frame, thread)
    parts, out_bytes = (dim + $part - 1) // $part, 4 * heads * dim
    items = seqs * heads * parts
    while True:
        # The last sequences come first: prompts, the long work, are behind the decodes.
        i = items - 1 - np.int64(atomic_add(counter, np.int32(1)))
        if i < 0:
            return
        s, head, p = i // (heads * parts), i // parts % heads, i % parts * $part
        t = get_i64(starts + 8 * s)
        tokens, rows = get_i64(starts + 8 * s + 8) - t, min(dim - p, $part)
        if tokens < 1:
            continue
        own = state + get_i64(slots + 8 * s) * slot_bytes + $row * (head * dim + p)
        if get_u8(history + s) == 0:
            _clear(own, rows)
        ux, ud, uo = x + t * x_bytes + head * x_head + 4 * p, dt + t * dt_bytes + 4 * head, head * dim + p
        ub, uc = b + t * b_bytes + head // ratio * b_group, c + t * c_bytes + head // ratio * c_group
        uo, a, skips, d = out + t * out_bytes + 4 * uo, get_f32(decay + 4 * head), skip != 0, np.float32(0)
        if skips:
            d = get_f32(skip + 4 * head)
        if $has_wide and tokens >= $wide_tokens:
            _wide(own, rows, ux, x_bytes, ud, dt_bytes, a, ub, b_bytes, uc, c_bytes, d, skips, uo,
                  out_bytes, tokens, scratch)
        else:
            _narrow(own, rows, ux, x_bytes, ud, dt_bytes, a, ub, b_bytes, uc, c_bytes, d, skips, uo,
                    out_bytes, tokens)
''')


def vectors(n: int) -> int:
    return -(-n // LANES)


def columns_at_once(n: int) -> int:
    """Chains of columns (n, n + 16, …) that the wide form holds in registers."""
    count = LANES
    while count > 1 and count * vectors(n) > REGISTERS:
        count //= 2
    return count


def scratch_bytes(n: int) -> int:
    """What a thread needs: B and C of some tokens, their sums, and the turned rows."""
    packed, level = TOKENS * 64 * vectors(n), TOKENS * 64
    return 2 * packed + 128 + (1 + LEVELS) * level + ROWS * 64 * vectors(n)


@cache
def mamba2_kernel(n: int) -> Kernel:
    """The kernel for states of n columns."""
    found: Kernel = getattr(load_generated(f"mamba2_{n}", _text(n)), f"mamba2_{n}")
    return found


def _text(n: int) -> str:
    count = columns_at_once(n)
    groups = LANES // count
    bits = [TREE[count << i] if count << i < LANES else 0 for i in range(4)]
    return _SOURCE.substitute(
        {f"bit{i}": bit for i, bit in enumerate(bits)},
        n=n,
        row=4 * n,
        vectors=vectors(n),
        groups=groups,
        tokens=TOKENS,
        packed=64 * vectors(n),
        level=64 * TOKENS,
        levels=LEVELS,
        tile=1024 * vectors(n),
        part=ROWS,
        has_wide=vectors(n) <= REGISTERS + 4,
        wide_tokens=WIDE_TOKENS,
        digest=digest("ssm/scan_source.py"),
    )


def _count_left(n: int, j: int) -> int:
    """How many of a row's n columns vector j has."""
    return min(n - LANES * j, LANES)


def _read(w: Writer, at: Word, left: int) -> Value:
    return w.load_f32(at) if left == LANES else w.load_some(at, left)


def _write(w: Writer, at: Word, x: Value, left: int) -> None:
    if left == LANES:
        w.store_f32(at, x)
    else:
        w.store_some(at, x, left)


@cache
def row_of(n: int) -> Any:
    """Block (at): n numbers, as vectors."""
    count = vectors(n)
    return straight(
        lambda w, at: [_read(w, at + 64 * j, _count_left(n, j)) for j in range(count)],
        gives=count,
    )


@cache
def copy_row(n: int) -> Any:
    """Block (source, to): n numbers, zeros behind them up to a whole vector."""

    def write(w: Writer, source: Word, to: Word) -> None:
        for j in range(vectors(n)):
            w.store_f32(to + 64 * j, _read(w, source + 64 * j, _count_left(n, j)))

    return straight(write)


@cache
def move_row(n: int) -> Any:
    """Block (row, decay, v, b, c): one token passes by a row of the state, in memory. Gives its y."""

    def write(w: Writer, row: Word, decay: Value, v: Value, b: list[Value], c: list[Value]) -> list[Value]:
        y = w.zero_f32()
        for j in range(vectors(n)):
            at, left = row + 64 * j, _count_left(n, j)
            h = w.fma(_read(w, at, left), decay, w.mul(v, b[j]))
            _write(w, at, h, left)
            y = w.fma(h, c[j], y)
        return [w.total(y)]

    return straight(write, gives=1, kind=F)


@cache
def turn() -> Any:
    """Block (source, to): sixteen by sixteen numbers, rows to columns.

    Four rounds, each of which moves the two halves of 256 numbers between each other.
    """

    def write(w: Writer, source: Word, to: Word) -> None:
        now = [w.load_f32(source + 64 * i) for i in range(LANES)]
        for _ in range(4):
            pairs = list(zip(now[:8], now[8:], strict=True))
            now = [mix(a, b) for a, b in pairs for mix in (w.interleave_low, w.interleave_high)]
        for i, x in enumerate(now):
            w.store_f32(to + 64 * i, x)

    return straight(write)


@cache
def move_columns(n: int) -> Any:
    """Block (state, b, c, y, decays, vs, tokens): tokens pass by chains of columns of sixteen turned rows.

    Chain i starts `TREE[i]` columns behind the first one: together they are a whole branch of the tree.
    b and c are packed; y gets a vector per token.
    """
    count, packed = columns_at_once(n), 64 * vectors(n)
    chains = [(i, j) for i in range(count) for j in range(vectors(n))]

    def write(
        w: Writer, state: Word, b: Word, c: Word, y: Word, decays: Word, vs: Word, tokens: Word
    ) -> None:
        def token(t: Word, *h: Value) -> list[Value]:
            decay, v = w.spread_f32(decays + 4 * t), w.load_f32(vs + 64 * t)
            moved, sums = [], [w.zero_f32()] * count
            for (i, j), old in zip(chains, h, strict=True):
                at = packed * t + 64 * j + 4 * TREE[i]
                moved.append(w.fma(old, decay, w.mul(v, w.spread_f32(b + at))))
                sums[i] = w.fma(moved[-1], w.spread_f32(c + at), sums[i])
            while len(sums) > 1:
                sums = [w.add(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
            w.store_f32(y + 64 * t, sums[0])
            return moved

        places = [state + 1024 * j + 64 * TREE[i] for i, j in chains]
        for at, h in zip(places, w.loop(0, tokens, 1, [w.load_f32(at) for at in places], token), strict=True):
            w.store_f32(at, h)

    return straight(write)
