"""Several residual streams of a token: how they are weighed, mixed, added to, and made as large as another.

    weigh_tokens   a token for each lane: its matrix of streams is in the lane's registers, round after round
    mix_rows       a piece of all streams of one token, read once; of each result the streams in their order
    read_rows      a row for each program, in one tile: its sums have the order of its width
    match_rows     the same
    keep_rows      the same

So the bits of a row depend on no other row and on no grid. Numbers are float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import sigmoid
from plait.kernels.triton.pointwise.norm import EACH, why_too_wide
from plait.kernels.triton.row_views import pack_rows
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.ops.streams import (
    keep_largest,
    match_size,
    mix_gated,
    mix_streams,
    read_streams,
    weigh_streams,
    write_streams,
)

NAME = "triton"
LANES = 32  # tokens of a program of one warp
MOST_STREAMS = 8  # with a matrix: a lane holds 64 numbers
PIECE = 512  # numbers of each stream that a program holds


@triton.jit
def weigh_tokens(
    logits, out, logits_row, tokens, eps, magnitude, added, rounds,
    J: tl.constexpr, WRITTEN: tl.constexpr, MIXED: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """`weigh_streams`: logits [T, n] -> out [T, n] float32. Grid: (T / BT,).

    J: streams; WRITTEN, MIXED: which parts there are. A matrix [from, to] is J · J numbers, stored as [to,
    from].
    """
    await_previous()
    SIZE: tl.constexpr = J + (J if WRITTEN else 0) + (J * J if MIXED else 0)
    t = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    there = t < tokens
    at, to = logits + t * logits_row, out + t * SIZE
    for i in tl.static_range(J):
        tl.store(to + i, sigmoid(tl.load(at + i, mask=there, other=0.0).to(tl.float32)) + eps, mask=there)
    if WRITTEN:
        for i in tl.static_range(J, 2 * J):
            share = sigmoid(tl.load(at + i, mask=there, other=0.0).to(tl.float32))
            tl.store(to + i, magnitude * share + added, mask=there)
    if MIXED:
        matrix = ()
        for i in tl.static_range(J):
            row = ()
            for j in tl.static_range(J):
                logit = tl.load(at + (2 + i) * J + j, mask=there, other=0.0).to(tl.float32)
                row += (logit,)  # type: ignore[assignment]
            top = row[0]  # type: ignore[misc]
            for j in tl.static_range(1, J):
                top = tl.maximum(top, row[j])
            masses = ()
            for j in tl.static_range(J):
                masses += (tl.exp(row[j] - top),)  # type: ignore[assignment]
            whole = masses[0]  # type: ignore[misc]
            for j in tl.static_range(1, J):
                whole += masses[j]
            for j in tl.static_range(J):
                matrix += (masses[j] / whole + eps,)  # type: ignore[assignment]
        if rounds > 0:
            matrix = _divide_columns(matrix, eps, J)
        for _ in range(1, rounds):
            matrix = _divide_columns(_divide_rows(matrix, eps, J), eps, J)
        for i in tl.static_range(J):
            for j in tl.static_range(J):
                tl.store(to + (2 + j) * J + i, matrix[i * J + j], mask=there)


@triton.jit
def _divide_rows(matrix, eps, J: tl.constexpr):
    """J · J numbers, each divided by the sum of its row + eps: one division for each row."""
    found = ()
    for i in tl.static_range(J):
        whole = matrix[i * J]
        for j in tl.static_range(1, J):
            whole += matrix[i * J + j]
        share = 1.0 / (whole + eps)
        for j in tl.static_range(J):
            found += (matrix[i * J + j] * share,)  # type: ignore[assignment]
    return found


@triton.jit
def _divide_columns(matrix, eps, J: tl.constexpr):
    """J · J numbers, each divided by the sum of its column + eps."""
    shares = ()
    for j in tl.static_range(J):
        whole = matrix[j]
        for i in tl.static_range(1, J):
            whole += matrix[i * J + j]
        shares += (1.0 / (whole + eps),)  # type: ignore[assignment]
    found = ()
    for i in tl.static_range(J):
        for j in tl.static_range(J):
            found += (matrix[i * J + j] * shares[j],)  # type: ignore[assignment]
    return found


@triton.jit
def mix_rows(
    x, by, y, written, out, x_row, x_stream, by_row, y_row, written_row,
    N: tl.constexpr, J: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    """out[k] = Σ_j by[k, j] x[j], and with WRITE + written[k] y - x[k]. Grid: (T, pieces).

    x: [T, J, N], by: [T, K · J], y: [T, N], written: [T, K] -> out [T, K, N]; strides are of rows.
    """
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    streams = ()
    for j in tl.static_range(J):
        stream = tl.load(x + row * x_row + j * x_stream + c, mask=there, other=0.0).to(tl.float32)
        streams += (stream,)  # type: ignore[assignment]
    if WRITE:
        news = tl.load(y + row * y_row + c, mask=there, other=0.0).to(tl.float32)
    for k in tl.static_range(K):
        factors = by + row * by_row + k * J
        mixed = streams[0] * tl.load(factors).to(tl.float32)  # type: ignore[misc]
        for j in tl.static_range(1, J):
            mixed += streams[j] * tl.load(factors + j).to(tl.float32)
        if WRITE:
            mixed = news * tl.load(written + row * written_row + k).to(tl.float32) + (mixed - streams[k])
        tl.store(out + (row * K + k) * N + c, mixed.to(out.dtype.element_ty), mask=there)


@triton.jit
def read_rows(
    x, by, weight, out, x_row, x_stream, by_row, eps, N: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`read_streams`: x [T, J, N], by [T, J], weight [N] -> out [T, N]. Grid: (T,)."""
    await_previous()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = c < N
    mixed = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(J):
        stream = tl.load(x + row * x_row + j * x_stream + c, mask=there, other=0.0).to(tl.float32)
        mixed += stream * tl.load(by + row * by_row + j).to(tl.float32)
    factors = tl.load(weight + c, mask=there, other=0.0).to(tl.float32)
    mixed = mixed * tl.rsqrt(tl.sum(mixed * mixed, 0) / N + eps) * factors
    tl.store(out + row * N + c, mixed.to(out.dtype.element_ty), mask=there)


