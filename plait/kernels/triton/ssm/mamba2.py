"""Mamba2's scan over a ragged batch in one launch: decodes and chunks of prompts alike, token by token.

A program has BP rows of one head's state [P, N] of one sequence in registers: one warp, four neighbours of N
in a lane, so that loads are 16 bytes wide and a row's sum is a few shuffles. It walks the tokens of the
sequence in order, and reads and writes the state once. While it computes a token, the next one's loads are
under way. Nothing that a program writes is read by another one.

Every token is computed in the same way: one fused multiply-add for each number of the state, then one sum
over N. A decode has the same compiled code as a prompt. So the bits depend on no other sequence, on no grid
and on no cut of a prompt, and a prompt is computed again with the same bits as decodes.

`scan_from_dt` begins with the step's softplus in the same launch. `mamba2_chunks` serves long prompts faster,
with other last bits. Dao & Gu 2024.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from plait.kernels.triton.dependent_launch import await_previous
from plait.kernels.triton.forms import KernelForm, widen, with_float16, with_float32
from plait.kernels.triton.maths import softplus
from plait.ops.launch import launch
from plait.ops.ssm import mamba2_scan, mamba2_scan_from_dt

NAME = "triton"
NUMBERS = 1024  # of a state in a program: 32 registers of a lane


@triton.jit(do_not_specialize=["most"])
def scan_heads(
    x, dt, dt_bias, A, B, C, D, state, slots, query_start, has_history, y,
    x_row, x_head, dt_row, b_row, b_group, c_row, c_group, dt_low, dt_high, most,
    H: tl.constexpr, P: tl.constexpr, N: tl.constexpr, NP: tl.constexpr, RATIO: tl.constexpr,
    BP: tl.constexpr, HAS_D: tl.constexpr, SOFTPLUS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """x: [T, H, P], dt: [T, H], A, D, dt_bias: [H], B, C: [T, H / RATIO, N], state: [slots, H, P, N]
    -> y [T, H, P]. Grid: (P / BP, H, S). Sequences with more rows than `most` are left as they are.
    """
    await_previous()
    block, head, s = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    p, n = block * BP + tl.arange(0, BP), tl.arange(0, NP)
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32) != 0
    rows = tl.where(past, P, 0)  # of the state that is there: a scalar joins no mask in the interpreter
    if end - first <= most:
        at = state + ((slot * H + head) * P + p[:, None]) * N + n[None, :]
        h = tl.load(at, mask=(p < rows)[:, None] & (n < N)[None, :], other=0.0).to(tl.float32)
        rate = tl.load(A + head) * 1.4426950408889634
        if HAS_D:
            skip = tl.load(D + head)
        if HAS_BIAS:
            bias = tl.load(dt_bias + head)
        group = head // RATIO
        xs, ds = x + head * x_head + p, dt + head
        bs, cs = B + group * b_group + n, C + group * c_group + n
        okp, okn = p < P, n < N
        row = tl.maximum(tl.minimum(first, end - 1), 0)  # of a sequence without rows some other one's
        u = tl.load(xs + row * x_row, mask=okp, other=0.0)
        b = tl.load(bs + row * b_row, mask=okn, other=0.0)
        c = tl.load(cs + row * c_row, mask=okn, other=0.0)
        step = tl.load(ds + row * dt_row)
        for i in range(first, end):
            row = i + tl.zeros([], tl.int64)
            then = tl.minimum(row + 1, end - 1)
            next_u = tl.load(xs + then * x_row, mask=okp, other=0.0)
            next_b = tl.load(bs + then * b_row, mask=okn, other=0.0)
            next_c = tl.load(cs + then * c_row, mask=okn, other=0.0)
            next_step = tl.load(ds + then * dt_row)
            move = step.to(tl.float32)
            if HAS_BIAS:
                move += bias
            if SOFTPLUS:
                move = tl.minimum(tl.maximum(softplus(move), dt_low), dt_high)
            value = u.to(tl.float32)
            added = (value * move)[:, None] * b.to(tl.float32)[None, :]
            h = tl.fma(h, tl.broadcast_to(tl.exp2(move * rate), (BP, NP)), added)
            out = tl.sum(h * c.to(tl.float32)[None, :], 1)
            if HAS_D:
                out += skip * value
            tl.store(y + (row * H + head) * P + p, out.to(y.dtype.element_ty), mask=okp)
            u, b, c, step = next_u, next_b, next_c, next_step
        tl.store(at, h.to(state.dtype.element_ty), mask=okp[:, None] & okn[None, :])


def head_constants(heads: int, dim: int, size: int, groups: int) -> dict[str, int]:
    """The constants that decodes and prompts share."""
    wide = triton.next_power_of_2(size)
    return {
        "H": heads,
        "P": dim,
        "N": size,
        "NP": wide,
        "RATIO": heads // groups,
        "BP": min(triton.next_power_of_2(dim), widen(max(NUMBERS // wide, 1), dim)),
        "num_warps": 1,
    }


@dataclass(frozen=True, slots=True)
class ScanLaunch:
    """The arguments that the kernels of a scan share."""

    tensors: tuple[Tensor, ...]  # the last one is the result
    numbers: tuple[float, ...]  # strides, then the limits of dt
    constants: dict[str, int]

    @property
    def y(self) -> Tensor:
        return self.tensors[-1]

    def walk(self, most: int) -> None:
        """Launch `scan_heads` over the sequences with at most so many rows."""
        x, slots = self.tensors[0], self.tensors[8]
        rows = self.constants["BP"]
        grid = (triton.cdiv(x.shape[2], rows), x.shape[1], len(slots))
        launch(scan_heads, grid, *self.tensors, *self.numbers, most, **self.constants)


def prepare_scan(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] | None,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
) -> ScanLaunch:
    """Arguments of `mamba2_scan_from_dt`; dt_limit None: of `mamba2_scan`, dt being steps."""
    x, dt, B, C = (m if m.stride(-1) == 1 else m.contiguous() for m in (x, dt, B, C))
    bias, skip = A if dt_bias is None else dt_bias, A if D is None else D
    constants = head_constants(x.shape[1], x.shape[2], B.shape[2], B.shape[1])
    constants |= {"HAS_D": D is not None, "SOFTPLUS": dt_limit is not None, "HAS_BIAS": dt_bias is not None}
    where = (slots, query_start, has_history, x.new_empty(x.shape))
    strides = (*x.stride()[:2], dt.stride(0), *B.stride()[:2], *C.stride()[:2])
    tensors = (x, dt, bias, A, B, C, skip, state, *where)
    return ScanLaunch(tensors, (*strides, *(dt_limit or (0.0, 0.0))), constants)


@mamba2_scan_from_dt.variant(NAME, on="cuda")
def scan_from_dt(
    x: Tensor,
    dt: Tensor,
    dt_bias: Tensor | None,
    dt_limit: tuple[float, float] | None,
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
    """`mamba2_scan_from_dt`: the same arguments and result. dt_limit None: `mamba2_scan`, of given steps."""
    made = prepare_scan(x, dt, dt_bias, dt_limit, A, B, C, D, state, slots, query_start, has_history)
    if len(x):
        made.walk(len(x))
    return made.y


@mamba2_scan.variant(NAME, on="cuda")
def scan_given_steps(
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
    where = (slots, query_start, has_history, num_decodes)
    y: Tensor = scan_from_dt(x, dt, None, None, A, B, C, D, state, *where)
    return y


POINTERS = {
    "x": "bf16*", "dt": "bf16*", "dt_bias": "fp32*", "A": "fp32*", "B": "bf16*", "C": "bf16*", "D": "fp32*",
    "state": "fp32*", "slots": "i64*", "query_start": "i64*", "has_history": "i1*", "y": "bf16*",
    **dict.fromkeys(("x_row", "x_head", "dt_row", "b_row", "b_group", "c_row", "c_group"), "i32!"),
    "dt_low": "fp32", "dt_high": "fp32", "most": "i32",
}  # fmt: skip
SHAPES = {  # heads, dim, state, groups, D, softplus
    "granite-4-h-small": (128, 64, 128, 1, True, True),
    "granite-4-h-tiny": (48, 64, 128, 1, True, True),
    "nemotron-h-8b": (128, 64, 128, 8, True, True),
    "falcon-h1-34b": (32, 128, 256, 2, True, True),
    "zamba2-7b": (112, 64, 64, 2, True, True),
    "minimax-text-01 lightning": (64, 128, 128, 64, False, False),
    "plamo 2 8b": (64, 128, 64, 1, True, False),
    "plamo 2 of 128 columns": (64, 128, 128, 1, True, False),
}


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, in every step."""
    for name, (heads, dim, size, groups, skips, soft) in SHAPES.items():
        constants = head_constants(heads, dim, size, groups)
        constants |= {"HAS_D": skips, "SOFTPLUS": soft, "HAS_BIAS": soft}
        warps, types = constants.pop("num_warps"), POINTERS if soft else POINTERS | {"dt": "fp32*"}
        yield KernelForm(
            f"scan_heads, {name}", scan_heads, types, constants, warps,
            demands=(("LDG.128",), ("STG.128",)), max_registers=128,
        )  # fmt: skip
