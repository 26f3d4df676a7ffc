"""Mamba2's scan of prompts by products of matrices, chunk after chunk in one launch (state-space duality).

    positions of a sequence   |0 ... 31|32 ... 63|64 ...     chunks of 32 positions
    rows of this step               [-----------------)        a row's place in its chunk is position % 32

A program has BP rows of one head's state [P, N] of one sequence in registers from the first chunk to the
last. With a_t, the sum of the logarithms of decay within the chunk up to token t:

    y_t = Σ_{s ≤ t} (C_t · B_s) exp(a_t - a_s) dt_s x_s  +  exp(a_t) h C_t
    h'  = exp(a_last) h + Σ_s exp(a_last - a_s) dt_s x_s ⊗ B_s

Only differences ≤ 0 are exponentiated. Products have operands of the model's dtype and float32 sums.

A sequence with up to WALKED rows in a step, so every decode and every draft, is left to `scan_heads`, which
walks tokens. So a row's bits depend on no other sequence and on no grid. They depend on a cut of a prompt
only where it is at no multiple of 32 (of 16 where a state has 256 columns), or leaves WALKED rows or fewer to
a step. They are not those of decodes: `deterministic` leaves all to `scan_heads`. Dao & Gu 2024, section 6.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16
from plait.kernels.triton.maths import softplus
from plait.kernels.triton.ssm.mamba2 import POINTERS, SHAPES, ScanLaunch, head_constants, prepare_scan
from plait.ops.chip import PRODUCTS
from plait.ops.launch import launch
from plait.ops.registry import OpFacts
from plait.ops.ssm import mamba2_scan, mamba2_scan_from_dt

NAME = "triton chunks"
WALKED = 16  # rows of a sequence in a step up to which tokens are walked
ROWS = 32  # of a state in a program
WIDEST = 256  # columns of a state


@triton.jit
def scan_chunks(
    x, dt, dt_bias, A, B, C, D, state, slots, query_start, has_history, y,
    x_row, x_head, dt_row, b_row, b_group, c_row, c_group, dt_low, dt_high, walked, positions,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, RATIO: tl.constexpr,
    BP: tl.constexpr, L: tl.constexpr, HAS_D: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
    PLACED: tl.constexpr,
):  # fmt: skip
    """Arguments as of `scan_heads`, and positions: [T], if PLACED. Grid: (P / BP, H, S)."""
    await_previous()
    block, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    first = tl.load(query_start + s).to(tl.int64)
    count = (tl.load(query_start + s + 1).to(tl.int64) - first).to(tl.int32)
    if count > walked:
        p, n, t = block * BP + tl.arange(0, BP), tl.arange(0, NP), tl.arange(0, L)
        okp, okn = p < P, n < N
        slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
        rows = tl.where(past, P, 0)
        # 32 bits hold the state of a head
        at = state + (slot * H + head) * (P * N) + (p[None, :] * N + n[:, None])
        h = tl.load(at, mask=(p < rows)[None, :] & okn[:, None], other=0.0).to(tl.float32)
        rate = tl.load(A + head) * 1.4426950408889634
        if HAS_D:
            skip = tl.load(D + head)
        if HAS_BIAS:
            bias = tl.load(dt_bias + head)
        group = head // RATIO
        begin = 0  # the place of the first row in its chunk
        if PLACED:
            begin = (tl.load(positions + first) % L).to(tl.int32)
        xs, ds = x + head * x_head + p[None, :], dt + head
        bs, cs = B + group * b_group + n[None, :], C + group * c_group + n[None, :]
        for start in range(0, begin + count, L):
            chunk = first + start - begin  # the row of its first place: in front of the sequence's, maybe
            ok = (t >= begin - start) & (t < begin - start + count)
            step = tl.load(ds + chunk * dt_row + t * dt_row, mask=ok, other=0.0).to(tl.float32)
            if HAS_BIAS:
                step += bias
            if SOFTPLUS:
                step = tl.minimum(tl.maximum(softplus(step), dt_low), dt_high)
            step = tl.where(ok, step, 0.0)
            total = tl.cumsum(step * rate, 0)  # logarithms to base 2
            last = tl.sum(step * rate, 0)
            weight = total - tl.log2(tl.maximum(step, 1e-37))  # exp2(a - weight) = dt exp2(a - total)
            here = ok[:, None] & okn[None, :]
            b = tl.load(bs + chunk * b_row + t[:, None] * b_row, mask=here, other=0.0)
            c = tl.load(cs + chunk * c_row + t[:, None] * c_row, mask=here, other=0.0)
            there = ok[:, None] & okp[None, :]
            u = tl.load(xs + chunk * x_row + t[:, None] * x_row, mask=there, other=0.0)
            near = tl.dot(c, tl.trans(b), input_precision="ieee")
            gap = tl.where(t[:, None] >= t[None, :], total[:, None] - weight[None, :], -float("inf"))
            near = (near * tl.exp2(gap)).to(u.dtype)
            out = tl.dot(c, h.to(c.dtype), input_precision="ieee") * tl.exp2(total)[:, None]
            out = tl.dot(near, u, out, input_precision="ieee")
            if HAS_D:
                out += skip * u.to(tl.float32)
            to = y + (chunk * H + head) * P + (t[:, None] * (H * P) + p[None, :])
            tl.store(to, out.to(y.dtype.element_ty), mask=there)
            added = (u.to(tl.float32) * tl.exp2(last - weight)[:, None]).to(u.dtype)
            h = tl.dot(tl.trans(b), added, h * tl.exp2(last), input_precision="ieee")
        tl.store(at, h.to(state.dtype.element_ty), mask=okp[None, :] & okn[:, None])


def chunk_constants(constants: dict[str, int], placed: bool) -> dict[str, int]:
    """Those of `scan_heads`, with tiles for products of matrices.

    A state of 256 columns has the registers of eight warps. So have 128 columns with steps that are given
    (PLaMo-2, MiniMax), for which four warps spill on sm_120.
    """
    wide = max(constants["NP"], 16)
    is_tight = wide > 64 and not constants["SOFTPLUS"]
    return constants | {
        "NP": wide,
        "BP": min(max(triton.next_power_of_2(constants["P"]), 16), ROWS),
        "L": 16 if wide == WIDEST else 32,
        "PLACED": placed,
        "num_warps": 8 if wide == WIDEST or is_tight else 4,
        "num_stages": 1,
    }


def scan_prompts(made: ScanLaunch, positions: Tensor | None) -> Tensor:
    """Walk the short sequences of a step and take the long ones in chunks, each if shapes allow for any."""
    x, slots = made.tensors[0], made.tensors[8]
    tokens, seqs = len(x), len(slots)
    longest = tokens - seqs + 1
    if tokens and (seqs > 1 or longest <= WALKED):
        made.walk(WALKED)
    if longest > WALKED:
        constants = chunk_constants(made.constants, positions is not None)
        grid = (triton.cdiv(x.shape[2], constants["BP"]), x.shape[1], seqs)
        placed = slots if positions is None else positions
        launch(scan_chunks, grid, *made.tensors, *made.numbers, WALKED, placed, **constants)
    return made.y


def why_walked(facts: OpFacts) -> str | None:
    """Why prompts are walked token by token."""
    if facts.sizes.get("deterministic"):
        return "prompts would have other last bits than decodes: deterministic was asked for"
    if facts.dtype is torch.float32:
        return "its products are of 16-bit numbers"
    if facts["state"] > WIDEST:
        return f"the state has more than {WIDEST} columns"
    if facts.chip is not None and facts.chip.capability < PRODUCTS:
        return f"Triton uses no matrix units of {facts.chip.name}, but from sm_{PRODUCTS} on"
    return None


@mamba2_scan_from_dt.variant(NAME, on="cuda", when=why_walked)
def scan_chunks_from_dt(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float],
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """`mamba2_scan_from_dt`: the same arguments and result."""
    where = (slots, query_start, has_history)
    return scan_prompts(prepare_scan(x, dt, dt_bias, dt_limit, A, B, C, D, state, *where), positions)


@mamba2_scan.variant(NAME, on="cuda", when=why_walked)
def scan_chunks_of_steps(
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
    chunk_size: int = 256,
    positions: Tensor | None = None,
) -> Tensor:
    """`mamba2_scan`: the same arguments and result."""
    where = (slots, query_start, has_history)
    return scan_prompts(prepare_scan(x, dt, None, None, A, B, C, D, state, *where), positions)


@with_float16
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch in steps with prompts."""
    for name, (heads, dim, size, groups, skips, soft) in SHAPES.items():
        flags: dict[str, int] = {"HAS_D": skips, "SOFTPLUS": soft, "HAS_BIAS": soft}
        constants = chunk_constants(head_constants(heads, dim, size, groups) | flags, placed=True)
        warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
        types = POINTERS | {"positions": "i64*", "walked": "i32"} | ({} if soft else {"dt": "fp32*"})
        yield KernelForm(
            f"scan_chunks, {name}", scan_chunks, types, constants, warps, stages,
            demands=(("LDG.128",), ("HMMA", "HGMMA")),
        )  # fmt: skip