@triton.jit
def mix_gated_rows(
    x, by, factors, out, x_row, by_row, N: tl.constexpr, J: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """`mix_gated`: x, by [T, J · N], factors [J] -> out [T, N]. Grid: (T, pieces)."""
    await_previous()
    row = tl.program_id(0).to(tl.int64)
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = c < N
    mixed = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(J):
        h = tl.load(x + row * x_row + j * N + c, mask=there, other=0.0).to(tl.float32)
        other = tl.load(by + row * by_row + j * N + c, mask=there, other=0.0).to(tl.float32)
        mixed += h * sigmoid(other) * tl.load(factors + j).to(tl.float32)
    tl.store(out + row * N + c, mixed.to(out.dtype.element_ty), mask=there)


@triton.jit
def match_rows(x, like, out, x_row, like_row, least, N: tl.constexpr, BLOCK: tl.constexpr):
    """out = x with the root mean square of `like`; x's own counts as √least at least. Grid: (T,)."""
    await_previous()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + row * x_row + c, mask=there, other=0.0).to(tl.float32)
    other = tl.load(like + row * like_row + c, mask=there, other=0.0).to(tl.float32)
    own = tl.maximum(tl.sum(h * h, 0) / N, least)
    h = h * (tl.sqrt(tl.sum(other * other, 0) / N) / tl.sqrt(own))
    tl.store(out + row * N + c, h.to(out.dtype.element_ty), mask=there)


