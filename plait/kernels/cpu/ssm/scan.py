"""State-space scans, token by token: every state is read and written once per call, in its slot.

A state's rows are shared out over threads; a row's numbers, and what belongs to its y, are computed in one
order whatever the batch, the threads, or how a prompt is cut.

Kernels of Mamba2 are generated text: one per state size N, made when a model needs it.
Two forms of the same recurrence, which give the same bits. *Narrow*, for a token or a few: the lanes are
sixteen of a row's N numbers, and memory is read as it lies. *Wide*, for prompts: sixteen rows are turned, so
that lanes are rows, a few columns stay in registers while sixteen tokens pass by, and nothing is summed
across lanes. Both round a bfloat16 state after every token, under the same thresholds
(`rounding`). Both add what belongs to y in one order: columns n, n + 16, n + 32, … one after the other by
fma, then these sixteen sums in the tree of `vec.total`. The wide form visits columns in that tree's order.
"""

from __future__ import annotations

from functools import cache
from string import Template

import numpy as np
from torch import Tensor

from plait.errors import ShapeMismatch
from plait.kernels.cpu.codegen.kernel import Kernel, inline, kernel, load_generated
from plait.kernels.cpu.codegen.kinds import Float, Int
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, digest, straight
from plait.kernels.cpu.codegen.maths import exp, load_left, store_left
from plait.kernels.cpu.codegen.target import one_stream
from plait.kernels.cpu.codegen.vec import (
    F,
    fma,
    get_f32,
    load_bf16,
    load_f32,
    mul,
    put_f32,
    spread,
    total,
    where_less,
    word,
    words,
    zero_f32,
)
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import take_sequence
from plait.kernels.cpu.runtime.row_checks import Sequences, TensorRows, dense
from plait.kernels.cpu.ssm.rounding import (
    check_scan,
    check_state,
    column_thresholds,
    is_rounded,
    rounds_columns,
    row_thresholds,
    seed_at,
    store_rounded,
    wrap_int32,
)
from plait.ops.registry import OpFacts
from plait.ops.ssm import mamba1_scan, mamba2_scan
from plait.ops.state_rounding import COLUMN_STEP, ROW_STEP

CHANNELS = 64  # of a Mamba1 layer that one thread takes at a time
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

from plait.kernels.cpu.ssm import scan
from plait.kernels.cpu.runtime.frame import scratch_of, take_sequence
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.maths import exp, load_left, store_left
from plait.kernels.cpu.codegen.vec import (
    add, get_f32, get_i64, load_bf16, load_f32, mul, put_f32, put_i32, spread, spread_f32, store_f32, words,
    zero_f32,
)
from plait.kernels.cpu.ssm.rounding import ROW_STEP, WORD, seed_at, store_kept

row_of, move_row, copy_row = scan.row_of($n), scan.move_row($n, $half), scan.copy_row($n)
turn, move_columns = scan.turn(), scan.move_columns($n, $half)


@inline
def _clear(state, rows):
    words = rows * $row // 4
    for i in range(0, words, 16):
        store_left(state + 4 * i, zero_f32(), words - i)


@inline
def _narrow(state, rows, x, x_bytes, dt, dt_bytes, a, b, b_bytes, c, c_bytes, skip, skips, out, out_bytes,
            tokens, positions, first, row_slots, zeroth, slot_bytes):
    """Walk all tokens; lanes are columns. first: the row's number in the slot's state.

    row_slots: 0, or the slot of each token that gets the state behind it, which the next one reads there;
    slot 0 stands for the sequence's own. zeroth: where these rows are in slot 0.

    Threads take rows of a sequence as they lie in memory, so those behind `state` come next: they are
    prefetched.
    """
    source = state
    for t in range(tokens):
        to = state
        if row_slots != 0:
            slot = get_i64(row_slots + 8 * t)
            if slot != 0:
                to = zeroth + slot * slot_bytes
        step = get_f32(dt + t * dt_bytes)
        decay = exp(spread(step * a))
        bs, cs = row_of(b + t * b_bytes), row_of(c + t * c_bytes)
        seed = seed_at(positions, t) + first * ROW_STEP if $half else np.int64(0)
        for p in range(rows):
            u = get_f32(x + t * x_bytes + 4 * p)
            at, v = $row * p, spread(u * step)
            z, = move_row(source + at, to + at, decay, v, bs, cs, seed, $row * rows)
            seed += ROW_STEP
            put_f32(out + t * out_bytes + 4 * p, z + skip * u if skips else z)
        source = to


