"""Mixture of experts: rows sorted by expert, so that one product reads every chosen expert once.

Each token has its k pairs (token, expert); sorted by expert, then by token, they are the rows of two grouped
products (`packed`). Every token then adds its rows up in the order of its experts' numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from plait.errors import CannotRecord, ShapeMismatch
from plait.kernels.cpu.codegen import vec
from plait.kernels.cpu.codegen.kernel import Kernel, inline, kernel
from plait.kernels.cpu.codegen.kinds import Int
from plait.kernels.cpu.linear.glu import join_of
from plait.kernels.cpu.linear.low_rank import ExpertTables
from plait.kernels.cpu.linear.packed import Groups, PackedWeight, check_bias, multiply
from plait.kernels.cpu.pointwise.copy_rows import copy_row
from plait.kernels.cpu.runtime.address_table import keep_addresses
from plait.kernels.cpu.runtime.executor import Executor
from plait.kernels.cpu.runtime.frame import barrier, rows_of
from plait.kernels.cpu.runtime.row_checks import TensorRows, float32_rows
from plait.ops.activation import activate, gate_rows
from plait.ops.linear import Activations, Linear
from plait.ops.moe import experts
from plait.ops.registry import OpFacts


@inline
def sort_pairs(
    index: Int, row_bytes: Int, pair_bytes: Int, tokens: Int, k: Int, count: Int, starts: Int, places: Int
) -> None:
    """Where each pair goes if pairs are sorted by expert, then by token; where each expert's rows start."""
    for e in range(count + 1):
        vec.put_i64(starts + 8 * e, 0)
    for t in range(tokens):
        for j in range(k):
            e = vec.get_i64(index + t * row_bytes + j * pair_bytes)
            vec.put_i64(starts + 8 * e + 8, vec.get_i64(starts + 8 * e + 8) + 1)
    for e in range(count):
        vec.put_i64(starts + 8 * e + 8, vec.get_i64(starts + 8 * e + 8) + vec.get_i64(starts + 8 * e))
    for t in range(tokens):  # starts[e] walks to the end of e, which is where e + 1 starts
        for j in range(k):
            e = vec.get_i64(index + t * row_bytes + j * pair_bytes)
            place = vec.get_i64(starts + 8 * e)
            vec.put_i64(places + 8 * (t * k + j), place)
            vec.put_i64(starts + 8 * e, place + 1)
    for i in range(count):
        e = count - i
        vec.put_i64(starts + 8 * e, vec.get_i64(starts + 8 * e - 8))
    vec.put_i64(starts, 0)


