"""Pointwise ops in one launch each: activations, gates, residuals, step sizes, and moves of rows.

A program computes a piece of one row; rows of the inputs may lie apart in memory. Numbers are computed in
float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import apply_activation, apply_gated, sigmoid, softplus, tanh
from plait.kernels.triton.row_views import view_rows
from plait.ops.activation import (
    ACTIVATIONS,
    PAIRS,
    activate,
    clip,
    combine,
    gate,
    gate_rows,
    multiply,
    rescale,
    step_sizes,
)
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.ops.rows import FLOATS, embed, join, take_rows
from plait.quant.weight import Dense

NAME = "triton"
NAME_PLAIN = "triton plain"  # embeddings: tables of blocks have kernels of their own
PIECE = 1024  # numbers of a program
KINDS = {*ACTIVATIONS, *PAIRS}


@triton.jit
def _row_start(row, outer, inner, PER_OUTER: tl.constexpr):
    """Where a row begins: see `row_views`."""
    return (row // PER_OUTER) * outer + (row % PER_OUTER) * inner


@triton.jit
def activate_numbers(
    x, out, x_outer, x_inner, N: tl.constexpr, BLOCK: tl.constexpr, PER_OUTER: tl.constexpr,
    KIND: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """x: rows of N numbers, or of [gate, up] side by side -> out: rows of N. Grid: (rows, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    at = x + _row_start(row, x_outer, x_inner, PER_OUTER) + c
    h = tl.load(at, mask=there, other=0.0).to(tl.float32)
    if GATED:
        y = apply_gated(h, tl.load(at + N, mask=there, other=0.0).to(tl.float32), KIND)
    else:
        y = apply_activation(h, KIND)
    tl.store(out + row * N + c, y.to(out.dtype.element_ty), mask=there)


@triton.jit
def combine_numbers(
    x, y, out, x_outer, x_inner, y_outer, y_inner, first, second,
    N: tl.constexpr, BLOCK: tl.constexpr, PER_OUTER: tl.constexpr, KIND: tl.constexpr, HAS_Y: tl.constexpr,
):  # fmt: skip
    """out = KIND(x, y, first, second), number by number. Grid: (rows, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + _row_start(row, x_outer, x_inner, PER_OUTER) + c, mask=there, other=0.0).to(tl.float32)
    if HAS_Y:
        beside = y + _row_start(row, y_outer, y_inner, PER_OUTER)
        if KIND == "gate_rows":
            other = tl.load(beside).to(tl.float32)
        elif KIND == "step_sizes":
            other = tl.load(y + c, mask=there, other=0.0).to(tl.float32)
        else:
            other = tl.load(beside + c, mask=there, other=0.0).to(tl.float32)
    if KIND == "multiply":
        h = h * other
    elif KIND == "combine":
        h = h + other * first
    elif KIND == "gate" or KIND == "gate_rows":
        h = h * sigmoid(other)
    elif KIND == "rescale":
        h = h * first
    elif KIND == "clip":
        h = tl.where(h < -first, -first, tl.where(h > first, first, h))
    elif KIND == "softcap":
        h = second * tanh(h * first / second)
    else:
        tl.static_assert(KIND == "step_sizes")
        if HAS_Y:
            h += other
        h = softplus(h)
        h = tl.where(h < first, first, tl.where(h > second, second, h))
    tl.store(out + row * N + c, h.to(out.dtype.element_ty), mask=there)


@triton.jit
def take_numbers(
    x, index, out, x_outer, scale, N: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr
):  # fmt: skip
    """out[r] = x[index[r]], times a scale as the dtype of the result has it. Grid: (rows, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + tl.load(index + row).to(tl.int64) * x_outer + c, mask=there, other=0.0)
    h = h.to(out.dtype.element_ty)
    if SCALED:
        unit = (scale + tl.zeros([], tl.float32)).to(out.dtype.element_ty).to(tl.float32)
        h = (h.to(tl.float32) * unit).to(out.dtype.element_ty)
    tl.store(out + row * N + c, h, mask=there)


@triton.jit
def join_numbers(
    a, b, out, a_outer, a_inner, b_outer, b_inner,
    N: tl.constexpr, M: tl.constexpr, BLOCK: tl.constexpr, PER_OUTER: tl.constexpr,
):  # fmt: skip
    """out = rows of N numbers of a, and behind them M of b. Grid: (rows, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    h = tl.load(a + _row_start(row, a_outer, a_inner, PER_OUTER) + c, mask=c < N, other=0.0)
    more = tl.load(
        b + _row_start(row, b_outer, b_inner, PER_OUTER) + c - N, mask=(c >= N) & (c < N + M), other=0.0
    )
    tl.store(out + row * (N + M) + c, tl.where(c < N, h, more), mask=c < N + M)


def piece_constants(width: int) -> dict[str, int]:
    """The constants of a row: pieces of at most PIECE numbers, eight for a thread."""
    block = min(PIECE, triton.next_power_of_2(width))
    return {"N": width, "BLOCK": block, "num_warps": min(max(block // 256, 1), 4)}


def count_pieces(width: int, constants: dict[str, int]) -> int:
    """Programs that a row is cut among."""
    return -(-width // constants["BLOCK"])


@activate.variant(NAME, on="cuda", when=lambda facts: _why_unknown(facts))
def activate_rows(x: Tensor, kind: str, gated: bool, dtype: torch.dtype | None = None) -> Tensor:
    """`activate`: the same arguments and result. dtype: of the result, None: as x."""
    rows, width = view_rows(x), x.shape[-1] // (1 + gated)
    out = torch.empty(*x.shape[:-1], width, dtype=dtype or x.dtype, device=x.device)
    sizes = piece_constants(width)
    launch(
        activate_numbers, (rows.count, count_pieces(width, sizes)), *rows.tensors, out, *rows.strides,
        **sizes, PER_OUTER=rows.per_outer, KIND=kind, GATED=gated,
    )  # fmt: skip
    return out


def _why_unknown(facts: OpFacts) -> str | None:
    kind = facts.sizes.get("kind")
    return None if kind is None or kind in KINDS else f"no kernel computes {kind}"


def _combine_with(
    kind: str,
    x: Tensor,
    y: Tensor | None,
    first: float = 0.0,
    second: float = 0.0,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """What `combine_numbers` computes; y: like x, or one number for each row, or one row for all."""
    is_like = y is not None and kind != "step_sizes"
    rows, width = view_rows(x, y if y is not None and is_like else x), x.shape[-1]
    out = torch.empty(x.shape, dtype=dtype or x.dtype, device=x.device)
    beside = rows.tensors[1] if y is None or is_like else y
    sizes = piece_constants(width)
    launch(
        combine_numbers, (rows.count, count_pieces(width, sizes)), rows.tensors[0], beside, out,
        *rows.strides, first, second, **sizes, PER_OUTER=rows.per_outer, KIND=kind, HAS_Y=y is not None,
    )  # fmt: skip
    return out


@multiply.variant(NAME, on="cuda")
def multiply_rows(x: Tensor, y: Tensor) -> Tensor:
    """`multiply`: the same arguments and result."""
    return _combine_with("multiply", x, y)


@combine.variant(NAME, on="cuda")
def combine_rows(x: Tensor, y: Tensor, scale: float) -> Tensor:
    """`combine`: the same arguments and result."""
    return _combine_with("combine", x, y, scale)


@rescale.variant(NAME, on="cuda")
def rescale_rows(x: Tensor, scale: float, cap: float | None) -> Tensor:
    """`rescale`: the same arguments and result."""
    return _combine_with("softcap", x, None, scale, cap) if cap else _combine_with("rescale", x, None, scale)


@clip.variant(NAME, on="cuda")
def clip_numbers(x: Tensor, limit: float) -> Tensor:
    """`clip`: the same arguments and result."""
    return _combine_with("clip", x, None, limit)


@gate.variant(NAME, on="cuda")
def gate_numbers(x: Tensor, by: Tensor) -> Tensor:
    """`gate`: the same arguments and result."""
    return _combine_with("gate", x, by)


@gate_rows.variant(NAME, on="cuda")
def gate_whole_rows(x: Tensor, gate: Tensor) -> Tensor:
    """`gate_rows`: the same arguments and result."""
    return _combine_with("gate_rows", x, gate)


@step_sizes.variant(NAME, on="cuda")
def compute_step_sizes(dt: Tensor, bias: Tensor | None, low: float, high: float) -> Tensor:
    """`step_sizes`: the same arguments and result."""
    return _combine_with("step_sizes", dt, bias, low, high, torch.float32)


def _take(x: Tensor, index: Tensor, dtype: torch.dtype, scale: float = 1.0) -> Tensor:
    width = x.shape[-1]
    out, sizes = torch.empty(len(index), width, dtype=dtype, device=x.device), piece_constants(width)
    launch(
        take_numbers, (len(index), count_pieces(width, sizes)), x, index, out, x.stride(0), scale,
        **sizes, SCALED=scale != 1.0,
    )  # fmt: skip
    return out


@take_rows.variant(NAME, on="cuda")
def take_whole_rows(x: Tensor, index: Tensor) -> Tensor:
    """`take_rows`: the same arguments and result."""
    return _take(x, index, x.dtype)


def _why_not_plain(facts: OpFacts) -> str | None:
    kind = facts.sizes.get("kind", "float32")
    return None if kind in (*FLOATS, "float32") else f"a table of {kind} is not plain"


@embed.variant(NAME_PLAIN, on="cuda", when=_why_not_plain)
def embed_plain(token_ids: Tensor, table: Dense, scale: float, dtype: torch.dtype) -> Tensor:
    """`embed` of a plain table: the same arguments and result."""
    rows = _take(table.tensor, token_ids.flatten(), dtype, scale)
    return rows.view(*token_ids.shape, rows.shape[1]).flatten(1)


@join.variant(NAME, on="cuda")
def join_rows(a: Tensor, b: Tensor) -> Tensor:
    """`join`: the same arguments and result."""
    rows, (n, m) = view_rows(a, b), (a.shape[-1], b.shape[-1])
    out, sizes = torch.empty(*a.shape[:-1], n + m, dtype=a.dtype, device=a.device), piece_constants(n + m)
    launch(
        join_numbers, (rows.count, count_pieces(n + m, sizes)), *rows.tensors, out, *rows.strides,
        **sizes | {"N": n}, M=m, PER_OUTER=rows.per_outer,
    )  # fmt: skip
    return out


NUMBERS = {
    "x": "bf16*", "y": "bf16*", "a": "bf16*", "b": "bf16*", "index": "i64*", "out": "bf16*",
    "x_outer": "i32!", "x_inner": "i32!", "y_outer": "i32!", "y_inner": "i32!",
    "a_outer": "i32!", "a_inner": "i32!", "b_outer": "i32!", "b_inner": "i32!",
    "first": "fp32", "second": "fp32", "scale": "fp32",
}  # fmt: skip
WIDE = (("LDG.128",), ("STG.128",))


def _form(
    name: str,
    kernel: Any,
    constants: Mapping[str, Any],
    types: Mapping[str, str] = NUMBERS,
    wide: bool = True,
) -> KernelForm:
    few = {key: value for key, value in constants.items() if key != "num_warps"}
    return KernelForm(name, kernel, types, few, constants["num_warps"], demands=WIDE if wide else ())


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """Each kernel at published widths, with every kind and pair of dtypes that a model launches."""
    flat: dict[str, int] = {"PER_OUTER": 1}
    for gated, kinds in ((True, KINDS), (False, ACTIVATIONS)):
        for kind in sorted(kinds):
            sizes = piece_constants(14336) | flat | {"KIND": kind, "GATED": gated}
            named = f"activate_numbers, {kind}" + ("" if gated else " without gate")
            yield _form(named, activate_numbers, sizes)
    for kind in ("multiply", "combine", "gate", "rescale", "softcap", "clip"):
        sizes = (
            piece_constants(4096) | flat | {"KIND": kind, "HAS_Y": kind not in ("rescale", "softcap", "clip")}
        )
        yield _form(f"combine_numbers, {kind}", combine_numbers, sizes)
    yield from _list_mixed(flat)
    sizes = piece_constants(2048) | flat | {"KIND": "gate_rows", "HAS_Y": True}
    yield _form("combine_numbers, gate_rows", combine_numbers, sizes, NUMBERS | {"y_outer": "i32"})
    for name, bias in (("step_sizes", {"y": "fp32*"}), ("step_sizes without bias", {})):
        sizes = piece_constants(128) | flat | {"KIND": "step_sizes", "HAS_Y": bool(bias)}
        types = {**NUMBERS, **bias, "out": "fp32*"}
        yield _form(f"combine_numbers, {name}", combine_numbers, sizes, types, wide=False)
    for name, scaled, own in (
        ("take_rows", False, {}),
        ("embed, scaled", True, {}),
        ("embed, float32 table", False, {"x": "fp32*"}),
        ("embed, scaled, float32 table", True, {"x": "fp32*"}),
    ):
        piece = piece_constants(4096) | {"SCALED": scaled}
        yield _form(f"take_numbers, {name}", take_numbers, piece, {**NUMBERS, **own})
    yield _form("join_numbers, 512 + 64", join_numbers, piece_constants(576) | flat | {"N": 512, "M": 64})


def _list_mixed(flat: dict[str, int]) -> Iterator[KernelForm]:
    """Sums of a residual in float32 and what a model in 16 bits adds, and the other way round; and an
    activation of what experts with adapters keep in float32."""
    wide = piece_constants(768) | flat | {"KIND": "silu", "GATED": True}
    yield _form(
        "activate_numbers, silu, float32 to bfloat16", activate_numbers, wide, NUMBERS | {"x": "fp32*"}
    )
    sizes = piece_constants(4096) | flat | {"KIND": "combine", "HAS_Y": True}
    for name, own in (
        ("float32 + bfloat16", {"x": "fp32*", "out": "fp32*"}),
        ("bfloat16 + float32", {"y": "fp32*"}),
    ):
        yield _form(f"combine_numbers, combine, {name}", combine_numbers, sizes, NUMBERS | own)
