"""Experts of many tokens: products of tiles of rows that chose the same expert, aligned on the device.

A pair is a token and one of its k experts. Four launches, with grids that are bounds from shapes alone:

    sort_pairs      grid (experts,)         pairs by expert, then by token; where each expert's pairs start
    multiply_groups grid (tiles, blocks)    gate, up and activation of a tile of pairs   -> h [pairs, size]
    multiply_groups grid (tiles, blocks)    the second product of a tile of pairs        -> y [pairs, hidden]
    sum_experts     grid (tokens, blocks)   the k rows of a token, weighed and added by the experts' numbers

A tile has BM sorted pairs of one expert. There are at most pairs / BM + experts of them; a program finds its
expert by adding up the tiles of all experts, and has nothing to do if its tile is not there.

Bits: a row's products are those of its own numbers, in the order of the inputs, wherever its tile begins. BM
follows from the shapes (pairs, experts); tiles of 16 rows are multiplied by other instructions than larger
ones. Between the two products rows are rounded to the dtype of x, as the reference does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, as_float32, split_options, with_float16
from plait.kernels.triton.maths import apply_activation, apply_gated
from plait.kernels.triton.moe.experts import (
    CLOSED,
    SHAPES,
    SUM_TYPES,
    TYPES,
    list_others,
    order_experts,
    pick_expert,
)
from plait.kernels.triton.moe.sums import SumEnds, end_constants, load_start, write_sum
from plait.kernels.triton.shared_memory import LEAST_SHARED, dense_memory, shared_limit
from plait.ops.launch import launch

BLOCK = 1024  # pairs that a program of `sort_pairs` looks at together
WIDE_REGISTERS = 168  # of a thread, for products of 64 rows in float32: left to itself, ptxas spills


@triton.jit(do_not_specialize=["pairs"])
def sort_pairs(index, starts, order, pairs, BLOCK: tl.constexpr):
    """index: [pairs] -> starts [experts + 1], order [pairs]: pairs by expert, then by number.

    Grid: (experts,). A program walks all pairs twice: to count those of lower experts, then to place its own.
    """
    await_previous()
    e, i = tl.program_id(0), tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    for at in range(0, pairs, BLOCK):
        chosen = tl.load(index + at + i, mask=at + i < pairs, other=1 << 20).to(tl.int32)
        before += (chosen < e).to(tl.int32)
    place = tl.sum(before, 0)
    tl.store(starts + e, place)
    for at in range(0, pairs, BLOCK):
        chosen = tl.load(index + at + i, mask=at + i < pairs, other=1 << 20).to(tl.int32)
        mine = (chosen == e).to(tl.int32)
        tl.store(order + place + tl.cumsum(mine, 0) - mine, at + i, mask=mine != 0)
        place += tl.sum(mine, 0)
    tl.store(starts + e + 1, place, mask=e == tl.num_programs(0) - 1)


@triton.jit
def find_tile(starts, tile, E: tl.constexpr, EP: tl.constexpr, BM: tl.constexpr):
    """(expert, first sorted pair of the tile, end of the expert's pairs); E for a tile that is not there."""
    ids = tl.arange(0, EP)
    first = tl.load(starts + tl.minimum(ids, E))
    count = tl.load(starts + tl.minimum(ids + 1, E)) - first
    tiles = (count + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    e = tl.minimum(tl.sum((ends <= tile).to(tl.int32), 0), E)
    mine = ids == e
    begin = tl.sum(tl.where(mine, first + (tile - ends + tiles) * BM, 0), 0)
    return e, begin, tl.sum(tl.where(mine, first + count, 0), 0)


@triton.jit
def multiply_groups(
    x, weights, bias, starts, order, y, n_in, size, x_row,
    E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr,
    BIASED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Rows of x times the weights of their experts -> y [pairs, size]. Grid: (tiles, size / BN).

    weights: [E, n_out, n_in], gate's rows first if GATED; a pair's row of x is pair // K. KIND: activation,
    or "" for none.
    """
    await_previous()
    e, begin, stop = find_tile(starts, tl.program_id(0), E, EP, BM)
    if e < E:
        at_pair = begin + tl.arange(0, BM)
        there = at_pair < stop
        pair = tl.load(order + at_pair, mask=there, other=0)
        cols, c = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
        ok = cols < size
        n_out = size * 2 if GATED else size
        # 32 bits hold one expert
        base = weights + e.to(tl.int64) * n_out * n_in + cols[None, :] * n_in
        line = x + (pair // K).to(tl.int64)[:, None] * x_row
        first, second = tl.zeros([BM, BN], tl.float32), tl.zeros([BM, BN], tl.float32)
        for at in range(0, n_in, BK):
            seen = at + c < n_in
            a = tl.load(line + at + c[None, :], mask=there[:, None] & seen[None, :], other=0.0)
            inside = seen[:, None] & ok[None, :]
            b = tl.load(base + at + c[:, None], mask=inside, other=0.0).to(a.dtype)
            first = tl.dot(a, b, first, input_precision="ieee")
            if GATED:
                # 32 bits hold one expert
                b = tl.load(base + size * n_in + at + c[:, None], mask=inside, other=0.0).to(a.dtype)
                second = tl.dot(a, b, second, input_precision="ieee")
        if BIASED:
            added = bias + e * n_out + cols
            first += tl.load(added, mask=ok, other=0.0).to(tl.float32)[None, :]
            if GATED:
                second += tl.load(added + size, mask=ok, other=0.0).to(tl.float32)[None, :]
        if KIND != "":
            first = apply_gated(first, second, KIND) if GATED else apply_activation(first, KIND)
        place = y + pair.to(tl.int64)[:, None] * size + cols[None, :]
        tl.store(place, first.to(y.dtype.element_ty), mask=there[:, None] & ok[None, :])


@triton.jit
def sum_experts(
    y, weight, index, shared, gate, out, squares, residual, added, norm, hidden, shared_row, scale,
    K: tl.constexpr, KP: tl.constexpr, SHARED: tl.constexpr, CLOSED: tl.constexpr, ADDS: tl.constexpr,
    SCALED: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """y: [T * K, hidden], weight: [T, K] -> out [T, hidden], by the experts' numbers. Grid: (T, blocks).

    shared, gate: see `load_start`; out and the others: `write_sum`.
    """
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    ok = cols < hidden
    order = order_experts(index, token, K, KP)
    total = load_start(shared, gate, token, cols, ok, shared_row, SHARED, CLOSED, BN)
    for i in tl.static_range(K):
        _, which = pick_expert(order, i, KP)
        pair = token * K + which
        row = tl.load(y + pair * hidden + cols, mask=ok, other=0.0).to(tl.float32)
        total += row * tl.load(weight + pair)
    write_sum(
        total, token, cols, ok, tl.program_id(1), out, squares, residual, added, norm, hidden, scale, ADDS,
        SCALED, BN,
    )  # fmt: skip


def tile_rows(pairs: int, experts: int, dtype: torch.dtype) -> int:
    """Rows of a tile: small where experts have few rows, so that little of a tile is empty."""
    each = pairs // experts
    return 16 if each < 32 else 64 if each < 256 or dtype == torch.float32 else 128


def product_tile(rows: int, gated: bool, dtype: torch.dtype, limit: int = LEAST_SHARED) -> dict[str, int]:
    """Tile of a product, its warps and stages. Registers decide for float32, which has no matrix units.

    limit: bytes of shared memory that a block of the device may have.
    """
    if dtype == torch.float32:
        is_low, columns = rows < 64, 32 if gated or rows < 64 else 64
        own = {"BK": 64, "num_warps": 4, "num_stages": 3} if is_low else {"maxnreg": WIDE_REGISTERS}
        tile = {"BM": rows, "BN": columns, "BK": 32, "num_warps": 8, "num_stages": 2, **own}
    else:
        columns, warps = 64 if gated or rows < 128 else 128, 8 if rows == 128 else 4
        tile = {"BM": rows, "BN": columns, "BK": 64, "num_warps": warps, "num_stages": 3}
    memory = dense_memory(tile["BK"], tile["BN"] * (2 if gated else 1), rows, dtype)
    return tile | {"num_stages": memory.fit_stages(tile["num_stages"], limit)}


def sort_by_expert(index: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """(starts [count + 1], order [pairs]) of the pairs [T, k]."""
    starts, order = (index.new_empty(n, dtype=torch.int32) for n in (count + 1, index.numel()))
    launch(sort_pairs, (count,), index, starts, order, index.numel(), BLOCK=BLOCK)
    return starts, order


def by_groups(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    chunks: Iterable[tuple[int, Tensor, Tensor]],
    biases: tuple[Tensor | None, Tensor | None],
    activation: tuple[str, bool],
    ends: SumEnds,
    sizes: tuple[int, int, int],
    *,
    rows: int | None = None,
) -> None:
    """`experts` over plain weights. sizes: (experts, the hidden size of one, outputs).

    chunks: (first expert, up [some, n_out, n_in], down [some, hidden, size]) of all experts in order; biases:
    [experts, n_out] and [experts, hidden]. rows: of a tile; None: as many as the number of pairs is good for.
    """
    (tokens, k), (count, size, hidden) = index.shape, sizes
    pairs = tokens * k
    rows = rows or tile_rows(pairs, count, x.dtype)
    starts, order = sort_by_expert(index, count)
    h, y = x.new_empty(pairs, size), x.new_empty(pairs, hidden)
    for first, up, down in chunks:
        some = slice(first, first + len(up))
        own = [None if bias is None else bias[some] for bias in biases]
        tiles = pairs // rows + min(len(up), pairs)
        where = starts[first:], order, rows, tiles
        launch_groups(x, up, own[0], h, where, k, activation)
        launch_groups(h, down, own[1], y, where, 1, ("", False))
    sum_rows(y, weight, index, ends)


def launch_groups(
    x: Tensor,
    weights: Tensor,
    bias: Tensor | None,
    y: Tensor,
    where: tuple[Tensor, Tensor, int, int],
    k: int,
    activation: tuple[str, bool],
) -> None:
    """One product. where: (starts, order, rows of a tile, tiles); k: pairs that share a row of x."""
    starts, order, rows, tiles = where
    (count, _, n_in), size, (kind, gated) = weights.shape, y.shape[1], activation
    tile = product_tile(rows, gated, x.dtype, shared_limit(x.device))
    launch(
        multiply_groups, (tiles, triton.cdiv(size, tile["BN"])),
        x, weights, weights if bias is None else bias, starts, order, y, n_in, size, x.stride(0),
        E=count, EP=triton.next_power_of_2(count), K=k, KIND=kind, GATED=gated, BIASED=bias is not None,
        **tile,
    )  # fmt: skip


def sum_rows(y: Tensor, weight: Tensor, index: Tensor, ends: SumEnds) -> None:
    """y: [T * k, hidden], weight and index: [T, k] -> sums of each token, where `ends` has them."""
    (tokens, k), hidden = index.shape, y.shape[1]
    launch(
        sum_experts, (tokens, triton.cdiv(hidden, BLOCK)),
        y, weight, index, *ends.tensors, hidden, ends.row, ends.scale,
        K=k, KP=max(2, triton.next_power_of_2(k)), **ends.constants, BN=BLOCK,
    )  # fmt: skip


COUNTS = {
    "qwen3 30b-a3b": 128, "mixtral": 8, "deepseek-v2-lite": 64, "deepseek-v3": 256, "gpt-oss": 128,
    "granite-4-h small": 72, "nemotron-3-nano": 128, "qwen3-next": 512,
}  # fmt: skip


ADDED = ("qwen3 30b-a3b", "deepseek-v2-lite", "qwen3-next")  # in float32: with a shared expert and without
WIDE_TYPES = {name: "fp32*" if kind == "bf16*" else kind for name, kind in TYPES.items()}


def _form(
    name: str,
    layer: Mapping[str, object],
    per_row: int,
    act: tuple[str, bool],
    tile: dict[str, int],
    types: Mapping[str, str],
    demands: tuple[tuple[str, ...], ...],
) -> KernelForm:
    constants, fields = split_options({**layer, "K": per_row, "KIND": act[0], "GATED": act[1], **tile})
    return KernelForm(name, multiply_groups, types, constants, **fields, demands=demands)


@with_float16
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch: each kind of layer with every tile, all others with one; and
    other activations, at the sizes of one of them."""
    yield KernelForm("sort_pairs", sort_pairs, TYPES, {"BLOCK": BLOCK})
    demands = (("HMMA", "HGMMA"), ("LDG.128", "LDGSTS.128"))
    for name, (k, _, _, kind, gated, biased, shared) in SHAPES.items():
        own = {"E": COUNTS[name], "EP": triton.next_power_of_2(COUNTS[name]), "BIASED": biased}
        every = name in ("qwen3 30b-a3b", "gpt-oss", "nemotron-3-nano")
        for what, per_row, act in (("up", k, (kind, gated)), ("down", 1, ("", False))):
            for rows in (16, 64, 128) if every else (64,):
                named = f"multiply_groups, {name} {what}, {rows} rows"
                tile = product_tile(rows, act[1], torch.bfloat16)
                yield _form(named, own, per_row, act, tile, TYPES, demands)
            for rows in (16, 64) if every else ():
                named = f"multiply_groups, {name} {what}, {rows} rows, float32"
                tile = product_tile(rows, act[1], torch.float32)
                yield _form(named, own, per_row, act, tile, WIDE_TYPES, demands[1:])
        constants = {"K": k, "KP": max(2, triton.next_power_of_2(k)), "BN": BLOCK}
        constants |= end_constants(SHARED=shared, CLOSED=name in CLOSED)
        both = KernelForm(f"sum_experts, {name}", sum_experts, SUM_TYPES, constants)
        yield from (both, as_float32(both)) if name in ADDED else (both,)
    k, count = SHAPES["qwen3 30b-a3b"][0], COUNTS["qwen3 30b-a3b"]
    own = {"E": count, "EP": triton.next_power_of_2(count), "BIASED": False}
    for what, kind, gated in list_others():
        tile = product_tile(64, gated, torch.bfloat16)
        yield _form(f"multiply_groups, {what}, 64 rows", own, k, (kind, gated), tile, TYPES, demands)
