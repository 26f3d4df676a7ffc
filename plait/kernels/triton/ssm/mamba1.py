"""Mamba1's selective scan over a ragged batch in one launch: decodes and chunks of prompts alike.

A program has BI channels of one sequence, their state [BI, N] in registers, and walks the sequence's tokens
in order. So nothing is shared between programs, and every token is computed in the same way, alone or in a
prompt that is cut anywhere: a product and one fused multiply-add for each number of the state. Of several
tokens the loads come first, because only they take long.

Fused, the launch begins with the step's softplus and the norms of B and C, and ends with the gate.
Gu & Dao 2023, section 3.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import silu, softplus
from plait.ops.launch import launch
from plait.ops.ssm import gated_mamba1_scan, mamba1_scan

NAME = "triton"
CHANNELS = 32  # of a program: one warp
UNROLLED = 4  # tokens of which the loads come first, in steps with prompts


@triton.jit
def _norm(x, weight, n, okn, eps, N: tl.constexpr):
    x = x * tl.rsqrt(tl.sum(x * x, 0) / N + eps)
    return x * tl.load(weight + n, mask=okn, other=0.0).to(tl.float32)


@triton.jit
def scan_channels(
    x, dt, gate, A, B, C, D, b_norm, c_norm, state, slots, query_start, has_history, y,
    x_row, dt_row, gate_row, b_row, c_row, limit, eps,
    INNER: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, BI: tl.constexpr, U: tl.constexpr,
    HAS_D: tl.constexpr, LIMITED: tl.constexpr, FUSED: tl.constexpr, NORM_B: tl.constexpr,
    NORM_C: tl.constexpr,
):  # fmt: skip
    """x, dt, gate: [T, I], A: [I, N], B, C: [T, N], state: [slots, I, N] -> y [T, I]. Grid: (I / BI, S)."""
    await_previous()
    block, s = tl.program_id(0), tl.program_id(1)
    i, n = block * BI + tl.arange(0, BI), tl.arange(0, NP)
    oki, okn = i < INNER, n < N
    ok = oki[:, None] & okn[None, :]
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32)
    rate = tl.load(A + i[:, None] * N + n[None, :], mask=ok, other=0.0) * 1.4426950408889634
    at = state + (slot * INNER + i[:, None]) * N + n[None, :]
    h = tl.load(at, mask=ok & (n < N * past)[None, :], other=0.0)  # without history zeros
    if HAS_D:
        skip = tl.load(D + i, mask=oki, other=0.0)
    for start in range(first, end, U):
        us, steps, bs, cs, gates = (), (), (), (), ()
        for k in tl.static_range(U):
            row = start + k + tl.zeros([], tl.int64)
            wide, long = i < tl.where(row < end, INNER, 0), n < tl.where(row < end, N, 0)
            u = tl.load(x + row * x_row + i, mask=wide, other=0.0).to(tl.float32)
            step = tl.load(dt + row * dt_row + i, mask=wide, other=0.0).to(tl.float32)
            b = tl.load(B + row * b_row + n, mask=long, other=0.0).to(tl.float32)
            c = tl.load(C + row * c_row + n, mask=long, other=0.0).to(tl.float32)
            us += (u,)  # type: ignore[assignment]
            steps += (step,)  # type: ignore[assignment]
            bs += (b,)  # type: ignore[assignment]
            cs += (c,)  # type: ignore[assignment]
            if FUSED:
                closed = tl.load(gate + row * gate_row + i, mask=wide, other=0.0).to(tl.float32)
                gates += (closed,)  # type: ignore[assignment]
        for k in tl.static_range(U):
            row = start + k + tl.zeros([], tl.int64)
            u, step, b, c = us[k], steps[k], bs[k], cs[k]
            if FUSED:
                step = softplus(step)
            if NORM_B:
                b = _norm(b, b_norm, n, okn, eps, N)
            if NORM_C:
                c = _norm(c, c_norm, n, okn, eps, N)
            moved = tl.fma(tl.exp2(step[:, None] * rate), h, (step * u)[:, None] * b[None, :])
            if LIMITED:
                moved = tl.minimum(tl.maximum(moved, -limit), limit)
            h = tl.where(row < end, moved, h)
            out = tl.sum(h * c[None, :], 1)
            if HAS_D:
                out = tl.fma(skip, u, out)
            if FUSED:
                out = out * silu(gates[k])
            tl.store(y + row * INNER + i, out.to(y.dtype.element_ty), mask=i < tl.where(row < end, INNER, 0))
    tl.store(at, h, mask=ok)


def _constants(inner: int, size: int, is_decode: bool, **flags: bool) -> dict[str, object]:
    """What the kernel is compiled for. is_decode: every sequence has one token."""
    return {
        "INNER": inner,
        "N": size,
        "NP": triton.next_power_of_2(size),
        "BI": CHANNELS,
        "U": 1 if is_decode else UNROLLED,
        **flags,
    }


def _dense_last(x: Tensor) -> Tensor:
    """Rows of which the numbers lie side by side; rows may lie apart."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