@kernel
def sort_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """index, its row and pair strides, k, experts, starts, places, x, its row stride, n, out (dense)."""
    index, row_bytes, pair_bytes, k, count, starts, places = vec.words(args, 2, 9)
    x, x_bytes, n, out = vec.words(args, 9, 13)
    tokens = rows_of(frame, args)
    if thread == 0:
        sort_pairs(index, row_bytes, pair_bytes, tokens, k, count, starts, places)
    barrier(frame, threads)
    pairs = tokens * k
    for p in range(pairs * thread // threads, pairs * (thread + 1) // threads):
        copy_row(x + p // k * x_bytes, out + vec.get_i64(places + 8 * p) * 4 * n, n)


@kernel
def add_biases(frame: int, args: int, thread: int, threads: int) -> None:
    """x (sorted, dense; changed in place), n, starts, experts, addresses of their biases [n].

    A pair finds its expert among the starts by halving.
    """
    x, n, starts, count, biases = vec.words(args, 2, 7)
    pairs = vec.get_i64(starts + 8 * count)
    for p in range(pairs * thread // threads, pairs * (thread + 1) // threads):
        low: Int = np.int64(0)
        high = count  # starts[low] <= p < starts[high]
        while high - low > 1:
            middle = (low + high) // 2
            if vec.get_i64(starts + 8 * middle) <= p:
                low = middle
            else:
                high = middle
        row, bias = x + 4 * n * p, vec.get_i64(biases + 8 * low)
        for i in range(0, n, 16):
            left = np.int32(n - i)
            both = vec.add(vec.load_some(row + 4 * i, left), vec.load_some(bias + 4 * i, left))
            vec.store_some(row + 4 * i, both, left)


@kernel
def weigh_rows(frame: int, args: int, thread: int, threads: int) -> None:
    """x (sorted, dense), n, places, k, weight, its row and pair strides, shared or 0, its row stride, out.

    out (dense) = shared + the sum of weight · row over the k rows of each token, in the order they lie in.
    """
    x, n, places, k, weight, weight_row, weight_pair, shared, shared_bytes, out = vec.words(args, 2, 12)
    tokens = rows_of(frame, args)
    for t in range(tokens * thread // threads, tokens * (thread + 1) // threads):
        to = out + 4 * n * t
        before: Int = np.int64(-1)
        for i in range(0, n, 16):
            left = np.int32(n - i)
            start = vec.zero_f32()
            if shared != 0:
                start = vec.load_some(shared + t * shared_bytes + 4 * i, left)
            vec.store_some(to + 4 * i, start, left)
        for _ in range(k):
            pair: Int = np.int64(-1)
            place: Int = pair
            for j in range(k):
                other = vec.get_i64(places + 8 * (t * k + j))
                if other > before and (pair < 0 or other < place):
                    pair, place = j, other
            factor = vec.spread(vec.get_f32(weight + t * weight_row + pair * weight_pair))
            before, row = place, x + place * 4 * n
            for i in range(0, n, 16):
                left = np.int32(n - i)
                value = vec.fma(factor, vec.load_some(row + 4 * i, left), vec.load_some(to + 4 * i, left))
                vec.store_some(to + 4 * i, value, left)


@dataclass(frozen=True, slots=True)
class Pairs:
    """(token, expert) pairs sorted by expert, once a kernel has filled `starts` and `places`."""

    index: Tensor  # int64 [tokens, k]: experts
    starts: Tensor  # int64 [experts + 1]: where the rows of each begin
    places: Tensor  # int64 [tokens, k]: where the row of each pair lies

    @classmethod
    def empty(cls, cpu: Executor, index: Tensor, count: int) -> Pairs:
        """Of `count` experts, not sorted yet."""
        starts, places = cpu.empty(count + 1, dtype=torch.int64), cpu.empty(*index.shape, dtype=torch.int64)
        return cls(index, starts, places)

    @property
    def words(self) -> tuple[object, ...]:
        """What kernels that sort pairs get first."""
        k, count = self.index.shape[-1], len(self.starts) - 1
        strides = (8 * self.index.stride(0), 8 * self.index.stride(1))
        return self.index, *strides, k, count, self.starts, self.places

    def sort(self, cpu: Executor, x: Tensor) -> Tensor:
        """Sort the pairs. [tokens, n] -> the row of each pair, in their order: [tokens · k, n]."""
        rows = TensorRows.of(x)
        ordered = cpu.empty(self.places.numel(), rows.width)
        cpu.launch(sort_rows, *self.words, x, rows.row_bytes, rows.width, ordered, rows=rows.count)
        return ordered

    def weigh(self, cpu: Executor, y: Tensor, weight: Tensor, shared: Tensor | None = None) -> Tensor:
        """Sorted rows [tokens · k, n] -> `shared` + the weighted sum of each token's: [tokens, n]."""
        tokens, k, n = *self.index.shape, y.shape[-1]
        out = cpu.empty(tokens, n)
        strides = (4 * weight.stride(0), 4 * weight.stride(1))
        more = (shared, 4 * shared.stride(0) if shared is not None else 0)
        cpu.launch(weigh_rows, y, n, self.places, k, weight, *strides, *more, out, rows=tokens)
        return out


@dataclass(frozen=True, slots=True)
class Maps:
    """Weight matrices of one shape and storage, one for each expert, which one grouped product reads."""

    first: PackedWeight
    rounding: Activations
    addresses: Tensor  # int64 [experts]
    biases: Tensor | None  # int64 [experts]: addresses of float32 [n_out]
    orders: Tensor | None  # int64 [experts]: addresses of the orders of their columns
    tables: ExpertTables | None  # of adapters

    @classmethod
    def of(cls, linears: Sequence[Linear]) -> Maps | str:
        """Or why they cannot share a product."""
        parts = [linear.only_part for linear in linears]
        packed, biases, kinds = [], list[Any](), set()
        for e, part in enumerate(parts):
            if part is None or not isinstance(part[0], PackedWeight):
                return f"expert {e} is not one packed weight matrix"
            weight, bias, rounding = part
            packed.append(weight)
            biases.append(bias)
            more = [] if bias is None else ["biased"]
            kind = (weight.kind, weight.n_in, weight.n_out, rounding, *more)
            kinds.add((kind, id(weight.kernel), weight.order is not None))
        if len(kinds) != 1:
            return f"experts are stored in several ways: {sorted(kind for kind, *_ in kinds)}"
        places = None if biases[0] is None else _addresses([check_bias(bias) for bias in biases])
        orders = None if packed[0].order is None else _addresses([weight.order for weight in packed])
        addresses = _addresses([weight.data for weight in packed])
        return cls(packed[0], rounding, addresses, places, orders, ExpertTables.of(linears))

    def multiply(self, cpu: Executor, x: Tensor, pairs: Pairs, join: Kernel | None = None) -> Tensor:
        """Sorted rows through the weights of their experts, with biases and adapters."""
        count, first, tokens = len(self.addresses), self.first, len(pairs.index)
        groups = Groups(count, pairs.starts, self.addresses, self.orders)
        y = multiply(cpu, x, first, None, self.rounding, groups=groups, rows=tokens, join=join)
        if self.biases is not None:
            cpu.launch(add_biases, y, first.n_out, pairs.starts, count, self.biases, rows=tokens)
        if self.tables is not None:
            self.tables.add(cpu, y, x, pairs.places, pairs.index)
        return y


class KnownMaps:
    """The `Maps` of one layer's experts, made in the first call."""

    def __init__(self) -> None:
        self._seen: Sequence[Linear] = ()
        self._maps: Maps | str = ""

    def find(self, linears: Sequence[Linear]) -> Maps | str:
        """Or why they cannot share a product."""
        if self._seen is not linears:
            self._maps, self._seen = Maps.of(linears), linears
        return self._maps


def _addresses(tensors: Sequence[Tensor]) -> Tensor:
    return keep_addresses(np.array([tensor.data_ptr() for tensor in tensors], np.int64), tensors)


class GroupedExperts:
    """The native `experts` of one layer, which prepares the layer's weights in the first call."""

    def __init__(self, cpu: Executor) -> None:
        self._cpu = cpu
        facts = OpFacts("cpu", torch.float32, {}, cpu)
        self._activate, self._gate_rows = activate.bind(facts)[0], gate_rows.bind(facts)[0]
        self._up, self._down = KnownMaps(), KnownMaps()

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        index: Tensor,
        up: Sequence[Linear],
        down: Sequence[Linear],
        activation: tuple[str, bool],
        shared: Tensor | None,
        gate: Tensor | None = None,
    ) -> Tensor:
        """See `ops.moe.experts`; indices must be those of experts, as `route` gives them.

        Raises CannotRecord in a recording if the weights do not share a kernel: then they are called singly.
        """
        first, second = self._up.find(up), self._down.find(down)
        if isinstance(first, str) or isinstance(second, str):
            if self._cpu.is_recording:
                why = " and ".join(m for m in (first, second) if isinstance(m, str))
                raise CannotRecord(f"a mixture of experts cannot be recorded: {why}")
            summed: Tensor = experts.reference(x, weight, index, up, down, activation, shared, gate)
            return summed
        if shared is not None and gate is not None:
            shared = self._gate_rows(shared, gate)
        cpu, (tokens, k) = self._cpu, index.shape
        _check(x, weight, index, first.first, second.first, activation[1], shared)
        pairs = Pairs.empty(cpu, index, len(first.addresses))
        ordered = pairs.sort(cpu, x)
        is_joined = first.biases is None and first.tables is None
        join = join_of(first.first, *activation) if is_joined else None
        h = first.multiply(cpu, ordered, pairs, join)
        if join is None:
            # As many rows as pairs: k "heads" of each token, so that the frame's count of tokens is right.
            h = self._activate(h.view(tokens, k, -1), *activation).view(tokens * k, -1)
        return pairs.weigh(cpu, second.multiply(cpu, h, pairs), weight, shared)


def _check(
    x: Tensor, weight: Tensor, index: Tensor, up: PackedWeight, down: PackedWeight, gated: bool,
    shared: Tensor | None,
) -> None:  # fmt: skip
    """Raises ShapeMismatch if kernels would misread their arguments."""
    size = up.n_out // 2 if gated else up.n_out
    if index.dtype != torch.int64 or weight.dtype != torch.float32 or index.shape != weight.shape:
        raise ShapeMismatch(
            f"pairs want int64 and float32 [tokens, k], got {index.dtype} {list(index.shape)} and "
            f"{weight.dtype} {list(weight.shape)}"
        )
    if index.dim() != 2 or len(index) != len(x) or x.dim() != 2:
        raise ShapeMismatch(f"{list(x.shape)} rows and {list(index.shape)} pairs do not match")
    if (up.n_in, down.n_in, down.n_out) != (x.shape[1], size, x.shape[1]):
        raise ShapeMismatch(
            f"experts {up.n_in} -> {up.n_out}, {down.n_in} -> {down.n_out} do not fit rows of {x.shape[1]}"
        )
    if shared is not None and (shared.shape != x.shape or TensorRows.of(shared).count != len(x)):
        raise ShapeMismatch(f"the shared expert gave {list(shared.shape)} next to rows of {list(x.shape)}")


experts.variant("native", on="cpu", when=float32_rows, native=True)(GroupedExperts)
