"""The gated delta rule over a ragged batch in one launch: Gated DeltaNet and Kimi Delta Attention.

A program has all K rows and BV columns of one head's state [K, V] of one sequence in registers: one warp.
Columns of a state meet nowhere, so each program walks the tokens of the sequence by itself, and reads and
writes its part of the state once. While it computes a token, the next one's loads are under way. Nothing that
a program writes is read by another one.

    h ← decay · h        e ← β (v - hᵀ k)        h ← h + k ⊗ e        y ← hᵀ q / √K

Every token is computed in the same way, and a decode has the same compiled code as a prompt. So the bits
depend on no other sequence, on no grid and on no cut of a prompt, and a prompt is computed again with the
same bits as decodes. Lengths of q and k become 1 in each program, from the same numbers.

`scan_from_gates` begins with softplus and sigmoid in the same launch. `delta_chunks` serves long prompts
faster, with other last bits. Yang et al. 2024; Kimi Team 2025.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, with_float16, with_float32
from plait.kernels.triton.maths import sigmoid, softplus
from plait.ops.delta import EPS, delta_scan_from_gates, gated_delta_scan
from plait.ops.launch import launch

NAME = "triton"
NUMBERS = 1024  # of a state in a program: 32 registers of a lane


@triton.jit
def _load_step(at, ok, CHANNELS: tl.constexpr):
    """What the decays of a token come from: a number for each row of the state, or one for all."""
    return tl.load(at, mask=ok, other=0.0) if CHANNELS else tl.load(at)


@triton.jit(do_not_specialize=["most"])
def walk_delta_rule(
    q, k, v, step, dt_bias, A, beta, state, slots, query_start, has_history, y,
    q_row, q_head, k_row, k_head, v_row, v_head, step_row, step_head, beta_row, scale, eps, most,
    H: tl.constexpr, G: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    CHANNELS: tl.constexpr, TILED: tl.constexpr, GATES: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """q, k: [T, G, K], v: [T, H, V], step: [T, H], or [T, H, K] if CHANNELS, beta: [T, H], A: [H],
    dt_bias: as a row of step, state: [slots, H, K, V] -> y [T, H, V]. Grid: (V / BV, H, S).

    scale: of beta. GATES: step and beta are what softplus and sigmoid are taken of. Sequences with more rows
    than `most` are left as they are.
    """
    await_previous()
    block, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    i, j = tl.arange(0, KP), block * BV + tl.arange(0, BV)
    oki, okj = i < K, j < V
    key_head = head % G if TILED else head // (H // G)
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
    rows = tl.where(past, K, 0)  # of the state that is there: a scalar joins no mask in the interpreter
    if end - first <= most:
        at = state + ((slot * H + head) * K + i[:, None]) * V + j[None, :]
        h = tl.load(at, mask=(i < rows)[:, None] & okj[None, :], other=0.0).to(tl.float32)
        rate = tl.load(A + head) * 1.4426950408889634
        qs, ks, vs = q + key_head * q_head + i, k + key_head * k_head + i, v + head * v_head + j
        steps = step + head * step_head + i if CHANNELS else step + head
        if HAS_BIAS:
            bias = (
                tl.load(dt_bias + head * K + i, mask=oki, other=0.0) if CHANNELS else tl.load(dt_bias + head)
            )
        row = tl.maximum(tl.minimum(first, end - 1), 0)  # of a sequence without rows some other one's
        query = tl.load(qs + row * q_row, mask=oki, other=0.0)
        key = tl.load(ks + row * k_row, mask=oki, other=0.0)
        value = tl.load(vs + row * v_row, mask=okj, other=0.0)
        move = _load_step(steps + row * step_row, oki, CHANNELS)
        strength = tl.load(beta + row * beta_row + head)
        for token in range(first, end):
            row = token + tl.zeros([], tl.int64)
            then = tl.minimum(row + 1, end - 1)
            next_query = tl.load(qs + then * q_row, mask=oki, other=0.0)
            next_key = tl.load(ks + then * k_row, mask=oki, other=0.0)
            next_value = tl.load(vs + then * v_row, mask=okj, other=0.0)
            next_move = _load_step(steps + then * step_row, oki, CHANNELS)
            next_strength = tl.load(beta + then * beta_row + head)
            a, b, dt = query.to(tl.float32), key.to(tl.float32), move.to(tl.float32)
            a = a * (tl.rsqrt(tl.sum(a * a, 0) + eps) * K**-0.5)
            b = b * tl.rsqrt(tl.sum(b * b, 0) + eps)
            beta_now = strength.to(tl.float32)
            if HAS_BIAS:
                dt += bias
            if GATES:
                dt, beta_now = softplus(dt), sigmoid(beta_now)
            kept = tl.exp2(dt * rate)
            h = h * (kept[:, None] if CHANNELS else kept)
            error = (value.to(tl.float32) - tl.sum(h * b[:, None], 0)) * (beta_now * scale)
            h = tl.fma(tl.broadcast_to(b[:, None], (KP, BV)), tl.broadcast_to(error[None, :], (KP, BV)), h)
            out = tl.sum(h * a[:, None], 0)
            tl.store(y + (row * H + head) * V + j, out.to(y.dtype.element_ty), mask=okj)
            query, key, value, move, strength = next_query, next_key, next_value, next_move, next_strength
        tl.store(at, h.to(state.dtype.element_ty), mask=oki[:, None] & okj[None, :])


def delta_constants(
    heads: int, key_heads: int, key_dim: int, value_dim: int, channels: bool, tiled: bool
) -> dict[str, Any]:
    """The constants that decodes and prompts share."""
    rows = triton.next_power_of_2(key_dim)
    return {
        "H": heads,
        "G": key_heads,
        "K": key_dim,
        "KP": rows,
        "V": value_dim,
        "BV": min(triton.next_power_of_2(value_dim), max(NUMBERS // rows, 4)),
        "CHANNELS": channels,
        "TILED": tiled,
        "num_warps": 1,
    }


@dataclass(frozen=True, slots=True)
class DeltaLaunch:
    """The arguments that the kernels of a scan share.

    tensors: q, k, v, step, dt_bias, A, beta, state, slots, query_start, has_history, and the result; numbers:
    strides, the scale of beta, eps.
    """

    tensors: tuple[Tensor, ...]
    numbers: tuple[float, ...]
    constants: dict[str, Any]  # of `walk_delta_rule`

    @property
    def y(self) -> Tensor:
        return self.tensors[-1]

    def walk(self, most: int) -> None:
        """Launch `walk_delta_rule` over the sequences with at most so many rows."""
        v, slots = self.tensors[2], self.tensors[8]
        grid = (triton.cdiv(v.shape[2], self.constants["BV"]), v.shape[1], len(slots))
        launch(walk_delta_rule, grid, *self.tensors, *self.numbers, most, **self.constants)


def prepare_delta(
    inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    dt_bias: Tensor | None,
    A: Tensor,
    state: Tensor,
    where: tuple[Tensor, Tensor, Tensor],
    beta_scale: float,
    tiled: bool,
    gates: bool,
) -> DeltaLaunch:
    """inputs: q, k, v, step, beta; where: slots, query_start, has_history; gates: as GATES of the kernel."""
    q, k, v, step, beta = (m if m.stride(-1) == 1 else m.contiguous() for m in inputs)
    if gates and step.shape[1] != v.shape[1]:
        step = step.unflatten(-1, (v.shape[1], -1))
    constants = delta_constants(v.shape[1], q.shape[1], q.shape[2], v.shape[2], step.dim() == 3, tiled)
    constants |= {"GATES": gates, "HAS_BIAS": dt_bias is not None}
    bias = A if dt_bias is None else dt_bias
    tensors = (q, k, v, step, bias, A, beta, state, *where, v.new_empty(v.shape))
    strides = [n for m in (q, k, v, step) for n in m.stride()[:2]]
    return DeltaLaunch(tensors, (*strides, beta.stride(0), beta_scale, EPS), constants)


@gated_delta_scan.variant(NAME, on="cuda")
def scan_given_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    step: Tensor,
    A: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    beta_scale: float = 1.0,
    tiled: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """`gated_delta_scan`: the same arguments and result."""
    where = (slots, query_start, has_history)
    made = prepare_delta((q, k, v, step, beta), None, A, state, where, beta_scale, tiled, False)
    if len(v):
        made.walk(len(v))
    return made.y


@delta_scan_from_gates.variant(NAME, on="cuda")
def scan_from_gates(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    dt_bias: Tensor | None,
    A: Tensor,
    beta: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    beta_scale: float = 1.0,
    tiled: bool = False,
    positions: Tensor | None = None,
) -> Tensor:
    """`delta_scan_from_gates`: the same arguments and result."""
    where = (slots, query_start, has_history)
    made = prepare_delta((q, k, v, decay, beta), dt_bias, A, state, where, beta_scale, tiled, True)
    if len(v):
        made.walk(len(v))
    return made.y


POINTERS = {
    "q": "bf16*", "k": "bf16*", "v": "bf16*", "step": "bf16*", "dt_bias": "fp32*", "A": "fp32*",
    "beta": "bf16*", "state": "fp32*", "slots": "i64*", "query_start": "i64*", "has_history": "i1*",
    "y": "bf16*", "scale": "fp32", "eps": "fp32", "most": "i32",
    **dict.fromkeys(("q_row", "q_head", "k_row", "k_head", "v_row", "v_head"), "i32!"),
    **dict.fromkeys(("step_row", "step_head", "beta_row"), "i32!"),
}  # fmt: skip
SHAPES = {  # heads, key heads, K, V, channels, tiled, bias
    "qwen3-next": (32, 16, 128, 128, False, False, True),
    "kimi-linear": (32, 32, 128, 128, True, False, True),
    "olmo-hybrid": (30, 30, 96, 192, False, False, True),
    "qwen3-next tiled": (32, 16, 128, 128, False, True, True),  # as GGUF files have it
    "kimi-linear from step sizes": (32, 32, 128, 128, True, False, False),
}
GIVEN = ("kimi-linear from step sizes",)  # softplus and sigmoid are taken before


def shape_types(name: str) -> dict[str, str]:
    """Types of a shape's arguments."""
    return POINTERS | ({"step": "fp32*"} if name in GIVEN else {})


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, in every step."""
    for name, (heads, key_heads, key_dim, dim, channels, tiled, bias) in SHAPES.items():
        constants = delta_constants(heads, key_heads, key_dim, dim, channels, tiled)
        warps = constants.pop("num_warps")
        yield KernelForm(
            f"walk_delta_rule, {name}", walk_delta_rule, shape_types(name),
            constants | {"GATES": name not in GIVEN, "HAS_BIAS": bias}, warps,
            demands=(("LDG.128",), ("STG.128",)), max_registers=128,
        )  # fmt: skip
