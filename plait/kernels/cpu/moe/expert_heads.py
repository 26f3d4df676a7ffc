"""Queries and outputs of experts in attention: pairs sorted by expert, as in a feed-forward (`experts`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from plait.errors import CannotRecord, ShapeMismatch
from plait.kernels.cpu.codegen.kernel import kernel
from plait.kernels.cpu.codegen.vec import get_i64, load_some, store_some, words
from plait.kernels.cpu.linear.low_rank import ExpertTables
from plait.kernels.cpu.linear.packed import Groups, multiply
from plait.kernels.cpu.moe.experts import Maps, add_biases, sort_pairs, sort_rows, weigh_rows
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import barrier, rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.ops.expert_heads import collect_heads, spread_heads
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
            for i in range(0, d, 16):
                left = np.int32(d - i)
                store_some(to + 4 * i, load_some(source + (g * d + i) * 4, left), left)


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
            source = x + p // k * x_bytes + (g * k + p % k) * head_bytes
            for i in range(0, d, 16):
                left = np.int32(d - i)
                store_some(to + (g * d + i) * 4, load_some(source + 4 * i, left), left)


class _Sorted:
    """The linear layers of a mixer's experts, prepared in the first call."""

    def __init__(self, cpu: Executor) -> None:
        self.cpu = cpu
        self._seen: Sequence[Linear] = ()
        self._maps: Maps | str = ""
        self._tables: ExpertTables | None = None

    def find(self, linears: Sequence[Linear]) -> Maps | None:
        """None: they share no kernel, and are called one by one. Raises CannotRecord in a recording."""
        if self._seen is not linears:
            self._tables, self._maps, self._seen = ExpertTables.of(linears), Maps.of(linears), linears
        if isinstance(self._maps, str):
            if self.cpu.is_recording:
                raise CannotRecord(f"experts of attention cannot be recorded: {self._maps}")
            return None
        return self._maps

    def multiply(self, x: Tensor, maps: Maps, starts: Tensor, places: Tensor, index: Tensor) -> Tensor:
        """Sorted rows through the weights of their experts, with biases and adapters."""
        count, first, tokens = len(maps.addresses), maps.first, len(index)
        groups = Groups(count, starts, maps.addresses, maps.orders)
        y = multiply(self.cpu, x, first, None, maps.rounding, groups=groups, rows=tokens)
        if maps.biases is not None:
            self.cpu.launch(add_biases, y, first.n_out, starts, count, maps.biases, rows=tokens)
        if self._tables is not None:
            self._tables.add(self.cpu, y, x, places, index)
        return y


def _check_pairs(index: Tensor, tokens: int, got: tuple[int, int], wanted: tuple[int, int]) -> None:
    if index.dtype != torch.int64 or index.dim() != 2 or len(index) != tokens or got != wanted:
        raise ShapeMismatch(
            f"experts of {wanted[0]} -> {wanted[1]} were given {tokens} tokens for {got[0]} -> {got[1]} and "
            f"indices {index.dtype} {list(index.shape)}"
        )


class SpreadHeads(_Sorted):
    def __call__(self, x: Tensor, index: Tensor, linears: Sequence[Linear], groups: int) -> Tensor:
        """See `ops.expert_heads.spread_heads`."""
        if (maps := self.find(linears)) is None:
            made: Tensor = spread_heads.reference(x, index, linears, groups)
            return made
        cpu, rows, k, count = self.cpu, TensorRows.of(x), index.shape[-1], len(maps.addresses)
        n_out = maps.first.n_out
        _check_pairs(index, rows.count, (rows.width, n_out // groups * groups), (maps.first.n_in, n_out))
        starts, places = cpu.empty(count + 1, dtype=torch.int64), cpu.empty(rows.count, k, dtype=torch.int64)
        ordered = cpu.empty(rows.count * k, rows.width)
        cpu.launch(
            *(sort_rows, index, index.stride(0) * 8, index.stride(1) * 8, k, count, starts, places),
            *(x, rows.row_bytes, rows.width, ordered),
            rows=rows.count,
        )
        y = self.multiply(ordered, maps, starts, places, index)
        out = cpu.empty(rows.count, groups * k, n_out // groups)
        cpu.launch(heads_of_pairs, y, places, k, groups, n_out // groups, out, rows=rows.count)
        return out


class CollectHeads(_Sorted):
    def __call__(
        self, x: Tensor, weight: Tensor, index: Tensor, linears: Sequence[Linear], groups: int
    ) -> Tensor:
        """See `ops.expert_heads.collect_heads`."""
        if (maps := self.find(linears)) is None:
            summed: Tensor = collect_heads.reference(x, weight, index, linears, groups)
            return summed
        cpu, rows, k, count = self.cpu, TensorRows.of(x), index.shape[-1], len(maps.addresses)
        n_in, n_out = maps.first.n_in, maps.first.n_out
        _check_pairs(index, rows.count, (rows.heads * rows.width, n_out), (n_in * k, n_out))
        if weight.dtype != torch.float32 or weight.shape != index.shape:
            raise ShapeMismatch(f"weights of pairs are {weight.dtype} {list(weight.shape)}")
        starts, places = cpu.empty(count + 1, dtype=torch.int64), cpu.empty(rows.count, k, dtype=torch.int64)
        ordered = cpu.empty(rows.count * k, n_in)
        cpu.launch(
            *(pairs_of_heads, index, index.stride(0) * 8, index.stride(1) * 8, k, count, starts, places),
            *(x, *rows.strides, groups, rows.width, ordered),
            rows=rows.count,
        )
        y = self.multiply(ordered, maps, starts, places, index)
        out = cpu.empty(rows.count, n_out)
        cpu.launch(
            *(weigh_rows, y, n_out, places, k, weight, weight.stride(0) * 4, weight.stride(1) * 4),
            *(None, 0, out),
            rows=rows.count,
        )
        return out


spread_heads.variant("native", on="cpu", when=float32_rows, native=True)(SpreadHeads)
collect_heads.variant("native", on="cpu", when=float32_rows, native=True)(CollectHeads)
