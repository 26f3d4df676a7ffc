"""RWKV's recurrences over a ragged batch, a launch each: of RWKV-4 (Peng et al. 2023), 6 (2024) and 7 (2025).

    RWKV-6      y ← Sᵀ r + (Σ r u k) v        S ← w · S + k ⊗ v           a program: a head's rows, BV columns
    RWKV-7      S ← w · S - (a κ) ⊗ (Sᵀ κ) + k̃ ⊗ v       y ← Sᵀ r        a program: a head's rows, BV columns
    RWKV-4      a weighted mean of values, by channel                     a program: BN channels

Columns of a state meet nowhere, so each program walks the tokens of its sequence by itself. While it computes
a token, the next one's loads are under way. Nothing that a program writes is read by another one. Every token
is computed in the same way, in a decode as in a prompt, so bits depend on no other sequence and on no cut.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import one_minus_exp, sigmoid
from plait.ops.launch import launch
from plait.ops.wkv import RATE, UNIT_EPS, wkv4_scan, wkv6_scan, wkv7_scan

NAME = "triton"
NUMBERS = 1024  # of a state in a program: 32 registers of a lane
CHANNELS = 64  # of a program of RWKV-4
LEAST: tl.constexpr = tl.constexpr(-1e38)  # the exponent of a sum of nothing


@triton.jit
def walk_wkv6(
    r, decay, k, v, bonus, state, slots, query_start, has_history, y,
    r_row, r_head, decay_row, decay_head, k_row, k_head, v_row, v_head, scale,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr, DP: tl.constexpr, BV: tl.constexpr,
    BONUS: tl.constexpr,
):  # fmt: skip
    """r, decay: [T, H, D], k: [T, G, D], v: [T, G, V], bonus: [H, D], state: [slots, H, D, V] -> y [T, H, V].

    Grid: (V / BV, H, S).
    """
    await_previous()
    block, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, DP), block * BV + tl.arange(0, BV)
    oki, okj = i < D, j < V
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
    rows = tl.where(past, D, 0)  # of the state that is there: a scalar joins no mask in the interpreter
    at = state + ((slot * H + head) * D + i[:, None]) * V + j[None, :]
    h = tl.load(at, mask=(i < rows)[:, None] & okj[None, :], other=0.0)
    if BONUS:
        own = tl.load(bonus + head * D + i, mask=oki, other=0.0)
    rs, decays = r + head * r_head + i, decay + head * decay_head + i
    ks, vs = k + head // (H // G) * k_head + i, v + head // (H // G) * v_head + j
    row = tl.maximum(tl.minimum(first, end - 1), 0)  # of a sequence without rows some other one's
    query = tl.load(rs + row * r_row, mask=oki, other=0.0)
    step = tl.load(decays + row * decay_row, mask=oki, other=0.0)
    key = tl.load(ks + row * k_row, mask=oki, other=0.0)
    value = tl.load(vs + row * v_row, mask=okj, other=0.0)
    for token in range(first, end):
        row = token + tl.zeros([], tl.int64)
        then = tl.minimum(row + 1, end - 1)
        next_query = tl.load(rs + then * r_row, mask=oki, other=0.0)
        next_step = tl.load(decays + then * decay_row, mask=oki, other=0.0)
        next_key = tl.load(ks + then * k_row, mask=oki, other=0.0)
        next_value = tl.load(vs + then * v_row, mask=okj, other=0.0)
        a, b, u = query.to(tl.float32), key.to(tl.float32), value.to(tl.float32)
        speed = -tl.exp(step.to(tl.float32))
        kept = tl.exp(speed)
        if BONUS:
            out = tl.sum(h * a[:, None], 0) + tl.sum(a * own * b, 0) * u
            h = h * kept[:, None] + b[:, None] * u[None, :]
        else:
            h = h * kept[:, None] + (b * one_minus_exp(speed))[:, None] * u[None, :]
            out = tl.sum(h * (a * scale)[:, None], 0)
        tl.store(y + (row * H + head) * V + j, out.to(y.dtype.element_ty), mask=okj)
        query, step, key, value = next_query, next_step, next_key, next_value
    tl.store(at, h, mask=oki[:, None] & okj[None, :])


@triton.jit
def walk_wkv7(
    r, decay, k, v, gate, scales, state, slots, query_start, has_history, y, added,
    r_row, r_head, decay_row, decay_head, k_row, k_head, v_row, v_head, gate_row, gate_head, rate, eps,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """r, decay, k, v, gate: [T, H, D], scales: [3, H, D], state: [slots, H, D, D] -> y [T, H, D], and added
    [T, H]. Grid: (D / BV, H, S)."""
    await_previous()
    block, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, DP), block * BV + tl.arange(0, BV)
    oki, okj = i < D, j < D
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
    rows = tl.where(past, D, 0)  # of the state that is there: a scalar joins no mask in the interpreter
    at = state + ((slot * H + head) * D + i[:, None]) * D + j[None, :]
    h = tl.load(at, mask=(i < rows)[:, None] & okj[None, :], other=0.0)
    own = scales + head * D + i
    of_unit, of_key = tl.load(own, mask=oki, other=0.0), tl.load(own + H * D, mask=oki, other=0.0)
    of_value = tl.load(own + 2 * H * D, mask=oki, other=0.0)
    rs, decays, ks = r + head * r_head + i, decay + head * decay_head + i, k + head * k_head + i
    vs, gates = v + head * v_head + j, gate + head * gate_head + i
    row = tl.maximum(tl.minimum(first, end - 1), 0)  # of a sequence without rows some other one's
    query = tl.load(rs + row * r_row, mask=oki, other=0.0)
    step = tl.load(decays + row * decay_row, mask=oki, other=0.0)
    key = tl.load(ks + row * k_row, mask=oki, other=0.0)
    value = tl.load(vs + row * v_row, mask=okj, other=0.0)
    share = tl.load(gates + row * gate_row, mask=oki, other=0.0)
    for token in range(first, end):
        row = token + tl.zeros([], tl.int64)
        then = tl.minimum(row + 1, end - 1)
        next_query = tl.load(rs + then * r_row, mask=oki, other=0.0)
        next_step = tl.load(decays + then * decay_row, mask=oki, other=0.0)
        next_key = tl.load(ks + then * k_row, mask=oki, other=0.0)
        next_value = tl.load(vs + then * v_row, mask=okj, other=0.0)
        next_share = tl.load(gates + then * gate_row, mask=oki, other=0.0)
        a, b = query.to(tl.float32), key.to(tl.float32)
        kept = tl.exp(-rate * sigmoid(step.to(tl.float32)))
        open_share = sigmoid(share.to(tl.float32))
        unit = b * of_unit
        unit = unit / tl.maximum(tl.sqrt(tl.sum(unit * unit, 0)), eps)
        written = b * (1.0 + (open_share - 1.0) * of_key)
        seen = tl.sum(h * unit[:, None], 0)
        h = h * kept[:, None] - (open_share * unit)[:, None] * seen[None, :]
        h = h + written[:, None] * value.to(tl.float32)[None, :]
        out = tl.sum(h * a[:, None], 0)
        tl.store(y + (row * H + head) * D + j, out.to(y.dtype.element_ty), mask=okj)
        if block == 0:
            tl.store(added + row * H + head, tl.sum(a * written * of_value, 0))
        query, step, key, value, share = next_query, next_step, next_key, next_value, next_share
    tl.store(at, h, mask=oki[:, None] & okj[None, :])


@triton.jit
def walk_wkv4(
    k, v, decay, first_bonus, sums, weights, largest, slots, query_start, has_history, y, n, k_row, v_row,
    BN: tl.constexpr,
):  # fmt: skip
    """k, v: [T, n], decay, first_bonus: [n], sums, weights, largest: [slots, n] -> y [T, n].

    Grid: (n / BN, S).
    """
    await_previous()
    s, i = tl.program_id(1), tl.program_id(0) * BN + tl.arange(0, BN)
    ok = i < n
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32)
    at, there = slot * n + i, i < n * past
    a, b = tl.load(sums + at, mask=there, other=0.0), tl.load(weights + at, mask=there, other=0.0)
    m = tl.load(largest + at, mask=there, other=LEAST)
    bonus, fades = tl.load(first_bonus + i, mask=ok, other=0.0), tl.load(decay + i, mask=ok, other=0.0)
    row = tl.maximum(tl.minimum(first, end - 1), 0)
    key, value = (
        tl.load(k + row * k_row + i, mask=ok, other=0.0),
        tl.load(v + row * v_row + i, mask=ok, other=0.0),
    )
    for token in range(first, end):
        row = token + tl.zeros([], tl.int64)
        then = tl.minimum(row + 1, end - 1)
        next_key = tl.load(k + then * k_row + i, mask=ok, other=0.0)
        next_value = tl.load(v + then * v_row + i, mask=ok, other=0.0)
        x, u = key.to(tl.float32), value.to(tl.float32)
        top = tl.maximum(m, x + bonus)
        old, new = tl.exp(m - top), tl.exp(x + bonus - top)
        out = (old * a + new * u) / (old * b + new)
        tl.store(y + row * n + i, out.to(y.dtype.element_ty), mask=ok)
        top = tl.maximum(m + fades, x)
        old, new = tl.exp(m + fades - top), tl.exp(x - top)
        a, b, m = old * a + new * u, old * b + new, top
        key, value = next_key, next_value
    tl.store(sums + at, a, mask=ok)
    tl.store(weights + at, b, mask=ok)
    tl.store(largest + at, m, mask=ok)


def wkv7_constants(heads: int, dim: int) -> dict[str, int]:
    rows = triton.next_power_of_2(dim)
    return {"H": heads, "D": dim, "DP": rows, "BV": min(rows, max(NUMBERS // rows, 4)), "num_warps": 1}


def wkv6_constants(heads: int, groups: int, dim: int, width: int) -> dict[str, int]:
    rows = triton.next_power_of_2(dim)
    columns = min(triton.next_power_of_2(width), max(NUMBERS // rows, 4))
    return {"H": heads, "G": groups, "D": dim, "V": width, "DP": rows, "BV": columns, "num_warps": 1}


@wkv6_scan.variant(NAME, on="cuda")
def scan_wkv6(
    r: Tensor,
    decay: Tensor,
    k: Tensor,
    v: Tensor,
    bonus: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> Tensor:
    """`wkv6_scan`: the same arguments and result."""
    r, decay, k, v = given = [m if m.stride(-1) == 1 else m.contiguous() for m in (r, decay, k, v)]
    (tokens, heads, dim), (_, groups, width) = r.shape, v.shape
    y, constants = v.new_empty(tokens, heads, width), wkv6_constants(heads, groups, dim, width)
    if tokens:
        launch(
            walk_wkv6, (triton.cdiv(width, constants["BV"]), heads, len(slots)),
            *given, state if bonus is None else bonus.contiguous(), state, slots, query_start, has_history, y,
            *(n for m in given for n in m.stride()[:2]), dim**-0.5, BONUS=bonus is not None, **constants,
        )  # fmt: skip
    return y


@wkv7_scan.variant(NAME, on="cuda")
def scan_wkv7(
    r: Tensor,
    decay: Tensor,
    k: Tensor,
    v: Tensor,
    rate: Tensor,
    scales: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> tuple[Tensor, Tensor]:
    """`wkv7_scan`: the same arguments and result."""
    given = [m if m.stride(-1) == 1 else m.contiguous() for m in (r, decay, k, v, rate)]
    (tokens, heads, dim), y = v.shape, v.new_empty(v.shape)
    added, constants = torch.empty(tokens, heads, device=v.device), wkv7_constants(heads, dim)
    if tokens:
        launch(
            walk_wkv7, (triton.cdiv(dim, constants["BV"]), heads, len(slots)),
            *given, scales.contiguous(), state, slots, query_start, has_history, y, added,
            *(n for m in given for n in m.stride()[:2]), RATE, UNIT_EPS, **constants,
        )  # fmt: skip
    return y, added


@wkv4_scan.variant(NAME, on="cuda")
def scan_wkv4(
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    first: Tensor,
    sums: Tensor,
    weights: Tensor,
    largest: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
) -> Tensor:
    """`wkv4_scan`: the same arguments and result."""
    k, v = (m if m.stride(-1) == 1 else m.contiguous() for m in (k, v))
    (tokens, n), y = v.shape, v.new_empty(v.shape)
    if tokens:
        launch(
            walk_wkv4, (triton.cdiv(n, CHANNELS), len(slots)), k, v, decay, first, sums, weights, largest,
            slots, query_start, has_history, y, n, k.stride(0), v.stride(0), BN=CHANNELS, num_warps=1,
        )  # fmt: skip
    return y


WHERE = {**dict.fromkeys(("slots", "query_start"), "i64*"), "has_history": "i1*"}
WKV6_TYPES = {
    **dict.fromkeys(("r", "decay", "k", "v", "y"), "bf16*"),
    **dict.fromkeys(("bonus", "state"), "fp32*"),
    **WHERE,
    **dict.fromkeys((f"{name}_{of}" for name in ("r", "decay", "k", "v") for of in ("row", "head")), "i32!"),
    "scale": "fp32",
}
WKV7_TYPES = {
    **dict.fromkeys(("r", "decay", "k", "v", "gate", "y"), "bf16*"),
    **dict.fromkeys(("scales", "state", "added"), "fp32*"),
    **WHERE,
    **dict.fromkeys(
        (f"{name}_{of}" for name in ("r", "decay", "k", "v", "gate") for of in ("row", "head")), "i32!"
    ),
    **dict.fromkeys(("rate", "eps"), "fp32"),
}
WKV4_TYPES = {
    **dict.fromkeys(("k", "v", "y"), "bf16*"),
    **dict.fromkeys(("decay", "first_bonus", "sums", "weights", "largest"), "fp32*"),
    **WHERE,
    **dict.fromkeys(("n", "k_row", "v_row"), "i32!"),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """RWKV-7 "Goose" 2.9B, RWKV-6 "Finch" 7B, RWKV-5 "Eagle" 7B, QRWKV6 32B and RWKV-4, in every step."""
    constants = wkv7_constants(40, 64)
    warps = constants.pop("num_warps")
    yield KernelForm(
        "walk_wkv7, 40 heads of 64", walk_wkv7, WKV7_TYPES, constants, warps,
        demands=(("LDG.128",), ("STG.128",)), max_registers=168,
    )  # fmt: skip
    for name, (heads, groups, dim), types, bonus in (
        ("64 heads of 64", (64, 64, 64), {}, True),
        ("decays of weights", (64, 64, 64), {"decay": "fp32*"}, True),
        ("40 heads of 128", (40, 8, 128), {}, False),
    ):
        constants = wkv6_constants(heads, groups, dim, dim) | {"BONUS": bonus}
        warps = constants.pop("num_warps")
        yield KernelForm(
            f"walk_wkv6, {name}", walk_wkv6, WKV6_TYPES | types, constants, warps,
            demands=(("LDG.128",), ("STG.128",)), max_registers=168,
        )  # fmt: skip
    yield KernelForm("walk_wkv4", walk_wkv4, WKV4_TYPES, {"BN": CHANNELS}, 1)