@triton.jit
def keep_rows(x, out, x_row, times, N: tl.constexpr, BLOCK: tl.constexpr):
    """out = what of x lies above mean + times · deviation of its row, else 0. Grid: (T,)."""
    await_previous()
    row, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    there = c < N
    h = tl.load(x + row * x_row + c, mask=there, other=0.0).to(tl.float32)
    mean = tl.sum(h, 0) / N
    apart = tl.where(there, h - mean, 0.0)
    h = h - (mean + tl.sqrt(tl.sum(apart * apart, 0) / N) * times)
    tl.store(out + row * N + c, tl.where(h < 0, 0.0, h).to(out.dtype.element_ty), mask=there)


def _why_not_weighed(facts: OpFacts) -> str | None:
    streams = facts.sizes.get("streams", 0)
    return f"{streams} streams; a lane holds a matrix of {MOST_STREAMS}" if streams > MOST_STREAMS else None


@weigh_streams.variant(NAME, on="cuda", when=_why_not_weighed)
def weigh_in_lanes(
    logits: Tensor, streams: int, eps: float, magnitude: float, added: float, rounds: int
) -> Tensor:
    """`weigh_streams`: the same arguments and result."""
    tokens, size = logits.shape
    logits = pack_rows(logits)
    out = torch.empty(tokens, size, dtype=torch.float32, device=logits.device)
    launch(
        weigh_tokens, (triton.cdiv(tokens, LANES),), logits, out, logits.stride(0), tokens, eps, magnitude,
        added, rounds, **_weigh_constants(size, streams), num_warps=1,
    )  # fmt: skip
    return out


def _weigh_constants(size: int, streams: int) -> dict[str, int]:
    return {"J": streams, "WRITTEN": size > streams, "MIXED": size > 2 * streams, "BT": LANES}


@mix_streams.variant(NAME, on="cuda")
def mix_in_pieces(x: Tensor, by: Tensor) -> Tensor:
    """`mix_streams`: the same arguments and result."""
    return _mix(x, by)


@write_streams.variant(NAME, on="cuda")
def write_in_pieces(x: Tensor, y: Tensor, written: Tensor, mixed: Tensor) -> Tensor:
    """`write_streams`: the same arguments and result."""
    return _mix(x, mixed, pack_rows(y), pack_rows(written))


