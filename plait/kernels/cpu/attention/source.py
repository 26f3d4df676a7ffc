"""Generates the source of attention kernels: register tiles for both products, and the walk over the work.

`rows.py` holds what happens between the products. Every score is one chain of multiply-adds over the columns
of a key. Every column of an output is one chain over the tokens of a split. So tiles of any size give a row
the same bits.

    a unit: up to TILES tiles of query rows of one kv head       a part or state in memory:
                 split 0     split 1     split 2             [largest, sum, .. | value columns]
    tile 0    [scores|V]->[scores|V]->[scores|V]-> state
    tile 1    [scores|V]->[scores|V]->[scores|V]-> state
                  part        part        part     fold, left to right

Invariants: splits start at fixed positions, and parts are folded in their order, whichever thread made them.
One thread takes a unit from the counter and alone writes its outputs, or its parts if a long sequence is
split: then `gather` folds them behind a barrier. A key that a row must not see adds an exact 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from types import ModuleType
from typing import ClassVar

from plait.kernels.cpu.attention.rows import SIZES, TILE
from plait.kernels.cpu.attention.seven_bits import UPPER  # and `join_upper`, which `Writer` has then
from plait.kernels.cpu.codegen.kernel import load_generated
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, digest, straight
from plait.kernels.cpu.codegen.target import wide_registers
from plait.kernels.cpu.codegen.vec import name_arguments
from plait.ops.entry import KEY_GROUP, NIBBLE_GROUP, NIBBLE_MOST

TILES = 8  # of one unit of work, at most: they share the keys and values of a split while those are in L2
SEVENS = 7  # in place of a size: codes of seven bits
WIDE = wide_registers()
HELD = 24 if WIDE else 6  # vectors of sums that registers hold next to what is multiplied
FEW = 4  # rows: tiles up to here wait for memory, and ask for the next group while they work on one


@dataclass(frozen=True, slots=True)
class Form:
    """What one kernel is made for. Sizes are of one cached number, in bytes (4 float32, 2 bfloat16, 1 int8),
    0 of int4, and SEVENS of values and latents of int7, which has the keys of int8.

    Behind sixteen int8 keys lie their scales: for every KEY_GROUP columns sixteen bfloat16. Behind as many
    values of int8 or int7 lie sixteen scales, and the statement `weigh` multiplies a row's exponentials with
    them; or each token has a scale for every `value_group` columns behind its own.

    Behind sixteen int4 keys lie for every NIBBLE_GROUP columns sixteen steps and sixteen offsets; a token's
    int4 and int7 values lie as `ops.entry` says.
    """

    name: str
    span: int  # tokens
    key_size: (
        int  # 4, 1: [column][token]; 2: [column pair][token][2]; 0: [column pair][token], half a byte each
    )
    value_size: int
    stride: str  # bytes from token to token, in terms of `args`
    locate: str  # the statement that finds the groups of a split: see `find`
    next_keys: str = ""  # bytes from keys to those of the next kv head; "": keys are not fetched ahead
    least: int = 1  # tiles of a unit of work, at least
    prelude: str = ""  # functions that `locate` calls
    weigh: str = "pass"
    lean: str = "pass"  # what the distance of keys adds to their products with a row
    value_group: int = 0
    query: int = 0  # bytes from one packed row to the next, if not as many as numbers take
    # What a kernel on tiles of its own has instead (`amx.attention`):
    rows: int = TILE  # of which products are computed together
    before: int = 0  # bytes of a thread before what `attend` knows of
    more: int = 0  # bytes behind it for every value column
    products: str = ""  # the two blocks
    pack: str = "pack"
    size: str = "size_of(left)"
    values: str = "stride"  # what stands for it in the product with values
    few: str = ""  # whether the kernel at word FEW is called instead
    enter: str = "pass"
    leave: str = "pass"
    paired: str = "pass"  # behind `locate`

    @property
    def line(self) -> int:
        """Bytes from row to row of the scores; the padding keeps rows out of one another's cache sets."""
        return 4 * (self.span + 16)

    def scratch(self, k_dim: int, v_dim: int) -> int:
        """Bytes per thread, in the order of `attend`, without what `locate` needs."""
        record = record_bytes(v_dim)
        packed, rows = TILES * self.rows * (self.query or k_dim * 4), self.rows
        own = 2 * self.span + rows * self.line + rows * record + packed + TILES * rows * record
        return self.before + own + self.more * v_dim


