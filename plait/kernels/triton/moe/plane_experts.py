"""Experts in planes of codes: every quantized storage, by slots and by groups, through one kernel.

A program multiplies the weights of one expert by some pairs of a token and that expert. By slots it has one
pair, and the expert's number is the router's; by groups a tile of sorted pairs (see `grouped_experts`). The
loop is `multiply_planes`, which gives a row the same bits alone as next to others. So a token's result is the
same in a decode and in a prompt, whatever the batch: forms differ in speed alone.

An expert's planes are items of a stack, at a multiple of a stride from the first one's.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import FLOAT16, FLOAT32, KernelForm, as_half, split_options
from plait.kernels.triton.linear.multiply_planes import multiply_planes
from plait.kernels.triton.linear.plane_arguments import plane_constants
from plait.kernels.triton.maths import apply_activation, apply_gated
from plait.kernels.triton.moe.experts import SHAPES, TYPES, list_others
from plait.kernels.triton.moe.grouped_experts import COUNTS, find_tile
from plait.kernels.triton.shared_memory import LEAST_SHARED, plane_memory, shared_limit
from plait.ops.expert_stack import ExpertStack
from plait.ops.launch import launch
from plait.quant.planes import PlaneLayout, Planes
from plait.quant.stack import TensorStack

UNITS = 4  # warps, and units of columns of a step
DEMANDS = (("HMMA", "HGMMA"), ("LDG.128", "LDGSTS.128"))
COLUMNS = 512  # that a program of `order_columns` moves


@triton.jit
def find_pairs(
    index, starts, order, tile, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr, BM: tl.constexpr
):  # fmt: skip
    """(expert, pairs [BM], which are there) of a tile. An expert that is E has nothing to do."""
    if SLOTS:
        e = tl.load(index + tile).to(tl.int32)
        pair = tile + tl.zeros([BM], tl.int32)
        there = tl.arange(0, BM) == 0
    else:
        e, begin, stop = find_tile(starts, tile, E, EP, BM)
        at_pair = begin + tl.arange(0, BM)
        there = at_pair < stop
        pair = tl.load(order + at_pair, mask=there, other=0)
    return e, pair, there


@triton.jit
def multiply_pairs(
    x, codes, high, scales, levels, table, bias, index, starts, order, y,
    n_in, size, units, steps, x_row,
    codes_expert, high_expert, scales_expert, levels_expert, table_expert,
    codes_unit, high_unit, scales_row, levels_row,
    BITS: tl.constexpr, HIGH: tl.constexpr, VALUE: tl.constexpr, ZERO: tl.constexpr, SCALES: tl.constexpr,
    GROUP: tl.constexpr, BLOCK: tl.constexpr, TALL: tl.constexpr, APPLY: tl.constexpr, BASE: tl.constexpr,
    CODE: tl.constexpr, EVEN: tl.constexpr, E: tl.constexpr, EP: tl.constexpr, SLOTS: tl.constexpr,
    K: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr,
    UNITS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Rows of x times the planes of their experts -> y [pairs, size]. Grid: (tiles of pairs, size / outputs).

    A pair's row of x is pair // K. KIND: activation, or "" for none. If GATED, a weight's first `size` rows
    are gate, the others up, and a program has BN / 2 rows of each, else it has BN rows.
    """
    await_previous()
    e, pair, there = find_pairs(index, starts, order, tl.program_id(0), E, EP, SLOTS, BM)
    if e < E:
        OUT: tl.constexpr = BN // 2 if GATED else BN
        i, e64 = tl.arange(0, BN), e.to(tl.int64)
        own = tl.program_id(1) * OUT + i % OUT
        rows = tl.minimum(own, size - 1) + i // OUT * size
        total = multiply_planes(
            x + (pair // K).to(tl.int64) * x_row, there, codes + e64 * codes_expert, high + e64 * high_expert,
            scales + e64 * scales_expert, levels + e64 * levels_expert, table + e64 * table_expert, rows,
            steps * 0, steps, units, n_in, codes_unit, high_unit, scales_row, levels_row,
            BITS, HIGH, VALUE, ZERO, SCALES, GROUP, BLOCK, TALL, APPLY, BASE, CODE, EVEN, UNITS, BN, BM,
        )  # fmt: skip
        if BIASED:
            n_out = size * 2 if GATED else size
            # 32 bits hold a bias of all experts
            total += tl.load(bias + e * n_out + rows).to(tl.float32)[:, None]
        if GATED:
            gate, up = tl.split(tl.permute(tl.reshape(total, [2, OUT, BM]), (1, 2, 0)))
            total = apply_gated(gate, up, KIND)
        elif KIND != "":
            total = apply_activation(total, KIND)
        cols = tl.program_id(1) * OUT + tl.arange(0, OUT)
        place = y + pair.to(tl.int64)[None, :] * size + cols[:, None]
        tl.store(place, total.to(y.dtype.element_ty), mask=there[None, :] & (cols < size)[:, None])


@triton.jit
def order_columns(x, order, index, out, n_in, x_row, K: tl.constexpr, BLOCK: tl.constexpr):
    """out [pairs, n_in]: rows of x in the order of the columns of each pair's expert, order [E, n_in]."""
    await_previous()
    pair, c = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    e, ok = tl.load(index + pair).to(tl.int64), c < n_in
    place = tl.load(order + e * n_in + c, mask=ok, other=0)
    row = tl.load(x + (pair // K).to(tl.int64) * x_row + place, mask=ok, other=0.0)
    tl.store(out + pair.to(tl.int64) * n_in + c, row, mask=ok)


def multiply_codes(
    x: Tensor,
    stack: ExpertStack,
    index: Tensor,
    where: tuple[Tensor, Tensor] | None,
    k: int,
    activation: tuple[str, bool],
    each: int,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """`multiply_stack` of x in bfloat16 or float16, in the order of the columns."""
    part, pairs, (kind, gated) = stack.parts[0], index.numel(), activation
    layout: PlaneLayout = part.template.layout
    size = stack.n_out // (2 if gated else 1)
    y = x.new_empty(pairs, size, dtype=dtype)
    tile = pair_tile(layout, each, shared_limit(x.device))
    tiles = pairs if where is None else pairs // tile["BM"] + min(stack.count, pairs)
    tensors, strides = plane_arguments(part)
    units = layout.padded(stack.n_in) // layout.unit
    starts, order = where or (index, index)
    launch(
        multiply_pairs, (tiles, triton.cdiv(size, tile["BN"] // (2 if gated else 1))),
        x, *tensors, y if stack.bias is None else stack.bias, index, starts, order, y,
        stack.n_in, size, units, triton.cdiv(units, UNITS), x.stride(0), *strides,
        **plane_constants(layout, x.dtype, has_assembly=x.is_cuda),
        EVEN=units % UNITS == 0 and stack.n_in % layout.unit == 0, E=stack.count,
        EP=triton.next_power_of_2(stack.count), SLOTS=where is None, K=k, KIND=kind, GATED=gated,
        BIASED=stack.bias is not None, UNITS=UNITS, **tile, num_warps=UNITS,
    )  # fmt: skip
    return y


def list_fields(part: TensorStack) -> dict[str, Tensor]:
    """The tensors of planes by their names, each [experts, ...]."""
    names = [name for name in Planes.__slots__ if isinstance(getattr(part.template, name), Tensor)]
    return dict(zip(names, part.tensors, strict=True))


def plane_arguments(part: TensorStack) -> tuple[list[Tensor], list[int]]:
    """(codes, high, scales, levels, table; strides of experts, then of units and entries of scales).

    What a layout lacks is one of the others, and is not read.
    """
    whole = list_fields(part)
    codes, scales = whole["codes"], whole["scales"]
    high, levels, table = whole.get("high", codes), whole.get("levels", scales), whole.get("table", scales)
    tensors = [codes, high, scales, levels, table]
    inner = [tensor.stride(1) for tensor in (codes, high, scales, levels)]
    return tensors, [tensor.stride(0) for tensor in tensors] + inner


def order_rows(x: Tensor, order: Tensor, index: Tensor, k: int) -> Tensor:
    """x: [pairs / k, n_in] -> [pairs, n_in], in the order of each pair's expert."""
    pairs, n_in = index.numel(), x.shape[1]
    out = x.new_empty(pairs, n_in)
    launch(
        order_columns, (pairs, triton.cdiv(n_in, COLUMNS)), x, order, index, out, n_in, x.stride(0),
        K=k, BLOCK=COLUMNS,
    )  # fmt: skip
    return out


def pair_tile(layout: PlaneLayout, each: int, limit: int = LEAST_SHARED) -> dict[str, int]:
    """Outputs and pairs of a program; each: pairs of an expert, about, 0 for slots; limit: bytes of shared
    memory that a block of the device may have.

    Units of 256 columns have one stage less, because x takes most of the shared memory there. Their codes of
    two bits have at most 16 pairs, for want of registers, and so have those of five bits in smaller blocks:
    32 pairs of Q5_0 spill. Up to so many pairs they are given all registers, and four-bit codes of 16 pairs
    have enough for four blocks: left to itself, ptxas spills to have one block more on a processor.
    """
    narrow, has_high = layout.unit <= 64, layout.high == 1
    is_few = each < 24 or (has_high and (layout.bits == 2 or layout.block < layout.unit))
    rows = 8 if each < 8 else 16 if is_few else 32
    outputs = 32 if rows < 32 and narrow else 16
    is_short = (rows == 32 and narrow) or (rows > 8 and has_high)
    options = {"maxnreg": 255} if has_high and rows < 32 else {}
    if rows == 16 and layout.bits == 4 and not layout.high:
        options = {"maxnreg": 128}
    stages = plane_memory(layout, UNITS, outputs, rows).fit_stages(2 if is_short else 3, limit)
    return {"BN": outputs, "BM": rows, "num_stages": stages, **options}


STORAGES = {  # layout, type of scales, type of levels
    "Q4_K": (PlaneLayout(4, 0, "integer", 0, "mins", 32, 256), "i32*", "i16*"),
    "Q6_K": (PlaneLayout(4, 2, "integer", 32, "levels", 16, 256), "fp16*", "i8*"),
    "Q8_0": (PlaneLayout(8, 0, "byte", 0, "plain", 32, 32), "fp16*", "fp16*"),
    "mxfp4": (PlaneLayout(4, 0, "e2m1", 0, "plain", 32, 32), "bf16*", "bf16*"),
    "fp8 blocks": (PlaneLayout(8, 0, "e4m3", 0, "plain", 128, 128, 128), "fp32*", "fp32*"),
    "int4 g128 zeros": (PlaneLayout(4, 0, "integer", 8, "zeros", 128, 128), "fp16*", "i8*"),
    "Q3_K": (PlaneLayout(2, 1, "integer", 4, "levels", 16, 256), "fp16*", "i8*"),
    "Q5_K": (PlaneLayout(4, 1, "integer", 0, "mins", 32, 256), "i32*", "i16*"),
    "Q5_0": (PlaneLayout(4, 1, "integer", 16, "plain", 32, 32), "fp16*", "fp16*"),
}
PUBLISHED = (  # model, storage
    ("qwen3 30b-a3b", "Q4_K"), ("qwen3 30b-a3b", "int4 g128 zeros"), ("qwen3 30b-a3b", "Q3_K"),
    ("qwen3 30b-a3b", "Q5_K"), ("mixtral", "Q6_K"), ("gpt-oss", "mxfp4"), ("deepseek-v3", "fp8 blocks"),
    ("nemotron-3-nano", "Q8_0"), ("gpt-oss", "Q8_0"),
    ("nemotron-3-nano", "Q5_0"), ("gpt-oss", "Q5_0"),  # in place of Q4_K, of which 256 divides the inputs
)  # fmt: skip
USUAL = ("Q4_K", "int4 g128 zeros")
STRIDES = (
    "codes_expert", "high_expert", "scales_expert", "levels_expert", "codes_unit", "high_unit", "scales_row",
    "levels_row",
)  # fmt: skip


def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch: slots, and tiles of every size; and other activations."""
    for name, storage in PUBLISHED:
        yield from _pair_forms(name, storage, torch.bfloat16)
        yield from _pair_forms(name, storage, torch.float16)
    first = next(_pair_forms(*PUBLISHED[0], torch.bfloat16))
    for what, kind, gated in list_others():
        own = {**first.constants, "KIND": kind, "GATED": gated}
        yield replace(first, name=f"multiply_pairs, Q4_K, {what}, slots", constants=own)
    for end, x in (("", "bf16*"), (FLOAT32, "fp32*"), (FLOAT16, "fp16*")):
        types = TYPES | {"x": x, "out": x}
        yield KernelForm(f"order_columns{end}", order_columns, types, {"K": 8, "BLOCK": COLUMNS})


def _pair_forms(name: str, storage: str, dtype: torch.dtype) -> Iterator[KernelForm]:
    """Of one model and dtype of x; in float16 groups of the second product, and slots of usual ones."""
    is_half = dtype == torch.float16
    k, hidden, width, kind, gated, biased, _ = SHAPES[name]
    layout, scales, levels = STORAGES[storage]
    types = (as_half(TYPES) if is_half else TYPES) | {
        "codes": "i16*",
        "high": "i16*",
        "scales": scales,
        "levels": levels,
        "table": "fp32*",
    }
    types |= dict.fromkeys(STRIDES, "i32!") | {"n_in": "i32!"}
    if layout.tall > 1:
        types |= dict.fromkeys(("scales_row", "levels_row", "scales_expert", "levels_expert"), "i32")
    tiles = {each: pair_tile(layout, each) for each in (0, 16, 64)}
    for what, n_in, per_row, act in (("up", hidden, k, (kind, gated)), ("down", width, 1, ("", False))):
        every: tuple[int, ...] = (0, 16) if tiles[16] == tiles[64] else (0, 16, 64)
        if is_half:
            every = every[1:2] if what == "down" else every[:1] if storage in USUAL else ()
        for each in every:
            tile, units = tiles[each], layout.padded(n_in) // layout.unit
            constants, fields = split_options({
                **plane_constants(layout, dtype, has_assembly=True), **tile, "UNITS": UNITS,
                "EVEN": units % UNITS == 0 and n_in % layout.unit == 0, "E": COUNTS[name],
                "EP": triton.next_power_of_2(COUNTS[name]), "SLOTS": each == 0, "K": per_row,
                "KIND": act[0], "GATED": act[1], "BIASED": biased, "num_warps": UNITS,
            })  # fmt: skip
            rows = ("slots" if not each else str(tile["BM"])) + (FLOAT16 if is_half else "")
            yield KernelForm(
                f"multiply_pairs, {name} {storage} {what}, {rows}", multiply_pairs, types, constants,
                **fields, demands=DEMANDS,
            )  # fmt: skip
