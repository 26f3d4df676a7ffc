"""Experts of few tokens, by slots: no sorting, no atomics, and the host never learns which experts they are.

A slot is a token and one of its k experts. The experts' weights lie in one tensor [experts, out, in], and a
program reads the number of its slot's expert from the router's result, in two launches:

    expert_up    grid (slots, outputs / BN)    gate, up and the activation of one slot    -> h [slots, size]
    expert_down  grid (tokens, outputs / BN)   the k experts of one token, weighed and added

Slots go fastest in a grid, so that programs that run at the same time read the same rows of experts that
several tokens chose: from L2. `expert_down` goes through a token's experts in the order of their numbers,
starting from what the shared expert made. So the sum has one order, whatever the router's is.

Bits: a program sums over the inputs in one order that depends on the weights' shape alone. A token's result
depends neither on other tokens, nor on their number, as long as a step has at most `MOST_SLOTS` slots. With
more, `grouped_experts` multiplies tiles of rows, which adds in another order.
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, split_options, widen, with_float16, with_float32
from plait.kernels.triton.maths import apply_activation, apply_gated
from plait.kernels.triton.moe.sums import END_TYPES, SumEnds, end_constants, load_start, write_sum
from plait.ops.activation import PAIRS
from plait.ops.launch import launch

MOST_SLOTS = 128  # (token, expert) pairs
BIASED_REGISTERS = 128  # of a thread


@triton.jit
def expert_up(
    x, up, bias, index, h, n_in, size, x_row,
    K: tl.constexpr, KIND: tl.constexpr, GATED: tl.constexpr, BIASED: tl.constexpr, PICKED: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """x: [T, n_in], index: [T, K] -> h [T * K, size]: the activation of each slot. Grid: (T * K, size / BN).

    up: [experts, n_out, n_in] with n_out = 2 size, gate's rows first, if GATED; bias: [experts, n_out]. KIND:
    activation, or "" for none.
    PICKED: up has the weights of each slot instead, [T * K, n_out, n_in].
    """
    await_previous()
    slot = tl.program_id(0)
    e = tl.load(index + slot).to(tl.int64)
    rows, c = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    ok = rows < size
    n_out = size * 2 if GATED else size
    base = up + (slot.to(tl.int64) if PICKED else e) * n_out * n_in
    line = x + (slot // K).to(tl.int64) * x_row
    first, second = tl.zeros([BN, BK], tl.float32), tl.zeros([BN, BK], tl.float32)
    for at in range(0, n_in, BK):
        seen = at + c < n_in
        given = tl.load(line + at + c, mask=seen, other=0.0).to(tl.float32)[None, :]
        # 32 bits hold one expert
        place = base + rows[:, None] * n_in + at + c[None, :]
        there = ok[:, None] & seen[None, :]
        first += tl.load(place, mask=there, other=0.0).to(tl.float32) * given
        if GATED:
            # 32 bits hold one expert
            second += tl.load(place + size * n_in, mask=there, other=0.0).to(tl.float32) * given
    gate, more = tl.sum(first, 1), tl.sum(second, 1)
    if BIASED:
        gate += tl.load(bias + e * n_out + rows, mask=ok, other=0.0).to(tl.float32)
    if GATED:
        if BIASED:
            more += tl.load(bias + e * n_out + size + rows, mask=ok, other=0.0).to(tl.float32)
        y = apply_gated(gate, more, KIND)
    elif KIND != "":
        y = apply_activation(gate, KIND)
    else:
        y = gate
    tl.store(h + slot.to(tl.int64) * size + rows, y.to(h.dtype.element_ty), mask=ok)


@triton.jit
def order_experts(index, token, K: tl.constexpr, KP: tl.constexpr):
    """[KP]: the experts of a token by number, each as number * KP + its place among the k."""
    j = tl.arange(0, KP)
    chosen = tl.load(index + token * K + j, mask=j < K, other=1 << 20).to(tl.int32)
    return tl.sort(chosen * KP + j)


@triton.jit
def pick_expert(order, i, KP: tl.constexpr):
    """(number, place among the k) of the expert that is i-th in the order."""
    key = tl.sum(tl.where(tl.arange(0, KP) == i, order, 0), 0)
    return key // KP, key % KP


@triton.jit
def pick_experts(order, i, J: tl.constexpr, KP: tl.constexpr):
    """As `pick_expert`, of J experts from the i-th on: [J] each."""
    j = i + tl.arange(0, J)
    key = tl.sum(tl.where(tl.arange(0, KP)[None, :] == j[:, None], order[None, :], 0), 1)
    return key // KP, key % KP


@triton.jit
def expert_down(
    h, down, bias, weight, index, shared, gate, out, squares, residual, added, norm,
    size, hidden, shared_row, scale,
    K: tl.constexpr, KP: tl.constexpr, SHARED: tl.constexpr, CLOSED: tl.constexpr, ADDS: tl.constexpr,
    SCALED: tl.constexpr, BIASED: tl.constexpr, PICKED: tl.constexpr, J: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr,
):  # fmt: skip
    """h: [T * K, size], down: [experts, hidden, size], weight: [T, K] -> out [T, hidden].

    Grid: (T, hidden / BN). shared, gate: see `load_start`; out and the others: `write_sum`. PICKED: as in
    `expert_up`. J experts are loaded together: one after the other, their loads would wait for each other.
    """
    await_previous()
    token = tl.program_id(0).to(tl.int64)
    rows, c = tl.program_id(1) * BN + tl.arange(0, BN), tl.arange(0, BK)
    ok = rows < hidden
    order = order_experts(index, token, K, KP)
    total = load_start(shared, gate, token, rows, ok, shared_row, SHARED, CLOSED, BN)
    for i in tl.static_range(0, K, J):
        number, which = pick_experts(order, i, J, KP)
        real = i + tl.arange(0, J) < K
        e, slot = tl.where(real, number, 0).to(tl.int64), token * K + which
        # 32 bits hold one expert
        base = down + (slot if PICKED else e)[:, None, None] * hidden * size + rows[None, :, None] * size
        line = h + slot[:, None] * size
        lanes = tl.zeros([J, BN, BK], tl.float32)
        for at in range(0, size, BK):
            seen = at + c < size
            mine = real[:, None] & seen[None, :]
            given = tl.load(line + at + c[None, :], mask=mine, other=0.0).to(tl.float32)[:, None, :]
            there = mine[:, None, :] & ok[None, :, None]
            lanes += tl.load(base + at + c[None, None, :], mask=there, other=0.0).to(tl.float32) * given
        y = tl.sum(lanes, 2)
        both = real[:, None] & ok[None, :]
        if BIASED:
            y += tl.load(bias + e[:, None] * hidden + rows[None, :], mask=both, other=0.0).to(tl.float32)
        total += tl.sum(y * tl.load(weight + slot, mask=real, other=0.0)[:, None], 0)
    write_sum(
        total, token, rows, ok, tl.program_id(1), out, squares, residual, added, norm, hidden, scale, ADDS,
        SCALED, BN,
    )  # fmt: skip


def up_tile(n_in: int, has_bias: bool = False) -> dict[str, int]:
    """Rows and columns of a program's tile, and its warps: 16 bytes of a row for each thread of two. With a
    bias, ptxas would spill to have one block more on a processor, but for a number of registers."""
    columns = min(512, max(16, triton.next_power_of_2(n_in)))
    registers = {"maxnreg": BIASED_REGISTERS} if has_bias else {}
    return {"BN": 4, "BK": columns, "num_warps": 4 if columns >= 256 else 2, **registers}


def down_tile(size: int, k: int) -> dict[str, int]:
    """The same of a program that adds k experts, some of them at a time."""
    columns = min(256, max(16, triton.next_power_of_2(size)))
    return {
        "KP": max(2, triton.next_power_of_2(k)),
        "J": min(4, triton.next_power_of_2(k)),
        "BN": 4 if k > 2 else 8,
        "BK": columns,
        "num_warps": 4 if columns >= 256 else 2,
    }


def by_slots(
    x: Tensor,
    weight: Tensor,
    index: Tensor,
    up: tuple[Tensor, Tensor | None],
    down: tuple[Tensor, Tensor | None],
    activation: tuple[str, bool],
    ends: SumEnds,
    *,
    is_picked: bool = False,
) -> None:
    """`experts` over plain weights [experts, out, in] and biases [experts, out], for up and down.

    `is_picked`: weights are those of the slots, [T * k, out, in].
    """
    (tokens, n_in), k = x.shape, index.shape[1]
    kind, gated = activation
    (first, first_bias), (second, second_bias) = up, down
    hidden, size = second.shape[1:]
    h = x.new_empty(tokens * k, size)
    tile = up_tile(n_in, first_bias is not None)
    tile["BN"] = widen(tile["BN"], size)
    launch(
        expert_up, (tokens * k, triton.cdiv(size, tile["BN"])),
        x, first, first if first_bias is None else first_bias, index, h, n_in, size, x.stride(0),
        K=k, KIND=kind, GATED=gated, BIASED=first_bias is not None, PICKED=is_picked, **tile,
    )  # fmt: skip
    tile = down_tile(size, k)
    tile["BN"] = widen(tile["BN"], hidden)
    launch(
        expert_down, (tokens, triton.cdiv(hidden, tile["BN"])),
        h, second, second if second_bias is None else second_bias, weight, index,
        *ends.tensors, size, hidden, ends.row, ends.scale, K=k, **ends.constants,
        BIASED=second_bias is not None, PICKED=is_picked, **tile,
    )  # fmt: skip


SHAPES = {  # k, hidden, size, kind, gated, biases, shared
    "qwen3 30b-a3b": (8, 2048, 768, "silu", True, False, False),
    "mixtral": (2, 4096, 14336, "silu", True, False, False),
    "deepseek-v2-lite": (6, 2048, 1408, "silu", True, False, True),
    "deepseek-v3": (8, 7168, 2048, "silu", True, False, True),
    "gpt-oss": (4, 2880, 2880, "swiglu_oai", True, True, False),
    "granite-4-h small": (10, 4096, 768, "silu", True, False, True),
    "nemotron-3-nano": (6, 2688, 1856, "relu2", False, False, True),
    "qwen3-next": (10, 2048, 512, "silu", True, False, True),
}
PLAIN = ("silu", "gelu", "relu")  # activations of experts without a gate, relu2 apart
DECODED = (
    "qwen3 30b-a3b",
    "deepseek-v2-lite",
    "qwen3-next",
    "gpt-oss",
    "nemotron-3-nano",
)  # of storages that are decoded to scratch memory
CLOSED = ("qwen3-next",)  # a gate weighs the shared expert
WIDE = (("LDG.128", "LDGSTS.128"),)
TYPES = {
    "x": "bf16*", "weights": "bf16*", "up": "bf16*", "down": "bf16*", "bias": "bf16*", "index": "i64*",
    "h": "bf16*", "y": "bf16*", "weight": "fp32*", "shared": "bf16*", "gate": "bf16*", "out": "bf16*",
    "starts": "i32*", "order": "i32*", "n_in": "i32!", "size": "i32!", "hidden": "i32!", "x_row": "i32!",
    "shared_row": "i32!",
}  # fmt: skip
SUM_TYPES = TYPES | END_TYPES


def list_others() -> Iterator[tuple[str, str, bool]]:
    """(name, kind, gated) of activations that are compiled at the sizes of one model."""
    for kind in ("gelu", "gelu_pytorch_tanh", "relu", *PAIRS):
        yield kind, kind, True
    for kind in PLAIN:
        yield f"{kind} without gate", kind, False


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch; and other activations, at the sizes of one of them."""
    for name, (k, hidden, size, kind, gated, biased, shared) in SHAPES.items():
        both = {"K": k, "BIASED": biased, "PICKED": False}
        up: dict[str, object] = {"KIND": kind, "GATED": gated}
        down: dict[str, object] = {**end_constants(SHARED=shared, CLOSED=name in CLOSED)}
        for kernel, own, tile, types in (
            (expert_up, up, up_tile(hidden, biased), TYPES),
            (expert_down, down, down_tile(size, k), SUM_TYPES),
        ):
            constants, fields = split_options({**both, **own, **tile})
            named = f"{kernel.fn.__name__}, {name}"
            yield KernelForm(named, kernel, types, constants, **fields, demands=WIDE)
            if name in DECODED:
                picked = constants | {"PICKED": True}
                yield KernelForm(f"{named}, picked", kernel, types, picked, **fields, demands=WIDE)
    k, hidden, *_ = SHAPES["qwen3 30b-a3b"]
    for what, kind, gated in list_others():
        flags = {"K": k, "BIASED": False, "PICKED": False, "KIND": kind, "GATED": gated}
        tile = up_tile(hidden)
        warps, constants = tile.pop("num_warps"), {**flags, **tile}
        yield KernelForm(f"expert_up, {what}", expert_up, TYPES, constants, warps, demands=WIDE)