@inline
def _pack(rows, row_bytes, tokens, to):
    """B or C of some tokens, side by side: far apart they would share too few lines of the cache."""
    for t in range(tokens):
        copy_row(rows + t * row_bytes, to + $packed * t)


@inline
def _columns(h, bs, cs, decays, vs, stack, tokens, seeds):
    """Let tokens pass by sixteen turned rows. The sums come to lie at `stack`, a vector per token."""
    height = 0
    for g in range($groups):
        lane = (g & 1) * $bit0 + (g >> 1 & 1) * $bit1 + (g >> 2 & 1) * $bit2 + (g >> 3 & 1) * $bit3
        at, b, c, y = h + 64 * lane, bs + 4 * lane, cs + 4 * lane, stack + height * $level
        move_columns(at, b, c, y, decays, vs, tokens, seeds, lane)
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
          tokens, scratch, positions, first):
    """Walk all tokens; lanes are rows. first: as in `_narrow`."""
    bs, cs = scratch, scratch + $tokens * $packed
    steps, decays, vs = cs + $tokens * $packed, cs + $tokens * $packed + 64, cs + $tokens * $packed + 128
    seeds = vs + $level
    stack = seeds + 64
    turned = stack + $levels * $level
    for p in range(0, rows, 16):
        for j in range($vectors):
            for i in range(16):
                z = zero_f32()
                if p + i < rows:
                    z = $load
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
                store_f32(vs + 64 * t, mul(load_left(u + t * x_bytes, rows - p), spread_f32(steps + 4 * t)))
            if $half:
                for t in range(size):
                    seed = seed_at(positions, start + t) + (first + p) * ROW_STEP
                    put_i32(seeds + 4 * t, np.int32(seed & WORD))
            _columns(turned + $tile * (p // 16), bs, cs, decays, vs, stack, size, seeds)
            for t in range(size):
                z = load_f32(stack + 64 * t)
                if skips:
                    z = add(z, mul(spread(skip), load_left(u + t * x_bytes, rows - p)))
                store_left(y + t * out_bytes, z, rows - p)
    for p in range(0, rows, 16):
        for j in range($vectors):
            turn(turned + $tile * (p // 16) + 1024 * j, stack)
            for i in range(min(rows - p, 16)):
                $store


@kernel
def $name(frame, args, thread, threads):
    """heads, rows of a head, heads of a group; x and its strides; dt and its; A, D or 0; B and its strides,
    C and its; state and its slot stride; slots, query_start, has_history; out (dense);
    positions, which only a rounded state needs; 0, or where the state behind each row is kept."""
    heads, dim, ratio, x, x_bytes, x_head, dt, dt_bytes, decay, skip = words(args, 2, 12)
    b, b_bytes, b_group, c, c_bytes, c_group = words(args, 12, 18)
    state, slot_bytes, slots, starts, history, out, positions, row_slots = words(args, 18, 26)
    parts, out_bytes, scratch = (dim + $part - 1) // $part, 4 * heads * dim, scratch_of(frame, thread)
    while True:
        i, slot, past, t, tokens = take_sequence(frame, args, heads * parts, (slots, starts, history))
        if i < 0:
            return
        head, p = i // parts, i % parts * $part
        rows, own = min(dim - p, $part), state + slot * slot_bytes + $row * (head * dim + p)
        if not past:
            _clear(own, rows)
        ux, ud, uo = x + t * x_bytes + head * x_head + 4 * p, dt + t * dt_bytes + 4 * head, head * dim + p
        row, at = head * dim + p, positions + 8 * t
        ub, uc = b + t * b_bytes + head // ratio * b_group, c + t * c_bytes + head // ratio * c_group
        uo, a, skips, d = out + t * out_bytes + 4 * uo, get_f32(decay + 4 * head), skip != 0, np.float32(0)
        if skips:
            d = get_f32(skip + 4 * head)
        kept = row_slots + 8 * t if row_slots != 0 and tokens > 1 else np.int64(0)
        if kept != 0 and get_i64(kept + 8 * tokens - 16) == 0:  # kept are rows up to the last but one
            kept = np.int64(0)
        if $has_wide and tokens >= $wide_tokens and kept == 0:
            _wide(own, rows, ux, x_bytes, ud, dt_bytes, a, ub, b_bytes, uc, c_bytes, d, skips, uo,
                  out_bytes, tokens, scratch, at, row)
        else:
            _narrow(own, rows, ux, x_bytes, ud, dt_bytes, a, ub, b_bytes, uc, c_bytes, d, skips, uo,
                    out_bytes, tokens, at, row, kept, own - slot * slot_bytes, slot_bytes)
''')
# How rows of a state enter and leave the wide form, by whether it is bfloat16.
_LOAD = {
    False: "load_left(state + $row * (p + i) + 64 * j, $n - 16 * j)",
    True: "load_bf16(state + $row * (p + i) + 32 * j)",
}
_STORE = {
    False: "store_left(state + $row * (p + i) + 64 * j, load_f32(stack + 64 * i), $n - 16 * j)",
    True: "store_kept(state + $row * (p + i) + 32 * j, load_f32(stack + 64 * i))",
}


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
    return 2 * packed + 128 + 64 + (1 + LEVELS) * level + ROWS * 64 * vectors(n)


@cache
def mamba2_kernel(n: int, half: bool = False) -> Kernel:
    """The kernel for states of n columns; `half`: they are bfloat16."""
    name = f"mamba2_{n}_bf16" if half else f"mamba2_{n}"
    found: Kernel = getattr(load_generated(name, _text(n, half, name)), name)
    return found


def _text(n: int, half: bool, name: str) -> str:
    sizes = {"n": n, "row": (2 if half else 4) * n}
    count = columns_at_once(n)
    groups = LANES // count
    bits = [TREE[count << i] if count << i < LANES else 0 for i in range(4)]
    return _SOURCE.substitute(
        {f"bit{i}": bit for i, bit in enumerate(bits)},
        **sizes,
        name=name,
        half=half,
        load=Template(_LOAD[half]).substitute(sizes),
        store=Template(_STORE[half]).substitute(sizes),
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
        digest=digest("ssm/scan.py", "ssm/rounding.py"),
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
def row_of(n: int) -> object:
    """Block (at): n numbers, as vectors."""
    count = vectors(n)
    return straight(
        lambda w, at: [_read(w, at + 64 * j, _count_left(n, j)) for j in range(count)],
        gives=count,
    )


@cache
def copy_row(n: int) -> object:
    """Block (source, to): n numbers, zeros behind them up to a whole vector."""

    def write(w: Writer, source: Word, to: Word) -> None:
        for j in range(vectors(n)):
            w.store_f32(to + 64 * j, _read(w, source + 64 * j, _count_left(n, j)))

    return straight(write)


@cache
def move_row(n: int, half: bool) -> object:
    """Block (row, to, decay, v, b, c, seed, ahead): one token passes by a row of the state. Gives its y.

    to: where the row is written, mostly where it was read; seed: of the row's thresholds, where the state
    is bfloat16 (`half`); ahead: bytes to the row that is prefetched.
    """

    def write(
        w: Writer, row: Word, to: Word, decay: Value, v: Value, b: list[Value], c: list[Value],
        seed: Word, ahead: Word,
    ) -> list[Value]:  # fmt: skip
        for line in range(0, 0 if one_stream() else (2 if half else 4) * n, 64):
            w.prefetch(row + ahead + line)
        y, thresholds = w.zero_f32(), row_thresholds(w, w.spread_int(seed)) if half else None
        waiting: list[Value] = []  # vectors and their thresholds: two are rounded and stored at a time
        for j in range(vectors(n)):
            by, left = (32 if half else 64) * j, _count_left(n, j)
            at, target = row + by, to + by
            old = w.load_bf16(at) if half else _read(w, at, left)
            h = w.fma(old, decay, w.mul(v, b[j]))
            if half:
                column = wrap_int32(LANES * COLUMN_STEP * j)
                waiting += [h, w.add_i32(thresholds, w.spread_int(column))]
                if j % 2:
                    w.store_both_rounded(target - 32, *waiting[-4:])
                elif j == vectors(n) - 1:
                    w.store_rounded(target, *waiting[-2:])
            else:
                _write(w, target, h, left)
            y = w.fma(h, c[j], y)
        return [w.total(y)]

    return straight(write, gives=1, kind=F)


@cache
def turn() -> object:
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
def move_columns(n: int, half: bool) -> object:
    """Block (state, b, c, y, decays, vs, tokens, seeds, lane): tokens pass by columns of sixteen turned rows.

    Chain i starts `TREE[i]` columns behind the first one: together they are a whole branch of the tree.
    b and c are packed; y gets a vector per token. Where the state is bfloat16 (`half`), it is rounded after
    each token: seeds are the thresholds of the first row's first column, and the first chain is at `lane`.
    """
    count, packed = columns_at_once(n), 64 * vectors(n)
    chains = [(i, j) for i in range(count) for j in range(vectors(n))]

    def write(
        w: Writer,
        state: Word,
        b: Word,
        c: Word,
        y: Word,
        decays: Word,
        vs: Word,
        tokens: Word,
        seeds: Word,
        lane: Word,
    ) -> None:
        rows = w.mul_i32(w.lanes(), w.spread_int(wrap_int32(ROW_STEP)))
        rows = w.add_i32(rows, w.spread_int(lane * COLUMN_STEP)) if half else rows

        def token(t: Word, *h: Value) -> list[Value]:
            decay, v = w.spread_f32(decays + 4 * t), w.load_f32(vs + 64 * t)
            moved, sums = [], [w.zero_f32()] * count
            thresholds = w.add_i32(w.spread_i32(seeds + 4 * t), rows) if half else None
            for (i, j), old in zip(chains, h, strict=True):
                at = packed * t + 64 * j + 4 * TREE[i]
                new = w.fma(old, decay, w.mul(v, w.spread_f32(b + at)))
                sums[i] = w.fma(new, w.spread_f32(c + at), sums[i])
                if half:
                    column = w.spread_int(wrap_int32((LANES * j + TREE[i]) * COLUMN_STEP))
                    new = w.round_state(new, w.add_i32(thresholds, column))
                moved.append(new)
            while len(sums) > 1:
                sums = [w.add(*pair) for pair in zip(sums[::2], sums[1::2], strict=True)]
            w.store_f32(y + 64 * t, sums[0])
            return moved

        places = [state + 1024 * j + 64 * TREE[i] for i, j in chains]
        for at, h in zip(places, w.loop(0, tokens, 1, [w.load_f32(at) for at in places], token), strict=True):
            w.store_f32(at, h)

    return straight(write)


def narrow_states(facts: OpFacts) -> str | None:
    """The `when` of scans with generated text that has a line per sixteen columns."""
    if (size := facts.sizes.get("state", 0)) > LARGEST:
        return f"its states have {size} columns, more than {LARGEST}"
    return rounds_columns("state")(facts)


@mamba2_scan.variant("native", on="cpu", when=narrow_states, native=True)
def _mamba2_scan(
    cpu: Executor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """Nothing here depends on `num_decodes`, which changes from step to step, or on `chunk_size`."""
    count, heads, dim = x.shape
    groups, size = B.shape[1:]
    rows, steps, where = TensorRows.of(x), TensorRows.of(dt), Sequences.of(slots, query_start, has_history)
    check_scan(x, dt, A, B, C, D)
    slot_bytes = check_state(state, positions, count, heads, dim, size)
    out = cpu.empty(count, heads, dim)
    cpu.launch(
        *(mamba2_kernel(size, is_rounded(state)), heads, dim, heads // groups),
        *(x, *rows.strides, dt, steps.row_bytes, A, D),
        *(B, *TensorRows.of(B).strides, C, *TensorRows.of(C).strides),
        *(state, slot_bytes, *where.words, out, positions if is_rounded(state) else None),
        cpu.row_slots_of(state),
        rows=count,
        seqs=len(slots),
        scratch=scratch_bytes(size),
    )
    return out


@inline
def _channel(
    h: Int, n: Int, step: Float, u: Float, a: Int, b: Int, c: Int, limit: Float, limited: Int
) -> float:
    """One token of one channel: its n numbers move on; what they add to y."""
    y, size, v = zero_f32(), spread(step), spread(step * u)
    low, high = spread(-limit), spread(limit)
    for i in range(0, n, 16):
        left = n - i
        decay = exp(mul(size, load_left(a + 4 * i, left)))
        s = fma(decay, load_left(h + 4 * i, left), mul(v, load_left(b + 4 * i, left)))
        if limited:  # by comparisons, which leave a NaN as it is
            s = where_less(s, low, low, s)
            s = where_less(high, s, high, s)
        store_left(h + 4 * i, s, left)
        y = fma(s, load_left(c + 4 * i, left), y)
    return total(y)


@inline
def _move_rounded_channel(
    h: Int,
    n: Int,
    step: Float,
    u: Float,
    a: Int,
    b: Int,
    c: Int,
    limit: Float,
    limited: Int,
    seed: Int,
    k: Int,
) -> float:
    """`_channel` of a bfloat16 state, of which this is row k."""
    y, size, v = zero_f32(), spread(step), spread(step * u)
    low, high = spread(-limit), spread(limit)
    for i in range(0, n, 16):
        decay = exp(mul(size, load_f32(a + 4 * i)))
        s = fma(decay, load_bf16(h + 2 * i), mul(v, load_f32(b + 4 * i)))
        if limited:
            s = where_less(s, low, low, s)
            s = where_less(high, s, high, s)
        store_rounded(h + 2 * i, s, column_thresholds(seed, k, i))
        y = fma(s, load_f32(c + 4 * i), y)
    return total(y)


@kernel
def mamba1_channels(frame: int, args: int, thread: int, threads: int) -> None:
    """channels, n; x, dt, B, C with a row stride each; A, D or 0; limit, limited; state, its slot stride;
    slots, query_start, has_history; out (dense); positions of rows where the state is bfloat16, else 0."""
    inner, n, x, x_bytes, dt, dt_bytes, b, b_bytes, c, c_bytes, decay, skip = words(args, 2, 14)
    limit, limited = get_f32(args + 112), word(args, 15)
    state, slot_bytes, slots, starts, history, out, positions = words(args, 16, 23)
    row, seed = n * (4 if positions == 0 else 2), np.int64(0)
    parts = (inner + CHANNELS - 1) // CHANNELS
    while True:
        i, slot, past, begin, tokens = take_sequence(frame, args, parts, (slots, starts, history))
        if i < 0:
            return
        own, first = state + slot * slot_bytes, i * CHANNELS
        last = min(first + CHANNELS, np.int64(inner))
        if not past:
            for j in range(first * row // 4, last * row // 4, 16):
                store_left(own + 4 * j, zero_f32(), last * row // 4 - j)
        for t in range(begin, begin + tokens):
            ub, uc, to = b + t * b_bytes, c + t * c_bytes, out + 4 * t * inner
            if positions != 0:
                seed = np.int64(seed_at(positions, t))
            for k in range(first, last):
                u, step = get_f32(x + t * x_bytes + 4 * k), get_f32(dt + t * dt_bytes + 4 * k)
                h, a = own + row * k, decay + 4 * n * k
                if positions == 0:
                    y = _channel(h, n, step, u, a, ub, uc, limit, limited)
                else:
                    y = _move_rounded_channel(h, n, step, u, a, ub, uc, limit, limited, seed, k)
                if skip != 0:
                    y += get_f32(skip + 4 * k) * u
                put_f32(to + 4 * k, y)


@mamba1_scan.variant("native", on="cpu", when=rounds_columns("state"), native=True)
def _mamba1_scan(
    cpu: Executor,
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    state_limit: float | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    (count, inner), size = x.shape, B.shape[-1]
    rows, where = [TensorRows.of(m) for m in (x, dt, B, C)], Sequences.of(slots, query_start, has_history)
    if x.shape != dt.shape or B.shape != (count, size) or C.shape != B.shape:
        raise ShapeMismatch(
            f"a scan of x {list(x.shape)} wants dt of that shape and B, C [T, N]; got {list(dt.shape)}, "
            f"{list(B.shape)} and {list(C.shape)}"
        )
    dense("A", A, inner, size)
    if D is not None:
        dense("D", D, inner)
    slot_bytes = check_state(state, positions, count, inner, size)
    out = cpu.empty(count, inner)
    strided = [word for m, r in zip((x, dt, B, C), rows, strict=True) for word in (m, r.row_bytes)]
    limit = 0.0 if state_limit is None else float(state_limit)
    cpu.launch(
        mamba1_channels,
        *(inner, size, *strided, A, D, limit, state_limit is not None),
        *(state, slot_bytes, *where.words, out, positions if is_rounded(state) else None),
        rows=count,
        seqs=len(slots),
    )
    return out
