"""Queries and outputs of experts in attention: pairs sorted by expert, as in a feed-forward (`experts`)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from plait.errors import CannotRecord, ShapeMismatch
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import get_i64, words
from plait.kernels.cpu.moe.experts import KnownMaps, Maps, Pairs, sort_pairs
from plait.kernels.cpu.pointwise.copy_rows import copy_row
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import barrier, rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.ops.expert_heads import collect_heads, map_choices, spread_heads
from plait.ops.linear import Linear


@kernel
def heads_of_pairs(frame: int, args: int, thread: int, threads: int) -> None:
    """x (sorted, dense), places, k, groups, d, out (dense): head g of pair j becomes head g · k + j."""
    x, places, k, groups, d, out = words(args, 2, 8)
    pairs = rows_of(frame, args) * k
    for p in range(pairs * thread // threads, pairs * (thread + 1) // threads):
        source = x + get_i64(places + 8 * p) * groups * d * 4
        for g in range(groups):
            to = out + ((p // k * groups + g) * k + p % k) * d * 4
            copy_row(source + g * d * 4, to, d)


@kernel
def pairs_of_heads(frame: int, args: int, thread: int, threads: int) -> None:
    """index, its row and pair strides, k, experts, starts, places; x, its row and head strides, groups, d,
    out (sorted, dense): the way back, pairs being sorted by expert."""
    index, row_bytes, pair_bytes, k, count, starts, places = words(args, 2, 9)
    x, x_bytes, head_bytes, groups, d, out = words(args, 9, 15)
    tokens = rows_of(frame, args)
    if thread == 0:
        sort_pairs(index, row_bytes, pair_bytes, tokens, k, count, starts, places)
    barrier(frame, threads)
    pairs = tokens * k
    for p in range(pairs * thread // threads, pairs * (thread + 1) // threads):
        to = out + get_i64(places + 8 * p) * groups * d * 4
        for g in range(groups):
            copy_row(x + p // k * x_bytes + (g * k + p % k) * head_bytes, to + g * d * 4, d)


class _Sorted:
    """What the ops of one mixer's experts share: their weights are prepared in the first call."""

    def __init__(self, cpu: Executor) -> None:
        self._cpu, self._known = cpu, KnownMaps()

    def _find(self, linears: Sequence[Linear]) -> Maps | None:
        """None: they share no kernel, and are called one by one. Raises CannotRecord in a recording."""
        maps = self._known.find(linears)
        if not isinstance(maps, str):
            return maps
        if self._cpu.is_recording:
            raise CannotRecord(f"experts of attention cannot be recorded: {maps}")
        return None


def _check_pairs(index: Tensor, tokens: int, got: tuple[int, int], wanted: tuple[int, int]) -> None:
    if index.dtype != torch.int64 or index.dim() != 2 or len(index) != tokens or got != wanted:
        raise ShapeMismatch(
            f"experts of {wanted[0]} -> {wanted[1]} were given {tokens} tokens for {got[0]} -> {got[1]} and "
            f"indices {index.dtype} {list(index.shape)}"
        )


class SpreadHeads(_Sorted):
    def __call__(self, x: Tensor, index: Tensor, linears: Sequence[Linear], groups: int) -> Tensor:
        """See `ops.expert_heads.spread_heads`."""
        if (maps := self._find(linears)) is None:
            made: Tensor = spread_heads.reference(x, index, linears, groups)
            return made
        cpu, rows, k, n_out = self._cpu, TensorRows.of(x), index.shape[-1], maps.first.n_out
        _check_pairs(index, rows.count, (rows.width, n_out // groups * groups), (maps.first.n_in, n_out))
        pairs = Pairs.empty(cpu, index, len(maps.addresses))
        y = maps.multiply(cpu, pairs.sort(cpu, x), pairs)
        out = cpu.empty(rows.count, groups * k, n_out // groups)
        cpu.launch(heads_of_pairs, y, pairs.places, k, groups, n_out // groups, out, rows=rows.count)
        return out


class CollectHeads(_Sorted):
    def __call__(
        self, x: Tensor, weight: Tensor, index: Tensor, linears: Sequence[Linear], groups: int
    ) -> Tensor:
        """See `ops.expert_heads.collect_heads`."""
        if (maps := self._find(linears)) is None:
            summed: Tensor = collect_heads.reference(x, weight, index, linears, groups)
            return summed
        cpu, rows, k = self._cpu, TensorRows.of(x), index.shape[-1]
        n_in, n_out = maps.first.n_in, maps.first.n_out
        _check_pairs(index, rows.count, (rows.heads * rows.width, n_out), (n_in * k, n_out))
        if weight.dtype != torch.float32 or weight.shape != index.shape:
            raise ShapeMismatch(f"weights of pairs are {weight.dtype} {list(weight.shape)}")
        pairs, ordered = Pairs.empty(cpu, index, len(maps.addresses)), cpu.empty(rows.count * k, n_in)
        where = (x, *rows.strides, groups, rows.width, ordered)
        cpu.launch(pairs_of_heads, *pairs.words, *where, rows=rows.count)
        return pairs.weigh(cpu, maps.multiply(cpu, ordered, pairs), weight)


class MapChoices(_Sorted):
    def __call__(self, x: Tensor, index: Tensor, linears: Sequence[Linear], groups: int) -> Tensor:
        """See `ops.expert_heads.map_choices`."""
        if (maps := self._find(linears)) is None:
            made: Tensor = map_choices.reference(x, index, linears, groups)
            return made
        cpu, rows, k = self._cpu, TensorRows.of(x), index.shape[-1]
        n_in, n_out = maps.first.n_in, maps.first.n_out
        _check_pairs(index, rows.count, (rows.heads * rows.width, n_out), (n_in * k, n_out))
        pairs, ordered = Pairs.empty(cpu, index, len(maps.addresses)), cpu.empty(rows.count * k, n_in)
        where = (x, *rows.strides, groups, rows.width, ordered)
        cpu.launch(pairs_of_heads, *pairs.words, *where, rows=rows.count)
        y, out = maps.multiply(cpu, ordered, pairs), cpu.empty(rows.count, k, n_out)
        cpu.launch(heads_of_pairs, y, pairs.places, k, 1, n_out, out, rows=rows.count)
        return out


map_choices.variant("native", on="cpu", when=float32_rows, native=True)(MapChoices)
spread_heads.variant("native", on="cpu", when=float32_rows, native=True)(SpreadHeads)
collect_heads.variant("native", on="cpu", when=float32_rows, native=True)(CollectHeads)
