"""Griffin's gated linear recurrence over a ragged batch in one launch: decodes and chunks of prompts alike.

Every channel is a recurrence of one number. A program has BW channels of one sequence and walks its tokens in
order; nothing is shared between programs, so a row's bits depend on its history only, and a prompt may be cut
anywhere. Of several tokens the loads come first, because only they take long. De et al. 2024, section 2.4.
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
from plait.ops.rg_lru import rg_lru

NAME = "triton"
CHANNELS = 128  # of a program of one warp, in steps of decodes: loads of 16 bytes
PROMPT_CHANNELS = 64  # in steps with prompts: the walk of a program is short, and there are more of them
UNROLLED = 8  # tokens of which the loads come first, in steps with prompts


@triton.jit
def scan_gated_channels(
    x, gates, bias, rate, state, slots, query_start, has_history, y, x_row, gates_row,
    W: tl.constexpr, DIM: tl.constexpr, BW: tl.constexpr, U: tl.constexpr,
):  # fmt: skip
    """x: [T, W], gates: [T, W / DIM, 2 DIM], bias: [W / DIM, 2 DIM] -> y [T, W]. Grid: (W / BW, S)."""
    await_previous()
    block, s = tl.program_id(0), tl.program_id(1)
    i = block * BW + tl.arange(0, BW)
    ok = i < W
    opens = i // DIM * (2 * DIM) + i % DIM  # of a channel's input; what opens its recurrence is DIM behind it
    first, end = tl.load(query_start + s).to(tl.int64), tl.load(query_start + s + 1).to(tl.int64)
    slot, past = tl.load(slots + s).to(tl.int64), tl.load(has_history + s).to(tl.int32)
    h = tl.load(state + slot * W + i, mask=i < W * past, other=0.0)
    decay = tl.load(rate + i, mask=ok, other=0.0)
    enter_bias, keep_bias = tl.load(bias + opens, mask=ok), tl.load(bias + opens + DIM, mask=ok)
    for start in range(first, end, U):
        us, enters, keeps = (), (), ()
        for k in tl.static_range(U):
            row = start + k + tl.zeros([], tl.int64)
            there = i < tl.where(row < end, W, 0)
            u = tl.load(x + row * x_row + i, mask=there, other=0.0).to(tl.float32)
            at = gates + row * gates_row + opens
            enter = tl.load(at, mask=there, other=0.0).to(tl.float32)
            keep = tl.load(at + DIM, mask=there, other=0.0).to(tl.float32)
            us += (u,)  # type: ignore[assignment]
            enters += (enter,)  # type: ignore[assignment]
            keeps += (keep,)  # type: ignore[assignment]
        for k in tl.static_range(U):
            row = start + k + tl.zeros([], tl.int64)
            u = sigmoid(enters[k] + enter_bias) * us[k]
            log_a = decay * sigmoid(keeps[k] + keep_bias)
            moved = tl.fma(tl.exp(log_a), h, tl.sqrt(one_minus_exp(2.0 * log_a)) * u)
            whole = (past == 0) & (row == first)  # a sequence's first token is taken in whole
            moved = tl.where(whole, u, moved)
            h = tl.where(row < end, moved, h)
            tl.store(y + row * W + i, h.to(y.dtype.element_ty), mask=i < tl.where(row < end, W, 0))
    tl.store(state + slot * W + i, h, mask=ok)


def _constants(width: int, dim: int, is_decode: bool) -> dict[str, int]:
    """What the kernel is compiled for. is_decode: every sequence has one token."""
    channels, unrolled = (CHANNELS, 1) if is_decode else (PROMPT_CHANNELS, UNROLLED)
    return {"W": width, "DIM": dim, "BW": channels, "U": unrolled}


@rg_lru.variant(NAME, on="cuda")
def scan(
    x: Tensor,
    gates: Tensor,
    bias: Tensor,
    rate: Tensor,
    state: Tensor,
    slots: Tensor,
    query_start: Tensor,
    has_history: Tensor,
    num_decodes: int,
    positions: Tensor | None = None,
) -> Tensor:
    """`rg_lru`: the same arguments and result."""
    (tokens, width), seqs = x.shape, len(slots)
    y = torch.empty(tokens, width, dtype=x.dtype, device=x.device)
    if not tokens:
        return y
    x = x if x.stride(-1) == 1 else x.contiguous()
    gates = gates if gates[0].is_contiguous() else gates.contiguous()
    constants = _constants(width, width // gates.shape[1], tokens == seqs)
    launch(
        scan_gated_channels, (triton.cdiv(width, constants["BW"]), seqs),
        x, gates, bias, rate, state, slots, query_start, has_history, y, x.stride(0), gates.stride(0),
        **constants, num_warps=1,
    )  # fmt: skip
    return y


POINTERS = {
    **dict.fromkeys(("x", "gates", "y"), "bf16*"),
    **dict.fromkeys(("bias", "rate", "state"), "fp32*"),
    **dict.fromkeys(("slots", "query_start"), "i64*"),
    "has_history": "i1*",
    "x_row": "i32!",
    "gates_row": "i32!",
}
SHAPES = {"RecurrentGemma 2B": (2560, 256), "RecurrentGemma 9B": (4096, 256)}  # width, of a head


@with_float16
@with_float32
def forms() -> Iterator[KernelForm]:
    """What models of published sizes launch, for decodes and for steps with prompts."""
    for name, (width, dim) in SHAPES.items():
        for step in ("decodes", "prompts"):
            is_decode = step == "decodes"
            yield KernelForm(
                f"rg_lru, {name}, {step}", scan_gated_channels, POINTERS, _constants(width, dim, is_decode),
                num_warps=1, demands=(("LDG.128",) if is_decode else (),),
            )  # fmt: skip
