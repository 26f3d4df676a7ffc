"""Attention over bfloat16 caches by products of bfloat16 pairs: queries and weights of values are rounded.

Keys lie as pairs already, values are paired while they are loaded, for all rows of a tile.
`bf16_dot.HARDWARE` decides between the instruction and two multiply-adds of unpacked numbers in the same
order: a row's bits are the same on every machine, as long as no sum is subnormal. The rest is in `source`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from plait.kernels.cpu.attention import attention
from plait.kernels.cpu.attention.rows import QUERY, WIDEST
from plait.kernels.cpu.attention.source import FEW, Form, Scoring, Weighing, cut_rows, module, next_group
from plait.kernels.cpu.codegen.bf16_dot import HARDWARE, Pairs, spread_pair, write_dot
from plait.kernels.cpu.codegen.kernel import Kernel
from plait.kernels.cpu.codegen.llvm_writer import Value, Word, Writer, digest
from plait.kernels.cpu.runtime.executor import Executor
from plait.ops.attention import paged_attention
from plait.ops.registry import OpFacts

NAME = "native-bf16"

_PRELUDE = """
from plait.kernels.cpu.attention import bf16  # {digest}

begin, fold, pack, soften = begin_pairs, fold_pairs, pack_pairs, soften_pairs
"""
_PRODUCTS = """
tile_scores = tiles.by_size(bf16.PairScoring, {line}, 2)
tile_values = tiles.by_size(bf16.PairWeighing, {line}, 2, 0)
"""


def _multiply_pairs(w: Writer, xs: Sequence[Pairs], ys: Sequence[Word], sums: Sequence[Value]) -> list[Value]:
    """Sums, row by row, each with the products of its row's pair (at an address of ys) and its column's."""
    found, left = [], iter(sums)
    for at in ys:
        y = spread_pair(w, at)
        found += [write_dot(w, x, y, next(left)) for x in xs]
    return found


class PairScoring(Scoring):
    """Products of queries that `rows.pack_pairs` left with keys."""

    def _sums(self, w: Writer, rows: int, part: range, keys: list[Word], ahead: list[Word]) -> list[Value]:
        def step(p: Word, *sums: Value) -> list[Value]:
            for n in ahead:
                w.prefetch(n + 64 * p)
            bits = [w.load_i32(k + 64 * p) for k in keys]
            xs = bits if HARDWARE else [(w.low_bf16(x), w.high_bf16(x)) for x in bits]
            at = self.q + (4 if HARDWARE else 8) * p
            return _multiply_pairs(w, xs, [at + QUERY * r for r in part], sums)

        return w.loop(0, self.d >> 1, 1, [w.zero_f32()] * (len(part) * len(keys)), step)


class PairWeighing(Weighing):
    """Sums of values weighted by what `rows.soften_pairs` left."""

    UNIT = 32

    def _some(self, w: Writer, rows: int, c: Word, wide: int, left: Word | None) -> None:
        """Columns c and on: 32 * `wide` of them, or `left` pairs as they lie."""
        for part in cut_rows(rows, 2 * wide):
            self._some_rows(w, part, c, wide, left, ahead=rows <= FEW and left is None)

    def _some_rows(
        self, w: Writer, rows: range, c: Word, wide: int, left: Word | None, *, ahead: bool
    ) -> None:
        def group(g: Word, *sums: Value) -> list[Value]:
            v = w.get_i64(self.places + 8 * g) + 2 * c
            stage = g - (self.start >> 4)
            ns = [next_group(w, self.soon, stage, i) for i in range(4)] if ahead else []
            part = 2 * c + 4 * self.stride * (stage - (stage >> 2 << 2))
            low, high = (self.start - 16 * g).most(0), (self.end - 16 * g).least(16)

            def pair(j: Word, *sums: Value) -> list[Value]:
                # A token of the first or last pair may be hidden: the other is read instead, at weight 0.
                both = [self.stride * (2 * j).most(low), self.stride * (2 * j + 1).least(high - 1)]
                for n in ns:  # of 64 columns, which are two lines
                    w.prefetch(n + part + self.stride * (j >> 1) + 64 * (j - (j >> 1 << 1)))
                xs = self._read_pairs(w, [v + at for at in both], wide, left)
                y = self.scores + (32 * g + 4 * j if HARDWARE else 64 * g + 8 * j)
                return _multiply_pairs(w, xs, [y + self.line * r for r in rows], sums)

            return w.loop(low >> 1, (high + 1) >> 1, 1, sums, pair)

        zeros = [w.zero_f32()] * (2 * len(rows) * wide)
        sums = w.loop(self.start >> 4, (self.end + 15) >> 4, 1, zeros, group)
        for i in range(0, len(sums), 2):
            pair = sums[i : i + 2]
            if HARDWARE:
                pair = [w.columns_low(*pair), w.columns_high(*pair)]
            record = self.out + self.record * (rows.start + i // (2 * wide))
            at = record + 64 + 4 * c + 64 * (i % (2 * wide))
            w.store_f32(at, pair[0])
            if left is None:
                w.store_f32(at + 64, pair[1])
            else:
                w.when(left.above(8), partial(w.store_f32, at + 64, pair[1]))

    def _read_pairs(self, w: Writer, both: list[Word], wide: int, left: Word | None) -> list[Pairs]:
        """Pairs of two tokens' columns: with the instruction in the order of `words_low` and `words_high`."""
        found: list[Pairs] = []
        for i in range(0, 64 * wide, 64):
            if HARDWARE or left is not None:
                x, y = (
                    w.load_i32(at + i) if left is None else w.bits_i32(w.load_some(at, left)) for at in both
                )
            if HARDWARE:
                found += [w.words_low(x, y), w.words_high(x, y)]
            elif left is None:
                found += [[w.load_bf16(at + n) for at in both] for n in (i, i + 32)]
            else:
                parts = [(w.low_bf16(v), w.high_bf16(v)) for v in (x, y)]
                found += [[put(*p) for p in parts] for put in (w.interleave_low, w.interleave_high)]
        return found


def form_of() -> Form:
    """What the kernel is made for."""
    plain = attention.form_of(torch.bfloat16)
    made_from = digest("attention/bf16.py", "codegen/bf16_dot.py")
    return replace(
        plain,
        name="bfloat16_pairs",
        prelude=_PRELUDE.format(digest=made_from),
        products=_PRODUCTS.format(line=plain.line),
        query=QUERY,
        lean=attention.LEAN.format(line=plain.line, unit="LOG2_E"),
    )


@cache
def attend() -> Kernel:
    """The kernel."""
    made: Kernel = module(form_of()).attend
    return made


def why_unserved(facts: OpFacts) -> str | None:
    """Why it cannot serve these facts, if so."""
    if (rounding := facts.sizes.get("activations", "float32")) != "int8":
        return f"it rounds queries to bfloat16, and activations are {rounding}"
    if (kept := facts.sizes.get("kv_dtype", "model")) != "bfloat16":
        return f"it reads caches of bfloat16, not of {kept}"
    if facts.sizes.get("dim", 2) > WIDEST:
        return f"it takes heads of at most {WIDEST}, not of {facts['dim']}"
    return attention.why_unserved(facts)


@paged_attention.variant(NAME, on="cpu", when=why_unserved, native=True, tolerance={torch.float32: 1e-2})
def paged_attention_by_pairs(cpu: Executor, *args: Any, **more: Any) -> Tensor:
    """See `ops.attention.paged_attention`."""
    return attention.attend(cpu, attention.Chosen(attend(), form_of()), *args, **more)