def _mix(x: Tensor, by: Tensor, y: Tensor | None = None, written: Tensor | None = None) -> Tensor:
    x, by = pack_rows(x), pack_rows(by)
    tokens, streams, width = x.shape
    constants = mix_constants(width, streams, by.shape[1] // streams)
    out = torch.empty(tokens, constants["K"], width, dtype=x.dtype, device=x.device)
    news = out if y is None else y
    factors = by if written is None else written
    launch(
        mix_rows, (tokens, triton.cdiv(width, constants["BLOCK"])), x, by, news, factors, out, x.stride(0),
        x.stride(1), by.stride(0) if len(by) == tokens else 0, news.stride(0), factors.stride(0),
        **constants, WRITE=y is not None,
    )  # fmt: skip
    return out


def mix_constants(width: int, streams: int, count: int) -> dict[str, int]:
    """The constants of a piece of all streams; count: of results."""
    block = min(PIECE, triton.next_power_of_2(width))
    return {"N": width, "J": streams, "K": count, "BLOCK": block, "num_warps": max(block // 256, 1)}


@read_streams.variant(NAME, on="cuda", when=why_too_wide)
def read_in_rows(x: Tensor, by: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`read_streams`: the same arguments and result."""
    x, by = pack_rows(x), pack_rows(by)
    tokens, streams, width = x.shape
    out, strides = x.new_empty(tokens, width), (x.stride(0), x.stride(1), by.stride(0))
    launch(read_rows, (tokens,), x, by, weight, out, *strides, eps, J=streams, **row_constants(width))
    return out


@mix_gated.variant(NAME, on="cuda")
def mix_gated_in_pieces(x: Tensor, by: Tensor, factors: Tensor) -> Tensor:
    """`mix_gated`: the same arguments and result."""
    x, by, streams = pack_rows(x), pack_rows(by), factors.shape[1]
    width = x.shape[1] // streams
    sizes, out = mix_constants(width, streams, 1), x.new_empty(len(x), width)
    del sizes["K"]
    grid = len(x), triton.cdiv(width, sizes["BLOCK"])
    launch(mix_gated_rows, grid, x, by, factors, out, x.stride(0), by.stride(0), **sizes)
    return out


@match_size.variant(NAME, on="cuda", when=why_too_wide)
def match_whole_rows(x: Tensor, like: Tensor, least: float) -> Tensor:
    """`match_size`: the same arguments and result."""
    x, like = pack_rows(x), pack_rows(like)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(
        match_rows, (len(x),), x, like, out, x.stride(0), like.stride(0), least, **row_constants(x.shape[1])
    )
    return out


@keep_largest.variant(NAME, on="cuda", when=why_too_wide)
def keep_in_rows(x: Tensor, times: float) -> Tensor:
    """`keep_largest`: the same arguments and result."""
    x = pack_rows(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(keep_rows, (len(x),), x, out, x.stride(0), times, **row_constants(x.shape[1]))
    return out


def row_constants(width: int) -> dict[str, int]:
    """The constants of a row that a program holds in one tile."""
    block = triton.next_power_of_2(width)
    return {"N": width, "BLOCK": block, "num_warps": min(max(block // (32 * EACH), 1), 32)}


TYPES = {
    "logits": "bf16*", "x": "bf16*", "by": "fp32*", "y": "bf16*", "written": "fp32*", "like": "bf16*",
    "eps": "fp32", "magnitude": "fp32", "added": "fp32", "least": "fp32", "times": "fp32", "x_row": "i32!",
    "x_stream": "i32!", "y_row": "i32!", "like_row": "i32!",
}  # fmt: skip
SIZES = {"deepseek-v4": (24, 4), "hunyuan-4": (8, 4), "the last sum": (4, 4)}  # logits, streams
MIXED = {  # width, streams, results, dtype of the factors; the last: with what a branch gave
    "deepseek-v4, read": (7168, 4, 1, "fp32*", False),
    "deepseek-v4, written": (7168, 4, 4, "fp32*", True),
    "hunyuan-4, written": (6144, 1, 4, "fp32*", False),
    "qwen4-exp, written": (4096, 1, 4, "bf16*", False),
    "gemma-3n, predicted": (2048, 4, 4, "bf16*", False),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch."""
    wide = (("LDG.128",), ("STG.128",))
    for name, (size, streams) in SIZES.items():
        types = TYPES | {"out": "fp32*"}
        yield KernelForm(f"weigh_tokens, {name}", weigh_tokens, types, _weigh_constants(size, streams), 1)
    for name, (width, streams, count, kind, write) in MIXED.items():
        constants = mix_constants(width, streams, count) | {"WRITE": write}
        warps, types = constants.pop("num_warps"), TYPES | {"by": kind, "out": "bf16*"}
        types |= {} if write else {"y": "bf16*", "written": kind}
        yield KernelForm(f"mix_rows, {name}", mix_rows, types, constants, warps, demands=wide)
    constants = mix_constants(4096, 4, 1)
    warps, types = constants.pop("num_warps"), TYPES | {"out": "bf16*", "factors": "fp32*"}
    types |= {"by": "bf16*", "by_row": "i32!"}
    constants.pop("K")
    yield KernelForm("mix_gated_rows, qwen4-exp", mix_gated_rows, types, constants, warps, demands=wide)
    constants = row_constants(7168) | {"J": 4}
    warps, types = constants.pop("num_warps"), TYPES | {"out": "bf16*", "weight": "fp32*"}
    yield KernelForm("read_rows, deepseek-v4", read_rows, types, constants, warps, demands=wide)
    for name, kernel, width in (
        ("match_rows, gemma-3n", match_rows, 2048),
        ("keep_rows, gemma-3n", keep_rows, 16384),
    ):
        constants = row_constants(width)
        warps, types = constants.pop("num_warps"), TYPES | {"out": "bf16*"}
        yield KernelForm(name, kernel, types, constants, warps, demands=wide)
