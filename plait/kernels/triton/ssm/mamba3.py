"""Mamba3's scan over a ragged batch in one launch: decodes and chunks of prompts alike.

A program has one head of one sequence. It has rows of the state [P, N] in registers and walks the sequence's
tokens in order; of a wide head (MIMO) it takes some rows after the others. What a head keeps with its state
(the angle, the last B, the last x) is read and written by that program alone, so there is no race, and bits
depend on a row's history only. The angle is rounded to float32
at every token, as its slot has it: a prompt may be cut anywhere.

Pairs of B and C are rotated in place: each number is read with its neighbour. Fused, the launch begins with
steps, shares, the norms and biases of B and C, and the activation of x.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import sigmoid, silu, softplus, turn_by
from plait.ops.launch import launch
from plait.ops.mamba3 import mamba3_scan, norm_for_heads, raw_mamba3_scan

NAME = "triton"
TILE = 8192  # numbers of the state in a program's registers at a time: 32 of each thread of eight warps


@triton.jit
def _load_pair(at, n, ok):
    """Numbers, and of each the other one of its pair (2i, 2i + 1)."""
    return (
        tl.load(at + n, mask=ok, other=0.0).to(tl.float32),
        tl.load(at + (n ^ 1), mask=ok, other=0.0).to(tl.float32),
    )


@triton.jit
def scan_heads(
    x, dt, blend, theta, B, C, A, D, dt_bias, weight, bias, state, angle, prev_b, prev_x,
    slots, query_start, has_history, y,
    x_row, x_head, dt_row, blend_row, theta_row, theta_head, b_row, b_head, c_row, c_head, low, high, eps,
    H: tl.constexpr, P: tl.constexpr, BP: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
    RATIO: tl.constexpr, ROTATED: tl.constexpr, FUSED: tl.constexpr, SILU: tl.constexpr,
):  # fmt: skip
    """x: [T, H, P], B, C: [T, H / RATIO, N], theta: [T, H, N / 2] -> y [T, H, P]. Grid: (H, S)."""
    await_previous()
    head, s = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, NP)
    okn = n < N
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32)
    own, there = slot * H + head, n < N * past
    rate, skip = tl.load(A + head), tl.load(D + head)
    if FUSED:
        lift = tl.load(dt_bias + head)
        scale, near_scale = _load_pair(weight, n, okn)
        b_bias, near_b_bias = _load_pair(bias + head * N, n, okn)
        c_bias, near_c_bias = _load_pair(bias + (H + head) * N, n, okn)
    for block in range(0, P, BP):
        p = block + tl.arange(0, BP)
        okp = p < P
        at = state + (own * P + p[:, None]) * N + n[None, :]
        h = tl.load(at, mask=okp[:, None] & there[None, :], other=0.0)
        old_b = tl.load(prev_b + own * N + n, mask=there, other=0.0)
        old_x = tl.load(prev_x + own * P + p, mask=p < P * past, other=0.0)
        if ROTATED:
            turned = tl.load(angle + own * (N // 2) + n // 2, mask=there, other=0.0)
            sign = tl.where(n % 2 == 0, -1.0, 1.0)
        for t in range(first, end):
            row = t + tl.zeros([], tl.int64)
            u = tl.load(x + row * x_row + head * x_head + p, mask=okp, other=0.0).to(tl.float32)
            step = tl.load(dt + row * dt_row + head).to(tl.float32)
            share = tl.load(blend + row * blend_row + head).to(tl.float32)
            b, near_b = _load_pair(B + row * b_row + head // RATIO * b_head, n, okn)
            c, near_c = _load_pair(C + row * c_row + head // RATIO * c_head, n, okn)
            if SILU:
                u = silu(u)
            if FUSED:
                step = tl.minimum(tl.maximum(softplus(step + lift), low), high)
                share = sigmoid(share)
                unit = tl.rsqrt(tl.sum(b * b, 0) / N + eps)
                b, near_b = tl.fma(b * unit, scale, b_bias), tl.fma(near_b * unit, near_scale, near_b_bias)
                unit = tl.rsqrt(tl.sum(c * c, 0) / N + eps)
                c, near_c = tl.fma(c * unit, scale, c_bias), tl.fma(near_c * unit, near_scale, near_c_bias)
            if ROTATED:
                turn = tl.load(theta + row * theta_row + head * theta_head + n // 2, mask=okn, other=0.0)
                turned, cos, sin = turn_by(turned, turn.to(tl.float32) * step)
                b, c = b * cos + sign * near_b * sin, c * cos + sign * near_c * sin
            decay = tl.exp(step * rate)
            now, before = share * step * u, (1.0 - share) * step * decay * old_x
            h = tl.fma(h, decay, tl.fma(now[:, None], b[None, :], before[:, None] * old_b[None, :]))
            out = tl.fma(skip, u, tl.sum(h * c[None, :], 1))
            tl.store(y + (row * H + head) * P + p, out.to(y.dtype.element_ty), mask=okp)
            old_b, old_x = b, u
        tl.debug_barrier()  # every warp has read what one of them now writes
        tl.store(at, h, mask=okp[:, None] & okn[None, :])
        tl.store(prev_x + own * P + p, old_x, mask=okp)
        if block + BP >= P:  # the blocks before began with what was there
            tl.store(prev_b + own * N + n, old_b, mask=okn)
            if ROTATED:
                tl.store(angle + own * (N // 2) + n // 2, turned, mask=okn & (n % 2 == 0))


@triton.jit
def norm_heads(
    x, weight, bias, y, x_row, x_group, eps,
    H: tl.constexpr, G: tl.constexpr, N: tl.constexpr, NP: tl.constexpr,
):  # fmt: skip
    """RMS norm of a group of x [T, G, N], and each head's bias -> y [T, H, N]. Grid: (T, H).

    Tokens are the first dimension, the only one that may have more than 65,535 programs.
    """
    await_previous()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    n = tl.arange(0, NP)
    ok = n < N
    own = tl.load(x + row * x_row + head // (H // G) * x_group + n, mask=ok, other=0.0).to(tl.float32)
    own = own * tl.rsqrt(tl.sum(own * own, 0) / N + eps)
    own = (own * tl.load(weight + n, mask=ok, other=0.0).to(tl.float32)).to(y.dtype.element_ty).to(tl.float32)
    own += tl.load(bias + head * N + n, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + (row * H + head) * N + n, own.to(y.dtype.element_ty), mask=ok)


def _constants(heads: int, dim: int, size: int, ratio: int, **flags: bool) -> dict[str, int]:
    """What the kernel is compiled for."""
    long = triton.next_power_of_2(size)
    rows = min(triton.next_power_of_2(dim), max(1, TILE // long))
    sizes = {"H": heads, "P": dim, "BP": rows, "N": size, "NP": long, "RATIO": ratio}
    return {**sizes, **flags, "num_warps": min(8, max(1, rows * long // 1024))}


def _dense_last(x: Tensor) -> Tensor:
    """Rows of which the numbers lie side by side; rows may lie apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def _scan(
    operands: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor, Tensor, Tensor],
    extra: tuple[Tensor, Tensor, Tensor] | None,
    memory: tuple[Tensor, Tensor | None, Tensor, Tensor],
    where: tuple[Tensor, Tensor, Tensor],
    numbers: tuple[float, float, float] = (0.0, 0.0, 0.0),
    silu_first: bool = False,
) -> Tensor:
    """operands: x, dt, blend, theta, A, B, C, D; extra: bias of dt, weight and bias of B and C, if fused;
    numbers: lowest and highest step, eps of the norm."""
    x, dt, blend, theta, A, B, C, D = operands
    state, angle, prev_b, prev_x = memory
    tokens, heads, dim = x.shape
    y = torch.empty(tokens, heads, dim, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    x, dt, blend, B, C = (_dense_last(m) for m in (x, dt, blend, B, C))
    turn = x if theta is None else _dense_last(theta)
    flags = {"ROTATED": theta is not None, "FUSED": extra is not None, "SILU": silu_first}
    strides = (*x.stride()[:2], dt.stride(0), blend.stride(0), *turn.stride()[:2], *B.stride()[:2])
    launch(
        scan_heads, (heads, len(where[0])),
        x, dt, blend, turn, B, C, A, D, *(extra or (A, A, A)), state, state if angle is None else angle,
        prev_b, prev_x, *where, y, *strides, *C.stride()[:2], *numbers,
        **_constants(heads, dim, B.shape[-1], heads // B.shape[1], **flags),
    )  # fmt: skip
    return y


@mamba3_scan.variant(NAME, on="cuda")
def scan(
    x: Tensor,
    dt: Tensor,
    blend: Tensor,
    theta: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor,
    state: Tensor,
    angle: Tensor | None,
    prev_b: Tensor,
    prev_x: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """`mamba3_scan`: the same arguments and result. There are no chunks, so `chunk_size` says nothing."""
    memory = (state, angle, prev_b, prev_x)
    return _scan((x, dt, blend, theta, A, B, C, D), None, memory, (slots, query_start, has_history))


@raw_mamba3_scan.variant(NAME, on="cuda")
def prepare_and_scan(
    x: Tensor,
    dt: Tensor,
    blend: Tensor,
    theta: Tensor | None,
    bc: Tensor,
    A: Tensor,
    D: Tensor,
    dt_bias: Tensor,
    weight: Tensor,
    bias: Tensor,
    state: Tensor,
    angle: Tensor | None,
    prev_b: Tensor,
    prev_x: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    eps: float,
    dt_limit: tuple[float, float],
    activation: str | None,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """`raw_mamba3_scan`: the same arguments and result."""
    B, C = bc.chunk(2, 1)
    operands, memory = (x, dt, blend, theta, A, B, C, D), (state, angle, prev_b, prev_x)
    where, numbers = (slots, query_start, has_history), (*dt_limit, eps)
    return _scan(operands, (dt_bias, weight, bias), memory, where, numbers, activation == "silu")


@norm_for_heads.variant(NAME, on="cuda")
def norm_then_bias(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """`norm_for_heads`: the same arguments and result."""
    (tokens, groups, size), heads = x.shape, len(bias)
    y = torch.empty(tokens, heads, size, dtype=x.dtype, device=x.device)
    if tokens:
        x = _dense_last(x)
        launch(
            norm_heads, (tokens, heads), x, weight, bias, y, x.stride(0), x.stride(1), eps,
            H=heads, G=groups, N=size, NP=triton.next_power_of_2(size), num_warps=1,
        )  # fmt: skip
    return y


POINTERS = {
    **dict.fromkeys(("x", "dt", "blend", "theta", "B", "C", "weight", "bias", "y"), "bf16*"),
    **dict.fromkeys(("A", "D", "dt_bias", "state", "angle", "prev_b", "prev_x"), "fp32*"),
    **dict.fromkeys(("slots", "query_start"), "i64*"),
    "has_history": "i1*",
    **dict.fromkeys(("x_row", "x_head", "theta_row", "theta_head", "b_row", "b_head", "c_row"), "i32!"),
    **dict.fromkeys(("c_head", "dt_row", "blend_row", "x_group"), "i32!"),
    **dict.fromkeys(("low", "high", "eps"), "fp32"),
}
SHAPES = {  # heads, rows of a head's state, its columns, heads of a group
    "64 heads of 64 × 128": (64, 64, 128, 64),
    "24 heads of 64 × 64": (24, 64, 64, 24),
    "32 heads of 4 × 64 × 128": (32, 256, 128, 32),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What oxidizr's hybrids launch, the widest being MIMO of rank 4; decodes and prompts have one form."""
    for name, shape in SHAPES.items():
        for still in (False, True):
            constants = _constants(*shape, ROTATED=not still, FUSED=True, SILU=False)
            yield KernelForm(
                f"mamba3, {name}{', without angles' if still else ''}", scan_heads, POINTERS, constants,
                constants.pop("num_warps"), demands=(("LDG.128",),),
            )  # fmt: skip
    sizes = {"H": 48, "G": 2, "N": 128, "NP": 128}
    yield KernelForm("mamba3, norm for heads", norm_heads, POINTERS, sizes, num_warps=1)
