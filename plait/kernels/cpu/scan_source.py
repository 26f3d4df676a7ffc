"""The text of the Mamba2 scan's kernel: one per state size N, made when a model needs it.

Two forms of the same recurrence, which give the same bits. *Narrow*, for a token or a few: the lanes are
sixteen of a row's N numbers, and memory is read as it lies. *Wide*, for prompts: sixteen rows are turned, so
that lanes are rows, a few columns stay in registers while sixteen tokens pass by, and nothing is summed
across lanes. Both add what belongs to y in one order: columns n, n + 16, n + 32, … one after the other by
fma, then these sixteen sums in the tree of `vec.total`. The wide form visits columns in that tree's order.
"""

from __future__ import annotations

from functools import cache
from string import Template

from plait.kernels.cpu.kernel import Kernel, generated

LANES = 16
ROWS = 64  # of a head's state that one thread takes at a time
TOKENS = 16  # that pass by the registers of the wide form before the next columns come
WIDE_TOKENS = 12  # of a sequence, from which on turning its state pays off
REGISTERS = 16  # vectors of state that the wide form holds; the rest is for sums and products
LARGEST = 1024  # N: every vector of a row is a line of the text
TREE = (0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15)  # lanes, in the order `vec.total` joins them
LEVELS = 5  # sums that wait for their partners, at most

_SOURCE = Template('''"""Mamba2 scan: made by plait.kernels.cpu.scan_source."""
import numpy as np

from plait.kernels.cpu.frame import SEQS, scratch_of, word
from plait.kernels.cpu.kernel import inline, kernel
from plait.kernels.cpu.maths import exp
from plait.kernels.cpu.vec import (
    add, atomic_add, fma, get_f32, get_i64, get_u8, interleave_high, interleave_low, load_f32, load_some, mul,
    put_f32, spread, spread_f32, store_f32, store_some, total, zero_f32,
)


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
$load_bc
        for p in range(rows):
            u = get_f32(x + t * x_bytes + 4 * p)
            v, s, y = spread(u * step), state + $row * p, zero_f32()
$move_row
            z = total(y)
            put_f32(out + t * out_bytes + 4 * p, z + skip * u if skips else z)


@inline
def _turn(source, to):
    """Sixteen by sixteen numbers, rows to columns."""
$turn


@inline
def _pack(rows, row_bytes, tokens, to):
    """B or C of some tokens, side by side: far apart they would share too few lines of the cache."""
    for t in range(tokens):
$pack


@inline
def _columns(h, bs, cs, decays, vs, stack, tokens):
    """Let tokens pass by sixteen turned rows. The sums come to lie at `stack`, a vector per token."""
    height = 0
    for g in range($groups):
        lane = (g & 1) * $bit0 + (g >> 1 & 1) * $bit1 + (g >> 2 & 1) * $bit2 + (g >> 3 & 1) * $bit3
        at, b, c, y = h + 64 * lane, bs + 4 * lane, cs + 4 * lane, stack + height * $level
$load_h
        for t in range(tokens):
            decay, v = spread_f32(decays + 4 * t), load_f32(vs + 64 * t)
$move_columns
            store_f32(y + 64 * t, $sum)
            b += $packed
            c += $packed
$store_h
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
            _turn(stack, turned + $tile * (p // 16) + 1024 * j)
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
            _turn(turned + $tile * (p // 16) + 1024 * j, stack)
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
    found: Kernel = getattr(generated(f"mamba2_{n}", _text(n)), f"mamba2_{n}")
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
        turn=_turn(),
        **_narrow(n),
        **_wide(n, count),
    )


def _lines(indent: int, lines: list[str]) -> str:
    return "\n".join(" " * indent + line for line in lines)


def _narrow(n: int) -> dict[str, str]:
    load, move, pack = [], [], []
    for j in range(vectors(n)):
        left = n - LANES * j
        tail = "" if left >= LANES else f", np.int32({left})"
        get, put = ("load_some", "store_some") if tail else ("load_f32", "store_f32")
        load += [f"{m}{j} = {get}({m} + t * {m}_bytes + {64 * j}{tail})" for m in "bc"]
        move += [
            f"h = fma({get}(s + {64 * j}{tail}), decay, mul(v, b{j}))",
            f"{put}(s + {64 * j}, h{tail})",
            f"y = fma(h, c{j}, y)",
        ]
        pack.append(
            f"store_f32(to + {64 * vectors(n)} * t + {64 * j}, {get}(rows + t * row_bytes + {64 * j}{tail}))"
        )
    return {"load_bc": _lines(8, load), "move_row": _lines(12, move), "pack": _lines(8, pack)}


def _turn() -> str:
    """Four rounds, each of which moves the two halves of 256 numbers between each other."""
    lines = [f"r{i} = load_f32(source + {64 * i})" for i in range(LANES)]
    a, b = "r", "q"
    for _ in range(4):
        for i in range(8):
            lines.append(f"{b}{2 * i} = interleave_low({a}{i}, {a}{i + 8})")
            lines.append(f"{b}{2 * i + 1} = interleave_high({a}{i}, {a}{i + 8})")
        a, b = b, a
    lines += [f"store_f32(to + {64 * i}, {a}{i})" for i in range(LANES)]
    return _lines(4, lines)


def _wide(n: int, count: int) -> dict[str, str]:
    """The lines for `count` chains of columns. Chain i is `lane` + TREE[i]: a whole branch of the tree."""
    load, store, move = [], [], []
    for i in range(count):
        for j in range(vectors(n)):
            at = 1024 * j + 64 * TREE[i]
            load.append(f"h{i}_{j} = load_f32(at + {at})")
            store.append(f"store_f32(at + {at}, h{i}_{j})")
            first = f"y{i}" if j else "zero_f32()"
            at = 64 * j + 4 * TREE[i]
            move += [
                f"h{i}_{j} = fma(h{i}_{j}, decay, mul(v, spread_f32(b + {at})))",
                f"y{i} = fma(h{i}_{j}, spread_f32(c + {at}), {first})",
            ]
    sums = [f"y{i}" for i in range(count)]
    while len(sums) > 1:
        sums = [f"add({a}, {b})" for a, b in zip(sums[::2], sums[1::2], strict=True)]
    return {
        "load_h": _lines(8, load),
        "store_h": _lines(8, store),
        "move_columns": _lines(12, move),
        "sum": sums[0],
    }
