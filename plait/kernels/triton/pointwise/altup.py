"""What is between the parts of a layer over several streams (AltUp), each in one launch: see `ops/altup.py`.

A program has a piece of all streams of one token, or, where a gate's largest numbers are kept, a whole row in
one tile. So the bits of a row depend on no other row and on no grid. Numbers are float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import apply_activation
from plait.kernels.triton.pointwise.norm import why_too_wide
from plait.kernels.triton.pointwise.streams import mix_constants, row_constants
from plait.kernels.triton.row_views import pack_rows
from plait.ops.activation import ACTIVATIONS
from plait.ops.altup import activate_largest, add_streams, correct_streams, predict_streams
from plait.ops.launch import launch
from plait.ops.registry import OpFacts

NAME = "triton"


@triton.jit
def predict_rows(
    x, by, moved, first, x_row, x_stream, by_row,
    N: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`predict_streams`: x [T, J, N], by [T, J · J] -> moved [T, J, N], first [T, N]. Grid: (T, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    streams = ()
    for j in tl.static_range(J):
        stream = tl.load(x + row * x_row + j * x_stream + c, mask=there, other=0.0).to(tl.float32)
        streams += (stream,)  # type: ignore[assignment]
    for k in tl.static_range(J):
        factors = by + row * by_row + k * J
        mixed = streams[0] * tl.load(factors).to(tl.float32)  # type: ignore[misc]
        for j in tl.static_range(1, J):
            mixed += streams[j] * tl.load(factors + j).to(tl.float32)
        tl.store(moved + (row * J + k) * N + c, mixed.to(moved.dtype.element_ty), mask=there)
        if k == 0:
            total = streams[0] + mixed  # type: ignore[misc]
            tl.store(first + row * N + c, total.to(first.dtype.element_ty), mask=there)


@triton.jit
def correct_rows(
    active, found, by, spread, first, active_row, found_row, by_row,
    N: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """`correct_streams`: [T, N], by [T, J] -> spread [T, J, N], first [T, N]. Grid: (T, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    old = tl.load(active + row * active_row + c, mask=there, other=0.0).to(tl.float32)
    news = tl.load(found + row * found_row + c, mask=there, other=0.0).to(tl.float32) - old
    for k in tl.static_range(J):
        change = news * tl.load(by + row * by_row + k).to(tl.float32)
        tl.store(spread + (row * J + k) * N + c, change.to(spread.dtype.element_ty), mask=there)
        if k == 0:
            tl.store(first + row * N + c, (old + change).to(first.dtype.element_ty), mask=there)


@triton.jit
def add_rows(
    moved, spread, own, by, out, own_row, N: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`add_streams`: moved, spread [T, J, N], dense, own [T, N], by [J] -> out. Grid: (T, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    news = tl.load(own + row * own_row + c, mask=there, other=0.0).to(tl.float32)
    for k in tl.static_range(J):
        at = (row * J + k) * N + c
        total = tl.load(moved + at, mask=there, other=0.0).to(tl.float32)
        total += tl.load(spread + at, mask=there, other=0.0).to(tl.float32)
        total += news * tl.load(by + k).to(tl.float32)
        tl.store(out + at, total.to(out.dtype.element_ty), mask=there)


@triton.jit
def activate_kept(x, out, x_row, times, N: tl.constexpr, BLOCK: tl.constexpr, KIND: tl.constexpr):
    """`activate_largest`: [gate, up] of N numbers each -> out: rows of N. Grid: (T,)."""
    await_previous()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + row * x_row + c, mask=there, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + N + c, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(h, 0) / N
    apart = tl.where(there, h - mean, 0.0)
    h = h - (mean + tl.sqrt(tl.sum(apart * apart, 0) / N) * times)
    y = apply_activation(tl.where(h < 0, 0.0, h), KIND) * up
    tl.store(out + row * N + c, y.to(out.dtype.element_ty), mask=there)


@predict_streams.variant(NAME, on="cuda")
def predict_in_pieces(x: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """`predict_streams`: the same arguments and results."""
    x, by = pack_rows(x), pack_rows(by)
    tokens, streams, width = x.shape
    sizes, grid = _share(tokens, streams, width)
    moved, first = x.new_empty(x.shape), x.new_empty(tokens, width)
    launch(predict_rows, grid, x, by, moved, first, x.stride(0), x.stride(1), by.stride(0), **sizes)
    return moved, first


@correct_streams.variant(NAME, on="cuda")
def correct_in_pieces(active: Tensor, found: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """`correct_streams`: the same arguments and results."""
    active, found, by = pack_rows(active), pack_rows(found), pack_rows(by)
    (tokens, width), streams = active.shape, by.shape[1]
    sizes, grid = _share(tokens, streams, width)
    spread, first = active.new_empty(tokens, streams, width), active.new_empty(tokens, width)
    strides = (active.stride(0), found.stride(0), by.stride(0))
    launch(correct_rows, grid, active, found, by, spread, first, *strides, **sizes)
    return spread, first


@add_streams.variant(NAME, on="cuda")
def add_in_pieces(moved: Tensor, spread: Tensor, own: Tensor, by: Tensor) -> Tensor:
    """`add_streams`: the same arguments and result."""
    moved, spread, own = moved.contiguous(), spread.contiguous(), pack_rows(own)
    sizes, grid = _share(*moved.shape)
    out = torch.empty_like(moved)
    launch(add_rows, grid, moved, spread, own, by, out, own.stride(0), **sizes)
    return out


def _share(tokens: int, streams: int, width: int) -> tuple[dict[str, int], tuple[int, int]]:
    """The constants of a launch over pieces of all streams, and its grid."""
    sizes = {name: value for name, value in mix_constants(width, streams, 1).items() if name != "K"}
    return sizes, (tokens, triton.cdiv(width, sizes["BLOCK"]))


def _why_not_kept(facts: OpFacts) -> str | None:
    kind = facts.sizes.get("kind")
    return why_too_wide(facts) if kind in ACTIVATIONS else f"no kernel computes {kind}"


@activate_largest.variant(NAME, on="cuda", when=_why_not_kept)
def activate_kept_rows(x: Tensor, times: float, kind: str) -> Tensor:
    """`activate_largest`: the same arguments and result."""
    x, width = pack_rows(x), x.shape[1] // 2
    out = x.new_empty(len(x), width)
    launch(activate_kept, (len(x),), x, out, x.stride(0), times, KIND=kind, **row_constants(width))
    return out


TYPES = {
    **dict.fromkeys(("x", "by", "active", "found", "moved", "spread", "own", "first", "out"), "bf16*"),
    **dict.fromkeys(("x_row", "x_stream", "active_row", "found_row", "own_row"), "i32!"),
    "times": "fp32",
}  # fmt: skip


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What Gemma 3n launches."""
    wide = (("LDG.128",), ("STG.128",))
    for kernel, own in ((predict_rows, {}), (correct_rows, {}), (add_rows, {"by": "fp32*"})):
        constants, _ = _share(1, 4, 2048)
        warps, name = constants.pop("num_warps"), f"{kernel.fn.__name__}, gemma-3n"
        yield KernelForm(name, kernel, TYPES | own, constants, warps, demands=wide)
    sizes = row_constants(16384)
    warps, kept = sizes.pop("num_warps"), {"KIND": "gelu_pytorch_tanh", **sizes}
    yield KernelForm("activate_kept, gemma-3n", activate_kept, TYPES, kept, warps, demands=wide)