def record_bytes(v_dim: int) -> int:
    return 64 + -(-v_dim // 16) * 64


def places_of(line: int) -> int:
    """Bytes of the addresses of a split's groups, by `Form.line`: those of values lie so far behind keys'."""
    return line // 8 - 8


def module(form: Form) -> ModuleType:
    """The module with the kernel of this form, `attend`."""
    return load_generated(f"attention_{form.name}", source(form))


def source(form: Form) -> str:
    text = asdict(form) | {
        "digest": digest(
            "attention/source.py", "attention/rows.py", "attention/seven_bits.py", "codegen/bf16_dot.py"
        ),
        "line": form.line,
        "groups": form.span // 16,
        "tiles": TILES,
        "part_at": 2 * form.span + form.rows * form.line,
        "query": form.query or "4 * d",
    }
    text["upcoming"] = _UPCOMING.format(**text) if form.next_keys else ""
    text["few"] = _FEW.format(**text) if form.few else ""
    return "\n".join(
        (_HEAD.format(**text), form.prelude, form.products or _TILES.format(**text), _BODY.format(**text))
    )


def by_size(work: type, *fixed: int) -> object:
    """Block (size, and the fields of `work` behind `fixed`): its `write` for one of SIZES of rows."""

    def write(w: Writer, size: Word, *given: object) -> None:
        made = work(*fixed, *given)
        for rows in SIZES:
            w.when(size.equals(rows), partial(made.write, w, rows))

    name_arguments(write, 1 + len(fields(work)) - len(fixed))
    return straight(write)


def cut_rows(rows: int, vectors: int) -> list[range]:
    """The rows of a tile in equal parts: registers hold the sums of one, so many vectors for each row."""
    size = -(-rows // -(-rows * vectors // HELD))
    return [range(first, min(first + size, rows)) for first in range(0, rows, size)]


def vectors_of(rows: int, most: int) -> int:
    """Vectors of sums for each row where registers are few, up to `most`: more hide how long adding takes."""
    return min(most, {1: 4, 2: 2, 3: 2}.get(rows, 1))


@dataclass(frozen=True, slots=True)
class Scoring:
    """Products of queries with keys, several groups of sixteen at a time: what is fixed, and arguments.

    q: queries, [d][size]; places: addresses of the keys of groups; to: scores, a row every `line` bytes.
    """

    line: int
    key_size: int
    q: Word
    d: Word
    places: Word
    first: Word
    end: Word
    to: Word

    def write(self, w: Writer, rows: int) -> None:
        wide = 8 if rows <= 2 else 4 if rows <= 4 else 2
        wide = wide if WIDE else vectors_of(rows, wide)

        def groups(g: Word) -> None:
            own = [(g + i).least(self.end - 1) for i in range(wide)]  # a group too many is computed twice
            keys = [w.get_i64(self.places + 8 * i) for i in own]
            ahead = soon(w, self.places, self.end, self.line, own, g + wide) if rows <= FEW else []
            for part in cut_rows(rows, wide):
                for i, s in enumerate(self._sums(w, rows, part, keys, ahead)):
                    w.store_f32(self.to + self.line * (part.start + i // wide) + 64 * own[i % wide], s)

        w.loop(self.first, self.end, wide, (), groups)

    def _sums(self, w: Writer, rows: int, part: range, keys: list[Word], ahead: list[Word]) -> list[Value]:
        """Of some rows of the tile, key by key."""
        zeros, wide = [w.zero_f32()] * (len(part) * len(keys)), len(keys)
        one = partial(self._step, w, rows, part)

        def some(first: Word | int, end: Word) -> list[Value]:
            return w.loop(first, end, 1, zeros, lambda p, *sums: one(p, keys, ahead, sums))

        def scaled(n: Word, *sums: Value) -> list[Value]:
            first, steps = n * (KEY_GROUP // 4), self.d >> 2
            products = some(first, (first + KEY_GROUP // 4).least(steps))
            scales = [w.load_bf16(k + 16 * self.d + 32 * n) for k in keys]
            both = enumerate(zip(products, sums, strict=True))
            return [w.fma(p, scales[i % wide], s) for i, (p, s) in both]

        def offset(n: Word, *sums: Value) -> list[Value]:
            at = 8 * self.d + 64 * n
            scales = [(w.load_bf16(k + at), w.load_bf16(k + at + 32)) for k in keys]
            first = n * (NIBBLE_GROUP // 8)
            return w.loop(
                first, first + NIBBLE_GROUP // 8, 1, sums, lambda p, *now: one(p, keys, ahead, now, scales)
            )

        if self.key_size == 0:
            return w.loop(0, self.d >> 5, 1, zeros, offset)
        if self.key_size == 1:
            return w.loop(0, (self.d + (KEY_GROUP - 1)) >> KEY_GROUP.bit_length() - 1, 1, zeros, scaled)
        return some(0, self.d if self.key_size == 4 else self.d >> 1)

    def _step(
        self,
        w: Writer,
        rows: int,
        part: range,
        p: Word,
        keys: list[Word],
        ahead: list[Word],
        sums: Sequence[Value],
        scales: Sequence[tuple[Value, Value]] = (),
    ) -> list[Value]:
        """The next column, or as many as 64 bytes hold. scales: of int4, steps and offsets of each group."""
        for n in ahead:
            w.prefetch(n + 64 * p)
        if self.key_size == 0:
            columns = []
            for i in range(4):
                codes = [split_nibbles(w, k + 64 * p + 16 * i) for k in keys]
                columns += [
                    [w.fma(both[half], *scale) for both, scale in zip(codes, scales, strict=True)]
                    for half in range(2)
                ]
        elif self.key_size == 1:
            columns = [[w.to_f32(w.load_i8(k + 64 * p + 16 * i)) for k in keys] for i in range(4)]
        else:
            columns = [[(w.load_f32 if self.key_size == 4 else w.load_i32)(k + 64 * p) for k in keys]]
        if self.key_size == 2:
            columns = [[unpack(x) for x in columns[0]] for unpack in (w.low_bf16, w.high_bf16)]
        for i, xs in enumerate(columns):
            at = self.q + 4 * rows * len(columns) * p + 4 * rows * i
            sums = _multiply_add(w, xs, (at + 4 * r for r in part), sums)
        return list(sums)


def split_nibbles(w: Writer, at: Word) -> tuple[Value, Value]:
    """The lower and the upper halves of sixteen bytes, as numbers."""
    codes = w.load_u8(at)
    return w.to_f32(w.and_i32(codes, w.spread_int(NIBBLE_MOST))), w.to_f32(w.right(codes, 4))


def soon(w: Writer, places: Word, end: Word, line: int, own: Sequence[Word], then: Word) -> list[Word]:
    """What few rows fetch while they score the groups `own`: their values, and the keys of those after."""
    keys = [w.get_i64(places + 8 * (then + i).least(end - 1)) for i in range(len(own))]
    return [*keys, *(w.get_i64(places + places_of(line) + 8 * g) for g in own)]


def next_group(w: Writer, soon: list[Word], g: Word, i: Word | int) -> Word:
    """Group i of the four of which few rows fetch a quarter along with group g of the values: memory serves
    several streams faster than one. soon: as `Weighing` has it."""
    addresses, behind, count = soon
    found: Word = w.get_i64(addresses + 8 * ((g >> 2 << 2) + i).least(count - 1))
    return found + behind


def _multiply_add(w: Writer, xs: Sequence[Value], ys: Iterable[Word], sums: Sequence[Value]) -> list[Value]:
    """Sums, row by row, each with the product of its row's number (at an address of ys) and its column's."""
    found, left = [], iter(sums)
    for at in ys:
        y = w.spread_f32(at)
        found += [w.fma(x, y, next(left)) for x in xs]
    return found


@dataclass(frozen=True, slots=True)
class Weighing:
    """Sums of values weighted by rows of scores, over tokens of a split: what is fixed, and arguments.

    soon: what few rows fetch meanwhile: where addresses of groups of keys are, how many bytes behind those
    the keys lie, and how many groups there are.
    """

    line: int
    value_size: int
    group: int  # columns that share a scale behind their token's; 0: the scores have it already
    scores: Word
    start: Word  # tokens of the split
    end: Word
    places: Word  # addresses of the values of groups
    stride: Word  # bytes from token to token
    columns: Word
    out: Word  # as many records
    record: Word
    soon: list[Word]
    UNIT: ClassVar[int] = 16  # columns that are loaded together

    @property
    def packed(self) -> bool:
        """Whether columns come by thirty-two, half a byte or seven bits each."""
        return self.value_size in (0, SEVENS)

    def write(self, w: Writer, rows: int) -> None:
        bits, unit = 6 if rows <= 4 else 5, self.UNIT  # 64 columns at a time, or 32
        if not WIDE:
            bits = max(4 + vectors_of(rows, 4).bit_length() - 1, 5 if self.packed or unit == 32 else 4)
        if self.packed:
            w.loop(
                0,
                whole := self.columns >> bits << bits,
                1 << bits,
                (),
                lambda c: self._some(w, rows, c, 1 << bits - 4, None),
            )
            w.loop(whole, self.columns, 32, (), lambda c: self._some(w, rows, c, 2, None))
            return
        whole = self.columns >> bits << bits

        def last(c: Word) -> None:
            self._some(w, rows, c, 1, (self.columns - c).least(unit) >> (1 if self.value_size == 2 else 0))

        w.loop(0, whole, 1 << bits, (), lambda c: self._some(w, rows, c, (1 << bits) // unit, None))
        w.loop(whole, self.columns, unit, (), last)

    def _some(self, w: Writer, rows: int, c: Word, wide: int, left: Word | None) -> None:
        """Columns c and on: `wide` vectors of them, or `left` float32 as they lie."""
        for part in cut_rows(rows, wide):
            self._some_rows(w, part, c, wide, left, ahead=rows <= FEW and left is None)

    def _some_rows(
        self, w: Writer, rows: range, c: Word, wide: int, left: Word | None, *, ahead: bool
    ) -> None:
        offset = c >> 1 if self.packed else self.value_size * c

        def group(g: Word, *sums: Value) -> list[Value]:
            v, s = w.get_i64(self.places + 8 * g) + offset, self.scores + 64 * g
            stage = g - (self.start >> 4)
            part = offset + 4 * self.stride * (stage - (stage >> 2 << 2))
            low, high = (self.start - 16 * g).most(0), (self.end - 16 * g).least(16)

            def token(j: Word, *sums: Value) -> list[Value]:
                if ahead:
                    n = next_group(w, self.soon, stage, j - (j >> 2 << 2))
                    for i in range(0, (8 if self.packed else 16 * self.value_size) * wide, 64):
                        w.prefetch(n + part + self.stride * (j >> 2) + i)
                at = v + self.stride * j
                xs = self._decode(w, at, c, wide) if self.packed else self._read(w, at, wide, left)
                if self.group and self.value_size:
                    codes = (self.columns >> 3) * SEVENS if self.packed else self.columns
                    scale = w.spread(w.get_bf16(at - offset + codes + c // self.group * 2))
                    xs = [w.mul(x, scale) for x in xs]
                return _multiply_add(w, xs, (s + 4 * j + self.line * r for r in rows), sums)

            return w.loop(low, high, 1, sums, token)

        zeros = [w.zero_f32()] * (len(rows) * wide)
        for i, x in enumerate(w.loop(self.start >> 4, (self.end + 15) >> 4, 1, zeros, group)):
            record = self.out + self.record * (rows.start + i // wide)
            w.store_f32(record + 64 + 4 * c + 64 * (i % wide), x)

    def _decode(self, w: Writer, at: Word, c: Word, wide: int) -> list[Value]:
        """`wide` vectors of int4 or int7, from column c on. at: their codes, or the lower bits of these."""
        found = []
        for i in range(wide // 2):
            if self.value_size:
                upper = at - (c >> 1) + (self.columns >> 1) + (c >> 4) * UPPER + 2 * UPPER * i
                codes = w.load_u8(at + 16 * i)
                halves = w.and_i32(codes, w.spread_int(NIBBLE_MOST)), w.right(codes, 4)
                found += [w.to_f32(w.join_upper(half, upper + UPPER * k)) for k, half in enumerate(halves)]
                continue
            scales = at - (c >> 1) + (self.columns >> 1) + (c >> 3) + 4 * i
            step, offset = (w.spread(w.get_bf16(scales + 2 * k)) for k in range(2))
            found += [w.fma(code, step, offset) for code in split_nibbles(w, at + 16 * i)]
        return found

    def _read(self, w: Writer, at: Word, wide: int, left: Word | None) -> list[Value]:
        if self.value_size == 1:  # what lies behind the last column is read too, as numbers that are not used
            return [w.to_f32(w.load_i8(at + 16 * i)) for i in range(wide)]
        if left is None:
            load = w.load_f32 if self.value_size == 4 else w.load_bf16
            return [load(at + 16 * self.value_size * i) for i in range(wide)]
        x = w.load_some(at, left)
        if self.value_size == 4:
            return [x]
        bits = w.bits_i32(x)  # sixteen bfloat16 in the first eight lanes
        return [w.interleave_low(w.low_bf16(bits), w.high_bf16(bits))]


_HEAD = '''"""Attention kernel {name}: made by plait, from {digest}."""

import numpy as np

from plait.kernels.cpu.attention import source as tiles
from plait.kernels.cpu.attention.rows import *
from plait.kernels.cpu.runtime.frame import barrier, scratch_of, common_scratch
from plait.kernels.cpu.codegen.kernel import inline, kernel
from plait.kernels.cpu.codegen.vec import *


@inline
def widened(x):
    """Sixteen bfloat16 that lie in the first eight lanes."""
    bits = bits_i32(x)
    return interleave_low(low_bf16(bits), high_bf16(bits))
'''

_TILES = """

tile_scores = tiles.by_size(tiles.Scoring, {line}, {key_size})
tile_values = tiles.by_size(tiles.Weighing, {line}, {value_size}, {value_group})
"""

_FEW = """
    if {few}:
        call_kernel(word(args, FEW), frame, args, thread, threads)
        return"""

_UPCOMING = """
            if span + 1 < to_span:
                soon = upcoming(args, s, kv_head, at + {span}, high, scratch, copies)
            elif rest > 0 and to_span - from_span == 1:
                soon = scratch + 8 * first, {next_keys}, end - first
            elif rest > 0:
                soon = upcoming(args, s, kv_head + 1, low, high, scratch, copies)
            elif then >= 0 and then // units < seqs:
                other = then // units
                start = past_of(args, other)
                soon = upcoming(args, other, 0, first_key(args, other, start), start + 1, scratch, copies)"""

_BODY = '''
@inline
def find(args, s, kv_head, at, first, end, to, copies):
    """Write to `to` where the groups first..end of a span lie, which starts at position `at`."""
    {locate}


@inline
def upcoming(args, s, kv_head, low, high, scratch, copies):
    """Keys low..high of a sequence, up to the end of a span: where addresses of groups are, 0, how many."""
    at, to = low // {span} * {span}, scratch + {span}
    first, end = (low - at) // 16, (min(high - at, {span}) + 15) // 16
    find(args, s, kv_head, at, first, end, to, copies)
    return to + 8 * first, np.int64(0), end - first


@inline
def ticket(args, each):
    """The first of the next `each` units of work."""
    return np.int64(atomic_add(word(args, 1), np.int32(1))) * each


@inline
def first_span(args, s):
    return first_key(args, s, past_of(args, s)) // {span}


@inline
def spans_of(args, s):
    return (get_i64(word(args, LENS) + 8 * s) + {span} - 1) // {span} - first_span(args, s)


@inline
def units_of(args, s, rows, spans):
    """Units of work of one sequence: kv heads x pieces of `rows` rows (x spans, if those are apart)."""
    group, kv_heads = word(args, HEADS) // word(args, KV_HEADS), word(args, KV_HEADS)
    units = (rows_in(args, s) * group + rows - 1) // rows * kv_heads
    return units * spans_of(args, s) if spans > 0 else units


@inline
def plan(args, seqs, threads):
    """(rows of a unit; into how many spans a row is divided at most, 0 if spans are not units; how many units
    a thread takes at a time: where every sequence has one token, all heads of one).
    """
    group, tokens, tiles, spans, units = word(args, HEADS) // word(args, KV_HEADS), 0, 0, 0, 0
    for s in range(seqs):
        tokens += rows_in(args, s)
        tiles += (rows_in(args, s) * group + {rows} - 1) // {rows} * word(args, KV_HEADS)
        spans = max(spans, spans_of(args, s))
    rows = min(max(tiles // (4 * threads), {least}), {tiles}) * {rows}
    for s in range(seqs):
        units += units_of(args, s, rows, 0)
    wanted = tokens * word(args, HEADS) * spans * record_bytes(args)
    apart = threads > 1 and spans > 1 and units < 4 * threads and wanted <= word(args, BUDGET)
    many = tokens == seqs and units >= 4 * threads * word(args, KV_HEADS)
    return rows, spans if apart else 0, word(args, KV_HEADS) if many and not apart else 1


@inline
def part_of(frame, args, s, kv_head, row, spans, span):
    """Where the part of a row over a span waits for the others."""
    group = word(args, HEADS) // word(args, KV_HEADS)
    token = get_i64(word(args, START) + 8 * s) + row // group
    head = token * word(args, HEADS) + kv_head * group + row % group
    return common_scratch(frame) + (head * spans + span - first_span(args, s)) * record_bytes(args)


@inline
def gather(frame, args, thread, threads, seqs, spans):
    """Fold the parts that `attend` left, row by row."""
    group, record, turn = word(args, HEADS) // word(args, KV_HEADS), record_bytes(args), 0
    state = scratch_of(frame, thread)
    for s in range(seqs):
        past = past_of(args, s)
        for row in range(rows_in(args, s) * group):
            for kv_head in range(word(args, KV_HEADS)):
                turn += 1
                if turn % threads != thread:
                    continue
                position = past + row // group
                begin(args, s, kv_head, row, state, record)
                last = last_key(args, s, position)
                for span in range(first_key(args, s, position) // {span}, last // {span} + 1):
                    fold(state, part_of(frame, args, s, kv_head, row, spans, span), record)
                finish(args, s, kv_head, row, state)


@kernel
def attend(frame, args, thread, threads):
    """Attention of every new token; units of work are taken from the counter.

    A unit is some rows of a kv head: over all they see, or over one span, for `gather`.
    """{few}
    seqs, kv_heads = get_i64(frame + 24), word(args, KV_HEADS)
    group, d, columns, stride = word(args, HEADS) // kv_heads, word(args, K_DIM), word(args, V_DIM), {stride}
    record, scratch = record_bytes(args), scratch_of(frame, thread) + {before}
    {enter}
    scores, parts, values = scratch + 2 * {span}, scratch + {part_at}, scratch + 8 * {groups}
    packed, query = parts + {rows} * record, {query}
    states = packed + {tiles} * {rows} * query
    copies = states + {tiles} * {rows} * record
    rows, spans, each = plan(args, seqs, threads)
    s, before, units, taken, rest = -1, 0, 0, np.int64(0), 0
    then = np.int64(-1)  # taken before the last unit is done, so that its first keys are fetched
    while True:
        if rest == 0:
            taken, then, rest = then if then >= 0 else ticket(args, each), np.int64(-1), each
        unit, taken, rest = taken, taken + 1, rest - 1
        if each > 1 and rest == 0:
            then = ticket(args, each)
        while s < seqs and unit >= before + units:
            before, s = before + units, s + 1
            units = units_of(args, s, rows, spans) if s < seqs else 0
        if s >= seqs:
            break
        unit, only = unit - before, 0
        if spans > 0:
            own = spans_of(args, s)
            unit, only = unit // own, first_span(args, s) + unit % own
        kv_head, base, past = unit % kv_heads, unit // kv_heads * rows, past_of(args, s)
        count = min(rows, rows_in(args, s) * group - base)
        low = first_key(args, s, past + base // group)
        high = last_key(args, s, past + (base + count - 1) // group) + 1
        from_span, to_span = low // {span}, (high + {span} - 1) // {span}
        if spans > 0:
            from_span, to_span = max(from_span, only), min(to_span, only + 1)
        if from_span >= to_span:
            continue
        for i in range(0, count, {rows}):
            left = min(count - i, {rows})
            {pack}(args, s, kv_head, base + i, left, {size}, packed + i * query)
        alone = spans == 0 and to_span - from_span == 1 and word(args, SINKS) == 0  # a part is all there is
        if not alone:
            for i in range(count):
                begin(args, s, kv_head, base + i, states + i * record, record)
        for span in range(from_span, to_span):
            at = span * {span}
            first, end = max(low - at, 0) // 16, (min(high - at, {span}) + 15) // 16
            find(args, s, kv_head, at, first, end, scratch, copies)
            {paired}
            soon = scratch + 8 * first, np.int64(0), end - first{upcoming}
            for i in range(0, count, {rows}):
                left = min(count - i, {rows})
                earliest = past + (base + i) // group
                latest = last_key(args, s, past + (base + i + left - 1) // group)
                start, stop = max(first_key(args, s, earliest) - at, 0), min(latest + 1 - at, {span})
                if start >= stop:
                    continue
                head, tail, size = start // 16, (stop + 15) // 16, {size}
                tile_scores(size, packed + i * query, d, scratch, head, tail, scores)
                for r in range(left):
                    position = past + (base + i + r) // group
                    {lean}
                    near, last = first_key(args, s, position), last_key(args, s, position)
                    soften(args, scores + r * {line}, head, tail, at, near, last, parts + r * record)
                    {weigh}
                tile_values(size, scores, start, stop, values, {values}, columns, parts, record, soon)
                for r in range(left):
                    part = parts + r * record
                    if alone:
                        finish(args, s, kv_head, base + i + r, part)
                    elif spans > 0:
                        copy(part, part_of(frame, args, s, kv_head, base + i + r, spans, span), record)
                    else:
                        fold(states + (i + r) * record, part, record)
        if spans == 0 and not alone:
            for i in range(count):
                finish(args, s, kv_head, base + i, states + i * record)
    {leave}
    if spans > 0:
        barrier(frame, threads)
        gather(frame, args, thread, threads, seqs, spans)
'''