@gated_mamba1_scan.variant(NAME, on="cuda")
def scan_and_gate(
    x: Tensor,
    dt: Tensor,
    gate: Tensor | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    b_norm: Tensor | None,
    c_norm: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    state_limit: float | None = None,
    eps: float = 1e-6,
    positions: Tensor | None = None,
) -> Tensor:
    """`gated_mamba1_scan`: the same arguments and result.

    `gate` None: `mamba1_scan`, and dt is the step as it is.
    """
    (tokens, inner), size, seqs = x.shape, B.shape[-1], len(slots)
    y = torch.empty(tokens, inner, dtype=x.dtype if gate is None else gate.dtype, device=x.device)
    if not tokens:
        return y
    x, dt, B, C = (_dense_last(m) for m in (x, dt, B, C))
    close = x if gate is None else _dense_last(gate)
    pair = b_norm is not None, c_norm is not None
    flags = {"HAS_D": D is not None, "LIMITED": state_limit is not None, "FUSED": gate is not None}
    constants = _constants(inner, size, tokens == seqs, **flags, NORM_B=pair[0], NORM_C=pair[1])
    launch(
        scan_channels, (triton.cdiv(inner, CHANNELS), seqs),
        x, dt, close, A, B, C, A if D is None else D, A if b_norm is None else b_norm,
        A if c_norm is None else c_norm, state, slots, query_start, has_history, y,
        x.stride(0), dt.stride(0), close.stride(0), B.stride(0), C.stride(0),
        0.0 if state_limit is None else state_limit, eps, **constants, num_warps=1,
    )  # fmt: skip
    return y


@mamba1_scan.variant(NAME, on="cuda")
def scan(
    x: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    state_limit: float | None = None,
    positions: Tensor | None = None,
) -> Tensor:
    """`mamba1_scan`: the same arguments and result."""
    where = slots, query_start, has_history, num_decodes
    return scan_and_gate(x, dt, None, A, B, C, D, None, None, state, *where, state_limit)


POINTERS = {
    **dict.fromkeys(("x", "dt", "gate", "B", "C", "y"), "bf16*"),
    **dict.fromkeys(("A", "D", "b_norm", "c_norm", "state"), "fp32*"),
    **dict.fromkeys(("slots", "query_start"), "i64*"),
    "has_history": "i1*",
    **dict.fromkeys(("x_row", "dt_row", "gate_row", "b_row", "c_row"), "i32!"),
    "limit": "fp32",
    "eps": "fp32",
}
SHAPES = {  # inner, state, with norms
    "Mamba 130M": (1536, 16, False),
    "Mamba 2.8B": (5120, 16, False),
    "Falcon-Mamba 7B": (8192, 16, True),
    "Jamba": (8192, 16, True),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, for decodes and for steps with prompts; and the clamped scan."""
    for name, (inner, size, normed) in SHAPES.items():
        for step in ("decodes", "prompts"):
            flags = {"HAS_D": True, "LIMITED": False, "FUSED": True, "NORM_B": normed, "NORM_C": normed}
            yield KernelForm(
                f"mamba1, {name}, {step}", scan_channels, POINTERS,
                _constants(inner, size, step == "decodes", **flags), num_warps=1, demands=(("LDG.128",),),
            )  # fmt: skip
    flags = {"HAS_D": True, "LIMITED": True, "FUSED": False, "NORM_B": False, "NORM_C": False}
    for name, own in (("clamped", {"LIMITED": True}), ("from step sizes", {"LIMITED": False})):
        yield KernelForm(
            f"mamba1, {name}, prompts", scan_channels, POINTERS | {"dt": "fp32*"},
            _constants(1024, 16, False, **flags | own), num_warps=1, demands=(("LDG.128",),),
        )  # fmt: skip
